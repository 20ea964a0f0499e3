//! What every node has before it serves: the cluster key, a certificate, and an address that it listens on.

use std::net::SocketAddr;

use baton_link::mdns::{self, Announced, Announcement, ServiceType};
use baton_link::node::{ClusterKey, ListenAddress, Listener, ServerTls};
use baton_link::transport::{TlsError, Transport};
use baton_proxy::log_target::NOTICE;
use baton_schemas::node::{KEY_VARIABLE, TLS_PROPERTY};
use baton_schemas::printable::printable;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::event::Serves;
use super::failure::NodeFailure;
use super::options::{NodeOptions, WayToRun};

/// The port that a name in an announcement does not mention.
const DEFAULT_PORT: u16 = 9000;

/// Characters of the host's name in an announcement: with a port as many as a node's name may have.
const MAX_HOST_CHARS: usize = 26;

/// A node's address, which is listened on, and what may pass.
pub(crate) struct Door {
    pub(crate) listener: Listener,
    /// Where, if it is TCP.
    pub(crate) address: Option<SocketAddr>,
    pub(crate) key: String,
    pub(crate) tls: Option<ServerTls>,
    /// How this node calls others.
    pub(crate) transport: Transport,
    /// This machine's name in its cluster; `None`: no pairing is used.
    pub(crate) machine: Option<String>,
}

/// The service behind a node's door.
pub(crate) struct Behind {
    pub(crate) server: JoinHandle<std::io::Result<()>>,
    pub(crate) serves: Serves,
}

impl Door {
    /// Listens. `options` know the pairing.
    pub(crate) async fn open(options: &NodeOptions) -> Result<Door, NodeFailure> {
        let key = cluster_key(options)?;
        let tls = certificate(options).map_err(NodeFailure::setup)?;
        if tls.is_none() && !options.transport.allow_plain_http {
            refuse_open_address(&options.listen).await?;
        }
        let transport = options.transport.transport().map_err(NodeFailure::setup)?;
        let listener = Listener::bind(&options.listen).await.map_err(NodeFailure::setup)?;
        let address = listener.tcp_address();
        let listener = match &tls {
            Some(tls) => listener.with_tls(tls.clone()),
            None => listener,
        };
        let about = options.transport.pairing().and_then(|folder| folder.about().ok().flatten());
        let machine = about.map(|about| about.machine.to_string());
        Ok(Door { listener, address, key, tls, transport, machine })
    }

    pub(crate) fn cluster_key(&self) -> ClusterKey {
        ClusterKey::new(&self.key)
    }

    /// Announces the node until `stop`, unless only this machine reaches it, by the machine's name in the cluster or else
    /// its host name. That mDNS does not work here is no reason to end.
    pub(crate) fn announce(&self, stop: CancellationToken) {
        let Some(listening) = self.address.filter(|address| !address.ip().to_canonical().is_loopback()) else { return };
        let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host = self.machine.clone().unwrap_or_else(host);
        let host: String =
            printable(&host).split('.').next().unwrap_or_default().chars().take(MAX_HOST_CHARS).collect();
        // The same when the node is started again. Two nodes of one machine have different ports.
        let name = match listening.port() {
            DEFAULT_PORT => host,
            port => format!("{host}-{port}"),
        };
        let tls = self.tls.as_ref().map(|tls| (TLS_PROPERTY, tls.dns_name().as_deref().unwrap_or_default().to_owned()));
        let properties = tls.into_iter().collect();
        match mdns::announce(&Announcement { service: ServiceType::NODE, name, listening, properties }) {
            Ok(announced) => drop(tokio::spawn(say_goodbye(announced, stop))),
            Err(error) => tracing::warn!(
                %error,
                "this node does not announce itself; endpoints need its address (--prefill, --decode)"
            ),
        }
    }
}

/// Takes the announcement back as soon as the node begins to stop.
async fn say_goodbye(announced: Announced, stop: CancellationToken) {
    stop.cancelled().await;
    announced.withdraw().await;
}

/// The key that every call to a node presents.
fn cluster_key(options: &NodeOptions) -> Result<String, NodeFailure> {
    options.transport.cluster_key().map_err(NodeFailure::setup)?.ok_or_else(|| {
        NodeFailure::setup(format!(
            "a node needs a cluster key: pair the machines with `baton pair`, or set {KEY_VARIABLE} to the same secret on \
             all machines"
        ))
    })
}

/// The certificate to speak TLS with: the given one, or the pairing's. An endpoint's child needs none for its socket.
pub(crate) fn certificate(options: &NodeOptions) -> Result<Option<ServerTls>, TlsError> {
    if let Some(files) = &options.tls {
        return ServerTls::load(&files.certificate, &files.key).map(Some);
    }
    let folder = options.transport.pairing().filter(|_| options.way != WayToRun::Child);
    let Some(folder) = folder else { return Ok(None) };
    tracing::info!(target: NOTICE, "the node uses the key and the certificate in {}", folder.path().display());
    ServerTls::load(&folder.certificate(), &folder.private_key()).map(Some)
}

/// Refuses plain HTTP on an address that other machines can reach.
async fn refuse_open_address(listen: &ListenAddress) -> Result<(), NodeFailure> {
    if listen.is_private().await.map_err(NodeFailure::setup)? {
        return Ok(());
    }
    Err(NodeFailure::setup(format!(
        "{listen} can be reached from other machines, and over plain HTTP the cluster key and the prompts could be \
         read on the way. Pair the machines with `baton pair`, give the node a certificate (--tls-cert and --tls-key), or \
         allow it with --allow-plain-http"
    )))
}
