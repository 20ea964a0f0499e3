//! Opens a connection to a node, from the accepted socket to the start of HTTP.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::tls::Certificate;
use crate::connections::{ConnectionDeadlines, tune};
use crate::proof::ConnectionEnd;

/// The deadlines of a node's connections.
pub(super) const DEADLINES: ConnectionDeadlines = ConnectionDeadlines {
    // Nodes and endpoints send the handshake and the first head at once.
    first_head: Duration::from_secs(10),
    // Longer than `Transport` keeps an idle connection.
    head: Duration::from_secs(60),
    // An endpoint stops reading while its client does. It disconnects that client first: after 30 s, and at most a
    // quarter more.
    read: Duration::from_secs(60),
};

/// First byte of a TLS connection: the record type of a handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 22;

/// The body of the reply to plain HTTP on a TLS port: a [`NodeErrorReply`](baton_schemas::node::NodeErrorReply).
const USE_TLS: &str = r#"{"error":{"kind":"lost","detail":"this node speaks TLS: its address begins with https://"}}"#;

/// Bytes that are still read from a refused request. Closing with unread bytes would reset the connection and lose the
/// reply.
const MAX_DISCARDED_BYTES: u64 = 64 << 10;

/// A byte stream for HTTP.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A connection that was just accepted.
pub(super) enum AcceptedConnection {
    /// A connection on a Unix socket.
    Unix(UnixStream),
    /// A TCP connection for plain HTTP.
    Tcp(TcpStream),
    /// A TCP connection for TLS, before the handshake.
    Tls(TcpStream, Certificate),
}

impl AcceptedConnection {
    /// Where it ends, for proofs of the cluster key. `None` for a Unix socket.
    pub(super) fn end(&self) -> Option<ConnectionEnd> {
        let (stream, certificate) = match self {
            AcceptedConnection::Unix(_) => return None,
            AcceptedConnection::Tcp(stream) => (stream, None),
            AcceptedConnection::Tls(stream, certificate) => (stream, Some(certificate.hash)),
        };
        Some(ConnectionEnd { address: stream.local_addr().ok()?, certificate })
    }

    /// The stream for HTTP. `None` if the TLS handshake fails. The caller sets the deadline.
    pub(super) async fn open(self) -> Option<Box<dyn Stream>> {
        match self {
            AcceptedConnection::Unix(stream) => Some(Box::new(stream)),
            AcceptedConnection::Tcp(stream) => Some(Box::new(tuned(stream))),
            AcceptedConnection::Tls(stream, certificate) => shake_hands(tuned(stream), &certificate).await,
        }
    }
}

/// Sets the socket's options. KV moves in bulk, so the system chooses the size of the send buffer.
fn tuned(stream: TcpStream) -> TcpStream {
    tune(&stream, DEADLINES.read, None);
    stream
}

async fn shake_hands(mut stream: TcpStream, certificate: &Certificate) -> Option<Box<dyn Stream>> {
    let mut first = [0];
    let n_seen = stream.peek(&mut first).await.ok()?;
    if n_seen > 0 && first != [TLS_HANDSHAKE] {
        if let Err(error) = refuse_plain_http(&mut stream).await {
            tracing::debug!(%error, "a client that speaks no TLS left before it read the error");
        }
        return None;
    }
    match certificate.acceptor().accept(stream).await {
        Ok(stream) => Some(Box::new(stream)),
        Err(error) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
    }
}

async fn refuse_plain_http(stream: &mut TcpStream) -> std::io::Result<()> {
    let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let reply = format!("{head}content-length: {}\r\n\r\n{USE_TLS}", USE_TLS.len());
    stream.write_all(reply.as_bytes()).await?;
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(MAX_DISCARDED_BYTES), &mut tokio::io::sink()).await?;
    Ok(())
}
