//! Opens sockets: the address, TCP, and TLS where the URL asks for it.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_link::transport::{ALPN_HTTP1, ALPN_HTTP2, Transport};
use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tower::ServiceExt;

/// The interval of TCP's own signs of life on a silent connection, so that a machine that vanished is noticed.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// The version of HTTP that a connection speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpVersion {
    Http1,
    Http2,
}

/// A connected socket, with TLS or without.
pub(super) type Socket = Box<dyn ReadWrite>;

/// A plain or a TLS socket.
pub(super) trait ReadWrite: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ReadWrite for S {}

/// A new connection.
pub(super) struct OpenSocket {
    pub(super) socket: Socket,
    pub(super) version: HttpVersion,
}

/// Opens connections to one server.
pub(super) struct Opener {
    /// The server's URL without a path.
    url: String,
    uri: Uri,
    tcp: HttpConnector,
    tls: Option<Tls>,
    deadline: Duration,
}

struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl Opener {
    /// Errors, for the operator: the URL is not valid, or TLS cannot be set up.
    pub(super) fn new(url: &str, transport: &Transport, deadline: Duration) -> Result<Opener, String> {
        // This parser writes international names in ASCII, and leaves out a scheme's own port.
        let parsed = reqwest::Url::parse(url).map_err(|error| format!("the URL is not valid: {error}"))?;
        let origin = parsed.origin().ascii_serialization();
        let uri = Uri::try_from(&origin).map_err(|error| format!("the URL is not valid: {error}"))?;
        let host = uri.host().unwrap_or_default();
        let tls = match parsed.scheme() {
            "https" => {
                let name = ServerName::try_from(host.trim_start_matches('[').trim_end_matches(']').to_owned());
                let name = name.map_err(|error| format!("the URL's host is not valid: {error}"))?;
                let config = transport.client_tls(&[ALPN_HTTP2, ALPN_HTTP1])?;
                Some(Tls { connector: TlsConnector::from(Arc::new(config)), name })
            }
            _ => None,
        };
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(TCP_KEEPALIVE));
        tcp.set_keepalive_interval(Some(TCP_KEEPALIVE));
        Ok(Opener { url: origin, uri, tcp, tls, deadline })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn is_https(&self) -> bool {
        self.tls.is_some()
    }

    /// How long opening a connection may take.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The server's host and port.
    pub(super) fn authority(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }

    /// A path of this server as a whole URL.
    pub(super) fn absolute(&self, path: &str) -> Uri {
        Uri::try_from(format!("{}{path}", self.url)).unwrap_or_default()
    }

    /// Opens a connection.
    pub(super) async fn open(&self) -> Result<OpenSocket, Box<dyn Error + Send + Sync>> {
        let tcp = self.tcp.clone().oneshot(self.uri.clone()).await?.into_inner();
        let Some(Tls { connector, name }) = &self.tls else {
            return Ok(OpenSocket { socket: Box::new(tcp), version: HttpVersion::Http1 });
        };
        let socket = connector.connect(name.clone(), tcp).await?;
        let version = match socket.get_ref().1.alpn_protocol() {
            Some(ALPN_HTTP2) => HttpVersion::Http2,
            None | Some(ALPN_HTTP1) => HttpVersion::Http1,
            Some(_) => return Err(io::Error::other("the server chose a protocol that was not offered").into()),
        };
        Ok(OpenSocket { socket: Box::new(socket), version })
    }
}

/// Leaves out the TLS configuration.
impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opener").field("url", &self.url).finish_non_exhaustive()
    }
}
