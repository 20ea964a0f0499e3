//! Frames between the engine and its worker, over a socket. Its bytes are described at the top of `worker.py`.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Bytes of a frame's lengths.
const LENGTHS: usize = 12;

/// The longest head of a reply, bytes: an error's message is cut far below it.
const MAX_HEAD: usize = 1 << 16;

/// How long a call may take, and how long the other end may be silent during it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    pub(super) end: Instant,
    pub(super) max_silence: Duration,
}

impl Deadline {
    /// The longest wait for the next byte. Errors: the time is over.
    fn wait(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        match left.min(self.max_silence) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            wait => Ok(wait),
        }
    }
}

/// Sends a frame.
pub(super) fn send(mut socket: &UnixStream, head: &[u8], payload: &[&[u8]], deadline: Deadline) -> io::Result<()> {
    let n_payload: usize = payload.iter().map(|part| part.len()).sum();
    let mut first = Vec::with_capacity(LENGTHS + head.len());
    first.extend((head.len() as u32).to_le_bytes());
    first.extend((n_payload as u64).to_le_bytes());
    first.extend(head);
    for mut part in std::iter::once(&first[..]).chain(payload.iter().copied()) {
        while !part.is_empty() {
            socket.set_write_timeout(Some(deadline.wait()?))?;
            match socket.write(part) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => part = &part[n..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Receives the head of a frame and the length of its payload, bytes.
pub(super) fn receive_head(socket: &UnixStream, deadline: Deadline) -> io::Result<(Vec<u8>, u64)> {
    let mut lengths = [0; LENGTHS];
    fill(socket, &mut lengths, deadline)?;
    let [a, b, c, d, payload @ ..] = lengths;
    let n_head = u32::from_le_bytes([a, b, c, d]) as usize;
    if n_head > MAX_HEAD {
        let message = format!("the head of a reply has {n_head} bytes; {MAX_HEAD} are possible");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut head = vec![0; n_head];
    fill(socket, &mut head, deadline)?;
    Ok((head, u64::from_le_bytes(payload)))
}

/// Receives as many bytes as `buffer` has.
pub(super) fn fill(mut socket: &UnixStream, buffer: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let mut n = 0;
    while n < buffer.len() {
        socket.set_read_timeout(Some(deadline.wait()?))?;
        match socket.read(&mut buffer[n..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => n += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Deadline {
        Deadline { end: Instant::now() + Duration::from_millis(300), max_silence: Duration::from_millis(50) }
    }

    #[test]
    fn a_frame_comes_through_and_silence_ends_a_wait() {
        let (a, b) = UnixStream::pair().unwrap();
        send(&a, b"{}", &[b"ab", b"c"], soon()).unwrap();
        assert_eq!(receive_head(&b, soon()).unwrap(), (b"{}".to_vec(), 3));
        let mut payload = [0; 3];
        fill(&b, &mut payload, soon()).unwrap();
        assert_eq!(&payload, b"abc");
        let began = Instant::now();
        assert!(receive_head(&b, soon()).is_err());
        assert!(began.elapsed() < Duration::from_millis(250), "silence is noticed before the deadline");
        drop(a);
        assert_eq!(receive_head(&b, soon()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn an_absurd_length_is_refused_before_memory_is_allocated() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[0xFF; LENGTHS]).unwrap();
        assert_eq!(receive_head(&b, soon()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_reader_that_stops_ends_a_send() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert!(send(&a, b"{}", &[&vec![0; 8 << 20]], soon()).is_err());
    }
}
