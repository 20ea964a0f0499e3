//! A node behind each kind of socket.

use std::sync::Arc;

use baton_link::Engine;
use baton_link::node::{ClusterKey, ListenAddress, Listener, router};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_link::transport::Transport;
use baton_schemas::node::Role;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::KEY;
use super::ca::Ca;

/// How an endpoint reaches a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    Tcp,
    Tls,
    Unix,
}

impl Link {
    pub(crate) const ALL: [Link; 3] = [Link::Tcp, Link::Tls, Link::Unix];
}

/// A node behind one kind of socket. It stops when this is dropped.
pub(crate) struct LinkedNode {
    address: NodeAddress,
    transport: Transport,
    _stop: DropGuard,
    _folder: tempfile::TempDir,
}

impl LinkedNode {
    pub(crate) async fn serve(engine: Arc<dyn Engine>, link: Link) -> LinkedNode {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("node.sock");
        let ca = Ca::new();
        let mut listener = Listener::bind(&match link {
            Link::Unix => ListenAddress::Unix(socket.clone()),
            Link::Tcp | Link::Tls => ListenAddress::Tcp("127.0.0.1:0".to_owned()),
        })
        .await
        .unwrap();
        if link == Link::Tls {
            listener = listener.with_tls(ca.issue("127.0.0.1", |_| ()).load());
        }
        let scheme = if link == Link::Tls { "https" } else { "http" };
        let address = match listener.tcp_address() {
            Some(address) => NodeAddress::Url(format!("{scheme}://{address}")),
            None => NodeAddress::Unix(socket),
        };
        let stop = CancellationToken::new();
        let router = router(engine, Role::Both, ClusterKey::new(KEY));
        tokio::spawn(listener.serve(router, stop.clone()));
        LinkedNode { address, transport: ca.transport(), _stop: stop.drop_guard(), _folder: folder }
    }

    /// A client with connections of its own.
    pub(crate) fn client(&self) -> RemoteEngine {
        RemoteEngine::with_transport(&self.address, KEY, &self.transport).unwrap()
    }
}
