//! Replaces hyper's bare answers to invalid request heads with JSON errors.
//!
//! hyper creates no request for a head that it cannot parse: it writes a bare status, closes the connection, and offers
//! no hook. So its answer is recognised while it is written, and replaced. This is unambiguous: all our own replies
//! carry `x-request-id`, and none of our bodies begins like a head.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use baton_schemas::openai::{ErrorBody, ErrorEnvelope, ErrorKind};
use http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::request_id::{X_REQUEST_ID, drawn};

/// A bare answer has four lines and fewer bytes than this.
const MAX_BARE_BYTES: usize = 256;

/// A connection that replaces bare answers. It expects each head in a single write.
pub(in crate::http) struct Enveloped<S> {
    stream: S,
    /// The rest of a replacement that is being written.
    answer: Vec<u8>,
    n_written: usize,
}

impl<S> Enveloped<S> {
    pub(in crate::http) fn new(stream: S) -> Self {
        Enveloped { stream, answer: Vec::new(), n_written: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Enveloped<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Enveloped<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.answer.is_empty() {
            match bare_status(bytes) {
                Some(status) => this.answer = answer(status),
                None => return Pin::new(&mut this.stream).poll_write(cx, bytes),
            }
        }
        while let Some(rest) = this.answer.get(this.n_written..).filter(|rest| !rest.is_empty()) {
            match ready!(Pin::new(&mut this.stream).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => this.n_written += n,
            }
        }
        this.answer.clear();
        this.n_written = 0;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Returns the status if these bytes are a bare answer of hyper.
fn bare_status(bytes: &[u8]) -> Option<StatusCode> {
    if bytes.len() > MAX_BARE_BYTES || !bytes.starts_with(b"HTTP/1.1 4") {
        return None;
    }
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let (line, fields) = head.split_once("\r\n")?;
    let names = || fields.split("\r\n").filter_map(|field| field.split_once(": "));
    let is_ours = names().any(|(name, _)| name.eq_ignore_ascii_case(X_REQUEST_ID.as_str()));
    let is_empty = names().any(|(name, value)| name.eq_ignore_ascii_case("content-length") && value == "0");
    let status = line.split(' ').nth(1)?.parse().ok()?;
    (is_empty && !is_ours).then_some(status)
}

fn answer(status: StatusCode) -> Vec<u8> {
    let message = match status {
        StatusCode::URI_TOO_LONG => "The request's path is too long.",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => "The request has too many headers, or too long ones.",
        _ => "The request's head is not valid HTTP.",
    };
    let error = ErrorEnvelope { error: ErrorBody::new(ErrorKind::InvalidRequest, message) };
    let body = serde_json::to_string(&error).unwrap_or_default();
    let n = body.len();
    let id = drawn();
    let id = id.to_str().unwrap_or_default();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {n}\r\nconnection: close\r\n\
         {X_REQUEST_ID}: {id}\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bare_refusal_is_taken_for_one() {
        let check = |text: &str, expected: Option<u16>| {
            assert_eq!(bare_status(text.as_bytes()).map(|status| status.as_u16()), expected, "{text}");
        };
        let end = "connection: close\r\ncontent-length: 0\r\ndate: now\r\n\r\n";
        check(&format!("HTTP/1.1 400 Bad Request\r\n{end}"), Some(400));
        check(&format!("HTTP/1.1 431 Request Header Fields Too Large\r\n{end}"), Some(431));
        check(&format!("HTTP/1.1 400 Bad Request\r\nx-request-id: r\r\n{end}"), None);
        check(&format!("HTTP/1.1 200 OK\r\n{end}"), None);
        check(&format!("HTTP/1.1 400 Bad Request\r\n{end}more"), None);
        check("HTTP/1.1 400 Bad Request\r\ncontent-length: 7\r\n\r\n", None);
        check("HTTP/1.1 4", None);
    }
}
