//! The addresses of one node, which may change while clients use them.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::net::TcpStream;

use super::call_failure::is_own_lack;

/// The longest wait for a connection to an address in the local network.
const CONNECT_DEADLINE: Duration = Duration::from_millis(500);

/// The addresses of one node, the best first. All clones change together.
///
/// It resolves the host name in a found node's URL, so a client keeps working when an address changes: each new
/// connection goes to the first address.
#[derive(Debug, Clone, Default)]
pub struct NodePaths(Arc<RwLock<Vec<SocketAddr>>>);

impl NodePaths {
    pub fn new(addresses: Vec<SocketAddr>) -> NodePaths {
        NodePaths(Arc::new(RwLock::new(addresses)))
    }

    /// The addresses, the best first.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the addresses.
    pub fn set(&self, addresses: Vec<SocketAddr>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = addresses;
    }
}

/// Returns true if something takes connections at an address, or if this process lacks what it takes to find out. Nothing is sent.
pub async fn is_open(address: SocketAddr) -> bool {
    let connected = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(address)).await;
    connected.is_ok_and(|connected| connected.err().is_none_or(|error| is_own_lack(&error)))
}

impl Resolve for NodePaths {
    fn resolve(&self, _: Name) -> Resolving {
        // The client tries them in order. The URL has the port.
        let addresses = self.addresses();
        Box::pin(async move { Ok(Box::new(addresses.into_iter()) as Addrs) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn clones_change_together_and_closed_ports_are_found_out() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let paths = NodePaths::new(Vec::new());
        paths.clone().set(vec![address]);
        assert_eq!(paths.addresses(), [address]);
        assert!(is_open(address).await);
        drop(listener);
        assert!(!is_open(address).await);
    }
}
