//! One connection to a node, from the accept to where HTTP begins.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::tls::ServerTls;

/// First byte of a TLS connection: the record type of a handshake (RFC 8446, section 5.1).
const TLS_HANDSHAKE: u8 = 22;

/// What a client hears that speaks plain HTTP where TLS is spoken: an
/// [`NodeErrorReply`](baton_schemas::node::ErrorReply).
const USE_TLS: &str = r#"{"error":{"kind":"lost","detail":"this node speaks TLS: its address begins with https://"}}"#;

/// What is still read of a request that is refused unread. Closing with bytes unread would reset the connection, and
/// the reply with it.
const MAX_DISCARDED_BYTES: u64 = 64 << 10;

/// Anything that HTTP can be spoken over.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A connection that was just accepted.
pub(super) enum AcceptedConnection {
    /// From this machine.
    Unix(UnixStream),
    /// Plain HTTP follows.
    Tcp(TcpStream),
    /// A TLS handshake follows.
    Tls(TcpStream, ServerTls),
}

impl AcceptedConnection {
    /// What HTTP is spoken over; `None` if it does not come to that. Has no deadline of its own.
    pub(super) async fn open(self) -> Option<Box<dyn Stream>> {
        match self {
            AcceptedConnection::Unix(stream) => Some(Box::new(stream)),
            AcceptedConnection::Tcp(stream) => Some(Box::new(without_delay(stream))),
            AcceptedConnection::Tls(stream, tls) => shake_hands(without_delay(stream), &tls).await,
        }
    }
}

/// A token is a small write: without this the network stack gathers several before it sends.
fn without_delay(stream: TcpStream) -> TcpStream {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection delays small writes");
    }
    stream
}

async fn shake_hands(mut stream: TcpStream, tls: &ServerTls) -> Option<Box<dyn Stream>> {
    let mut first = [0];
    let n_seen = stream.peek(&mut first).await.ok()?;
    if n_seen > 0 && first != [TLS_HANDSHAKE] {
        if let Err(error) = refuse_plain_http(&mut stream).await {
            tracing::debug!(%error, "a client that spoke no TLS left");
        }
        return None;
    }
    match tls.acceptor().accept(stream).await {
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
