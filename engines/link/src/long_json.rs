//! JSON bodies of calls to nodes and upstreams. Long ones take tens of milliseconds, so they are parsed and written on
//! threads of their own instead of on those that serve all streams.

use std::io::{self, Write};

use serde::Serialize;
use tokio::task::{JoinError, spawn_blocking};

/// Longer bodies are parsed or written on a thread of their own.
const LONG: usize = 64 << 10;

/// Most bodies are shorter, so their buffer never grows.
const USUAL: usize = 1 << 10;

/// Parses a body with `parse`. Errors: `parse` panicked.
pub async fn parsed<T: Send + 'static>(
    body: Vec<u8>,
    parse: impl FnOnce(&[u8]) -> T + Send + 'static,
) -> Result<T, JoinError> {
    match body.len() {
        ..=LONG => Ok(parse(&body)),
        _ => spawn_blocking(move || parse(&body)).await,
    }
}

/// Writes a value as JSON. Errors: it has no form in JSON.
pub async fn written<T: Serialize + Send + 'static>(value: T) -> io::Result<Vec<u8>> {
    // Only writing shows how long it gets.
    let mut short = ShortBody(Vec::with_capacity(USUAL));
    match serde_json::to_writer(&mut short, &value) {
        Ok(()) => Ok(short.0),
        Err(_too_long) => Ok(spawn_blocking(move || serde_json::to_vec(&value)).await??),
    }
}

/// Takes up to [`LONG`] bytes.
struct ShortBody(Vec<u8>);

impl Write for ShortBody {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LONG {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::thread::{self, ThreadId};

    use serde::Serializer;

    use super::*;

    /// A text that notes which thread wrote it last.
    struct Noted(String, Arc<Mutex<Option<ThreadId>>>);

    impl Serialize for Noted {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            *self.1.lock().unwrap() = Some(thread::current().id());
            serializer.serialize_str(&self.0)
        }
    }

    #[tokio::test]
    async fn only_long_bodies_take_another_thread() {
        for (n, is_long) in [(10, false), (LONG + 1, true)] {
            let writer = Arc::default();
            let body = written(Noted("x".repeat(n), Arc::clone(&writer))).await.unwrap();
            let is_elsewhere = |id: ThreadId| id != thread::current().id();
            assert_eq!((body.len(), writer.lock().unwrap().map(is_elsewhere)), (n + 2, Some(is_long)));
            let parser = parsed(body, |_body| thread::current().id()).await.unwrap();
            assert_eq!(is_elsewhere(parser), is_long);
        }
    }
}
