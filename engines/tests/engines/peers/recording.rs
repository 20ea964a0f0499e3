//! A node's whole reply as it was sent, and which of its bytes are records.

/// An HTTP/1.1 reply with its head.
#[derive(Debug, Clone)]
pub(crate) struct Recording {
    pub(crate) raw: Vec<u8>,
    /// The offsets in `raw` of the body's bytes, without the framing of HTTP's chunks.
    pub(crate) payload: Vec<usize>,
}

impl Recording {
    /// Finds the body in a complete reply.
    pub(crate) fn new(raw: Vec<u8>) -> Recording {
        let head_end = 4 + raw.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(raw[..head_end].to_vec()).unwrap().to_ascii_lowercase();
        let payload = match head.contains("transfer-encoding: chunked") {
            false => (head_end..raw.len()).collect(),
            true => chunks(&raw, head_end),
        };
        Recording { raw, payload }
    }

    /// One past the last byte of the body.
    pub(crate) fn payload_end(&self) -> usize {
        self.payload.last().map_or(0, |last| last + 1)
    }
}

fn chunks(raw: &[u8], mut at: usize) -> Vec<usize> {
    let mut payload = Vec::new();
    loop {
        let line_end = at + raw[at..].windows(2).position(|window| window == b"\r\n").expect("a chunk's size");
        let length = usize::from_str_radix(std::str::from_utf8(&raw[at..line_end]).unwrap(), 16).unwrap();
        if length == 0 {
            return payload;
        }
        let data = line_end + 2;
        payload.extend(data..data + length);
        at = data + length + 2;
    }
}
