//! HTTP/1.1 connections to one server. They are kept and used again, the last one first.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::args::ServerSettings;
use super::fault::RequestFailure;

/// The longest wait for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// A connection that can take a request.
pub(super) type Connection = SendRequest<Full<Bytes>>;

/// Where a server is, and what every request to it carries.
struct ServerAddress {
    /// `host:port`
    authority: String,
    tls: Option<TlsAddress>,
    headers: HeaderMap,
    /// Of the base address, without a slash at its end.
    path: String,
}

struct TlsAddress {
    connector: TlsConnector,
    name: ServerName<'static>,
}

/// The connections to a server.
pub(super) struct ServerConnections {
    address: ServerAddress,
    idle: RefCell<Vec<Connection>>,
    n_opened: Cell<u64>,
}

impl ServerConnections {
    /// Opens no connection yet. Errors: the address or the key cannot be sent.
    pub(super) fn new(server: &ServerSettings) -> Result<ServerConnections, CommandFailure> {
        let url = reqwest::Url::parse(&server.base)?;
        let host = url.host_str().unwrap_or_default().to_owned();
        let port = url.port_or_known_default().unwrap_or(80);
        let mut headers = HeaderMap::new();
        headers.insert(
            HOST,
            HeaderValue::from_str(server.base.split_once("://").map_or("", |(_, rest)| authority(rest)))?,
        );
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &server.key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let tls = match url.scheme() {
            "https" => Some(TlsAddress {
                connector: TlsConnector::from(Arc::new(tls_config()?)),
                name: ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?,
            }),
            _ => None,
        };
        let path = url.path().trim_end_matches('/').to_owned();
        let address = ServerAddress { authority: format!("{host}:{port}"), tls, headers, path };
        Ok(ServerConnections { address, idle: RefCell::default(), n_opened: Cell::new(0) })
    }

    /// Connections that were opened so far.
    pub(super) fn n_opened(&self) -> u64 {
        self.n_opened.get()
    }

    /// Sends a request on an idle connection, or on a new one. The connection is put back with [`ServerConnections::keep`]
    /// after the reply's end. Errors: no connection, or a new one broke before the reply's head.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Connection, Response<Incoming>), RequestFailure> {
        let uri = format!("{}{path}", self.address.path);
        let uri: Uri = uri.parse().map_err(|_| RequestFailure::NoConnection)?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = self.address.headers.clone();
        let mut idle = self.idle.borrow_mut().pop();
        loop {
            let kept = idle.take().filter(|connection| !connection.is_closed());
            let is_new = kept.is_none();
            let mut connection = match kept {
                Some(connection) => connection,
                None => self.open().await?,
            };
            if connection.ready().await.is_ok() {
                match connection.try_send_request(request).await {
                    Ok(response) => return Ok((connection, response)),
                    Err(mut error) => request = error.take_message().ok_or(RequestFailure::ConnectionLost)?,
                }
            }
            // A server may close a connection while it is idle, but not one that was just opened.
            if is_new {
                return Err(RequestFailure::ConnectionLost);
            }
        }
    }

    /// Keeps a connection for later requests.
    pub(super) fn keep(&self, connection: Connection) {
        self.idle.borrow_mut().push(connection);
    }

    /// Closes idle connections.
    pub(super) fn close(&self) {
        self.idle.borrow_mut().clear();
    }

    async fn open(&self) -> Result<Connection, RequestFailure> {
        let opening = tokio::time::timeout(CONNECT_DEADLINE, self.connect()).await;
        opening.map_err(|_| RequestFailure::NoConnection)?.ok_or(RequestFailure::NoConnection)
    }

    async fn connect(&self) -> Option<Connection> {
        let stream = TcpStream::connect(&self.address.authority).await.ok()?;
        stream.set_nodelay(true).ok()?;
        self.n_opened.set(self.n_opened.get() + 1);
        match &self.address.tls {
            None => handshake(stream).await,
            Some(tls) => handshake(tls.connector.connect(tls.name.clone(), stream).await.ok()?).await,
        }
    }
}

/// The host and port of a URL without its scheme.
fn authority(rest: &str) -> &str {
    rest.split_once('/').map_or(rest, |(authority, _)| authority)
}

async fn handshake(stream: impl AsyncRead + AsyncWrite + Unpin + 'static) -> Option<Connection> {
    let (connection, driver) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    // It ends when the connection is dropped or broken; requests see the error.
    tokio::task::spawn_local(driver);
    Some(connection)
}

/// Trusts the system's certificates; `SSL_CERT_FILE` names others.
fn tls_config() -> Result<rustls::ClientConfig, CommandFailure> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// A body of at most `most` bytes. Errors: it is longer, or breaks off.
pub(super) async fn whole(mut body: Incoming, most: usize) -> Result<Bytes, RequestFailure> {
    let mut read = Bytes::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| RequestFailure::ConnectionLost)?;
        let Ok(bytes) = frame.into_data() else { continue };
        if read.len() + bytes.len() > most {
            return Err(RequestFailure::TooLong);
        }
        // Most bodies arrive whole.
        read = if read.is_empty() { bytes } else { [read, bytes].concat().into() };
    }
    Ok(read)
}
