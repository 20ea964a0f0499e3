//! The address that a node listens on: a Unix socket for a child process, or TCP.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tokio::net::{TcpListener, UnixListener, UnixStream};

use super::connection::AcceptedConnection;
use super::tls::ServerTls;
use crate::connections::{accept_any, bind_host};

/// `unix:/path/to.sock` or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    Unix(PathBuf),
    /// A TCP address; the host may be a name.
    Tcp(String),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if let Some(path) = s.strip_prefix("unix:") {
            return if path.is_empty() {
                Err("unix: needs a path".into())
            } else {
                Ok(ListenAddress::Unix(path.into()))
            };
        }
        let port = s.rsplit_once(':').map(|(_, port)| port);
        match port.and_then(|p| p.parse::<u16>().ok()) {
            Some(_) => Ok(ListenAddress::Tcp(s.to_owned())),
            None => Err(format!("{s:?} is neither HOST:PORT nor unix:PATH")),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ListenAddress::Tcp(address) => f.write_str(address),
        }
    }
}

impl ListenAddress {
    /// Returns true if only this machine can reach the address: a Unix socket, or a host whose addresses are all
    /// loopback. Errors: the host's name cannot be resolved.
    pub async fn is_private(&self) -> Result<bool, ListenError> {
        let ListenAddress::Tcp(address) = self else { return Ok(true) };
        let found = tokio::net::lookup_host(address).await.map_err(|e| ListenError::Other(self.clone(), e))?;
        Ok(found.into_iter().all(|address| address.ip().to_canonical().is_loopback()))
    }
}

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another program uses the address.
    #[error("{0} is in use by another program. Stop it, or choose another address with --listen.")]
    InUse(ListenAddress),
    /// Any other error of the system.
    #[error("cannot listen on {0}: {1}")]
    Other(ListenAddress, std::io::Error),
}

/// A bound socket.
pub enum Listener {
    /// A Unix socket and its file, which is removed when the listener is dropped.
    Unix(UnixListener, SocketFile),
    /// TCP, with TLS if there is a certificate. `localhost` has a socket for IPv4 and one for IPv6.
    Tcp(Vec<TcpListener>, Option<ServerTls>),
}

impl Listener {
    /// Binds an address. A Unix socket's folder must be private to the user, since the permissions of the socket itself
    /// do not protect it on all systems.
    pub async fn bind(address: &ListenAddress) -> Result<Listener, ListenError> {
        let explain = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::AddrInUse => ListenError::InUse(address.clone()),
            _ => ListenError::Other(address.clone(), e),
        };
        match address {
            ListenAddress::Unix(path) => {
                remove_stale(path).await;
                let listener = UnixListener::bind(path).map_err(explain)?;
                Ok(Listener::Unix(listener, SocketFile(path.clone())))
            }
            ListenAddress::Tcp(address) => Ok(Listener::Tcp(bind_host(address).await.map_err(explain)?, None)),
        }
    }

    /// Turns on TLS for TCP connections. A Unix socket needs none and stays as it is.
    pub fn with_tls(self, tls: ServerTls) -> Listener {
        match self {
            Listener::Tcp(listeners, _) => Listener::Tcp(listeners, Some(tls)),
            unix => unix,
        }
    }

    /// The first TCP address; if port 0 was requested, with the port that the system chose.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(listeners, _) => listeners.first()?.local_addr().ok(),
            Listener::Unix(..) => None,
        }
    }

    /// Accepts the next connection. Dropping the future loses no connection.
    pub(super) async fn accept(&self) -> std::io::Result<AcceptedConnection> {
        match self {
            Listener::Unix(listener, _) => Ok(AcceptedConnection::Unix(listener.accept().await?.0)),
            Listener::Tcp(listeners, tls) => {
                let (stream, _peer) = accept_any(listeners).await?;
                Ok(match tls {
                    None => AcceptedConnection::Tcp(stream),
                    Some(tls) => AcceptedConnection::Tls(stream, tls.current()),
                })
            }
        }
    }
}

/// Removes a socket's file that a killed process left. A socket that refuses connections has no listener.
async fn remove_stale(path: &Path) {
    let refused = |e: std::io::Error| e.kind() == std::io::ErrorKind::ConnectionRefused;
    if UnixStream::connect(path).await.is_err_and(refused) {
        // If it cannot be removed, binding fails.
        drop(SocketFile(path.to_owned()));
    }
}

/// Removes a socket's file when dropped.
pub struct SocketFile(PathBuf);

impl SocketFile {
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::debug!(%error, "a socket's file cannot be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_of_a_killed_process_is_taken_over_and_one_in_use_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let address = ListenAddress::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let _living = Listener::bind(&address).await.unwrap();
        assert!(matches!(Listener::bind(&address).await, Err(ListenError::InUse(_))));
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_node_on_localhost_answers_on_ipv4_and_ipv6() {
        if TcpListener::bind("[::1]:0").await.is_err() {
            eprintln!("skipped: this machine has no IPv6 loopback");
            return;
        }
        let listener = Listener::bind(&"localhost:0".parse().unwrap()).await.unwrap();
        let port = listener.tcp_address().unwrap().port();
        for host in ["127.0.0.1", "::1"] {
            let (client, accepted) = tokio::join!(tokio::net::TcpStream::connect((host, port)), listener.accept());
            assert!(client.is_ok() && accepted.is_ok(), "{host}");
        }
    }

    #[tokio::test]
    async fn only_loopback_and_sockets_are_private() {
        for (text, expected) in [
            ("unix:/tmp/a.sock", true),
            ("127.0.0.1:9000", true),
            ("[::1]:9000", true),
            ("localhost:9000", true),
            ("0.0.0.0:9000", false),
            ("[::]:9000", false),
            ("192.168.0.7:9000", false),
        ] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().is_private().await.unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn addresses_are_read_and_printed_alike() {
        for text in ["unix:/tmp/a.sock", "127.0.0.1:80", "[::1]:0", "spark.local:9000"] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        for text in ["", "unix:", "localhost", "host:port", "1.2.3.4:70000"] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
    }
}
