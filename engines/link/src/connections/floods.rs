//! Closes HTTP/2 connections that flood the server with frames which cost work and carry nothing.
//!
//! h2 bounds floods of CONTINUATION, of small DATA, and of its own resets for a peer's errors. It answers any number of
//! pings and settings, applies any number of windows of one byte, and forgets resets of requests that have begun. So
//! these frames are counted here, on their way to h2.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What an HTTP/2 connection begins with (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The length of a frame's header: 3 bytes of length, type, flags, 4 bytes of stream (RFC 9113, section 4.1).
const HEADER_BYTES: usize = 9;

/// The cost of frames that a connection may send in each [`PERIOD`]. Readers send a window about once for each 1,000
/// bytes at most, and 128 busy streams have a few megabytes a second.
const MAX_COST: u32 = 40_000;

/// The period of [`MAX_COST`].
const PERIOD: Duration = Duration::from_secs(10);

/// A connection whose incoming HTTP/2 frames are counted. HTTP/1.1 passes unchanged. Reading fails in a flood.
pub(super) struct FloodGuard<S> {
    stream: S,
    frames: FrameCounter,
}

impl<S> FloodGuard<S> {
    pub(super) fn new(stream: S) -> Self {
        FloodGuard { stream, frames: FrameCounter::new() }
    }
}

/// Follows the frames of a connection, and sums up what they cost.
struct FrameCounter {
    part: Part,
    cost: u32,
    since: Instant,
}

/// The part of the connection that comes next.
enum Part {
    /// The preface, of which `n` bytes have come.
    Preface { n: usize },
    /// A frame's header, of which `n` bytes have come.
    Header { bytes: [u8; HEADER_BYTES], n: usize },
    /// The rest of a frame.
    Payload { n_left: usize },
    /// Not HTTP/2.
    Http1,
}

impl FrameCounter {
    fn new() -> Self {
        FrameCounter { part: Part::Preface { n: 0 }, cost: 0, since: Instant::now() }
    }

    /// Follows the next bytes. Returns false in a flood.
    fn follow(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let n_used = match &mut self.part {
                Part::Http1 => return true,
                Part::Preface { n } => {
                    let expected = &PREFACE[*n..];
                    let n_new = expected.len().min(bytes.len());
                    *n += n_new;
                    if bytes[..n_new] != expected[..n_new] {
                        self.part = Part::Http1;
                    } else if *n == PREFACE.len() {
                        self.part = Part::Header { bytes: [0; HEADER_BYTES], n: 0 };
                    }
                    n_new
                }
                Part::Header { bytes: header, n } => {
                    let n_new = (HEADER_BYTES - *n).min(bytes.len());
                    header[*n..*n + n_new].copy_from_slice(&bytes[..n_new]);
                    *n += n_new;
                    if *n == HEADER_BYTES {
                        let [a, b, c, kind, ..] = *header;
                        self.part = Part::Payload { n_left: u32::from_be_bytes([0, a, b, c]) as usize };
                        if !self.pay(cost(kind)) {
                            return false;
                        }
                    }
                    n_new
                }
                Part::Payload { n_left } => {
                    let n_new = (*n_left).min(bytes.len());
                    *n_left -= n_new;
                    if *n_left == 0 {
                        self.part = Part::Header { bytes: [0; HEADER_BYTES], n: 0 };
                    }
                    n_new
                }
            };
            bytes = &bytes[n_used..];
        }
        true
    }

    fn pay(&mut self, cost: u32) -> bool {
        self.cost += cost;
        if self.cost > MAX_COST && self.since.elapsed() >= PERIOD {
            self.cost = cost;
            self.since = Instant::now();
        }
        self.cost <= MAX_COST
    }
}

/// What a frame of a type costs. A reset has begun a request in vain, and settings are applied to every stream.
fn cost(kind: u8) -> u32 {
    match kind {
        // DATA, HEADERS, CONTINUATION: h2 bounds them.
        0 | 1 | 9 => 0,
        // RST_STREAM, SETTINGS.
        3 | 4 => 40,
        _ => 1,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FloodGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let n_before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        match self.frames.follow(&buffer.filled()[n_before..]) {
            true => Poll::Ready(Ok(())),
            false => Poll::Ready(Err(io::Error::other("a flood of HTTP/2 frames"))),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FloodGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 1], payload].concat()
    }

    #[test]
    fn frames_are_counted_wherever_reads_split_them() {
        let ping = frame(6, &[0; 8]);
        let data = frame(0, &[6; 100]);
        let connection = [PREFACE, &frame(4, &[]), &ping, &data, &frame(0, &[]), &ping].concat();
        for n_at_once in [1, 2, 5, 9, 24, connection.len()] {
            let mut frames = FrameCounter::new();
            assert!(connection.chunks(n_at_once).all(|bytes| frames.follow(bytes)));
            assert_eq!(frames.cost, cost(4) + 2 * cost(6), "{n_at_once} bytes at once");
        }
    }

    #[test]
    fn http_1_and_much_data_are_no_flood() {
        let mut frames = FrameCounter::new();
        assert!(frames.follow(b"POST / HTTP/1.1\r\n\r\n") && frames.follow(&frame(6, &[0; 8]).repeat(100_000)));
        let mut frames = FrameCounter::new();
        assert!(frames.follow(PREFACE) && frames.follow(&frame(0, &[0; 8]).repeat(100_000)));
        assert!(!frames.follow(&frame(6, &[0; 8]).repeat(100_000)));
    }
}
