//! HTTP/1.1 connections to one server. They are kept and used again, the last one first.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use baton_link::transport::{ALPN_HTTP1, explain_tls};
use baton_proxy::serve::CommandFailure;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::fault::RequestFailure;
use super::settings::ServerSettings;

/// The longest wait for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// A connection that can take a request.
pub(super) type ServerConnection = SendRequest<Full<Bytes>>;

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
    idle: RefCell<Vec<ServerConnection>>,
    n_opened: Cell<u64>,
    /// Why the last connection could not be opened.
    last_error: RefCell<String>,
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
            "https" => {
                let config = server.transport.client_tls(&[ALPN_HTTP1]).map_err(CommandFailure)?;
                let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
                Some(TlsAddress { connector: TlsConnector::from(Arc::new(config)), name })
            }
            _ => None,
        };
        let path = url.path().trim_end_matches('/').to_owned();
        let address = ServerAddress { authority: format!("{host}:{port}"), tls, headers, path };
        Ok(ServerConnections {
            address,
            idle: RefCell::default(),
            n_opened: Cell::new(0),
            last_error: RefCell::default(),
        })
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
    ) -> Result<(ServerConnection, Response<Incoming>), RequestFailure> {
        let uri = format!("{}{path}", self.address.path);
        let uri: Uri = uri.parse().map_err(|_| RequestFailure::NoConnection)?;
        let request = || {
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = self.address.headers.clone();
            request
        };
        let mut idle = self.idle.borrow_mut().pop();
        loop {
            let kept = idle.take().filter(|connection| !connection.is_closed());
            let is_new = kept.is_none();
            let mut connection = match kept {
                Some(connection) => connection,
                None => self.open().await?,
            };
            if connection.ready().await.is_ok()
                && let Ok(response) = connection.send_request(request()).await
            {
                return Ok((connection, response));
            }
            // A server may close a connection after a reply, while the next request is on its way, but not one that was
            // just opened.
            if is_new {
                return Err(RequestFailure::ConnectionLost);
            }
        }
    }

    /// Keeps a connection for later requests.
    pub(super) fn keep(&self, connection: ServerConnection) {
        self.idle.borrow_mut().push(connection);
    }

    /// Closes idle connections.
    pub(super) fn close(&self) {
        self.idle.borrow_mut().clear();
    }

    /// Why the last connection could not be opened.
    pub(super) fn last_error(&self) -> String {
        self.last_error.borrow().clone()
    }

    async fn open(&self) -> Result<ServerConnection, RequestFailure> {
        let late = || format!("no connection within {} s", CONNECT_DEADLINE.as_secs());
        let opening = tokio::time::timeout(CONNECT_DEADLINE, self.connect()).await;
        opening.map_err(|_| late()).flatten().map_err(|error| {
            *self.last_error.borrow_mut() = error;
            RequestFailure::NoConnection
        })
    }

    async fn connect(&self) -> Result<ServerConnection, String> {
        let plain = |error: std::io::Error| error.to_string();
        let stream = TcpStream::connect(&self.address.authority).await.map_err(plain)?;
        stream.set_nodelay(true).map_err(plain)?;
        self.n_opened.set(self.n_opened.get() + 1);
        match &self.address.tls {
            None => handshake(stream).await,
            Some(tls) => {
                let secured = tls.connector.connect(tls.name.clone(), stream).await;
                let why = |error: std::io::Error| {
                    explain_tls(&error, Some(&self.address.authority)).unwrap_or_else(|| format!("TLS failed: {error}"))
                };
                handshake(secured.map_err(why)?).await
            }
        }
    }
}

/// The host and port of a URL without its scheme.
fn authority(rest: &str) -> &str {
    rest.split_once('/').map_or(rest, |(authority, _)| authority)
}

async fn handshake(stream: impl AsyncRead + AsyncWrite + Unpin + 'static) -> Result<ServerConnection, String> {
    let (connection, driver) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    // It ends when the connection is dropped or broken; requests see the error.
    tokio::task::spawn_local(driver);
    Ok(connection)
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

#[cfg(test)]
mod tests {
    use baton_link::transport::Transport;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::ServerConfig;
    use tokio_rustls::rustls::crypto::ring::default_provider;
    use tokio_rustls::rustls::pki_types::PrivateKeyDer;

    use super::*;

    #[tokio::test]
    async fn a_server_with_a_certificate_of_the_operator_is_measured_if_its_authority_is_named() {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let ca = folder.path().join("ca.pem");
        std::fs::write(&ca, made.cert.pem()).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let acceptor =
            TlsAcceptor::from(Arc::new(builder.with_single_cert(vec![made.cert.der().clone()], key).unwrap()));
        let listener = TcpListener::bind("localhost:0").await.unwrap();
        let base = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let _ = stream.read(&mut [0; 4096]).await.unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nwell").await.unwrap();
            }
        });
        let ask = async |ca| {
            let transport = Transport::new(ca, true).unwrap();
            let server = ServerSettings {
                name: String::new(),
                base: base.clone(),
                key: None,
                model: None,
                pids: vec![],
                transport,
            };
            let connections = ServerConnections::new(&server).unwrap();
            let (_connection, reply) = connections.send(Method::GET, "/v1/models", Bytes::new()).await?;
            whole(reply.into_body(), 16).await
        };
        let (trusting, untrusting) =
            tokio::task::LocalSet::new().run_until(async { (ask(Some(&*ca)).await, ask(None).await) }).await;
        assert_eq!(trusting.unwrap(), "well");
        assert!(matches!(untrusting, Err(RequestFailure::NoConnection)));
    }
}
