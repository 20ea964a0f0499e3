//! What an operator hears of a node. The command line has the words.

use std::net::SocketAddr;

use baton_schemas::node::NodeInfo;

/// Something that happened to a node.
#[derive(Debug)]
pub enum NodeEvent {
    /// An option without effect.
    Remark(String),
    /// A worker cannot be used yet. Said once for each reason.
    WaitsForWorker { worker: String, reason: String },
    /// It serves.
    Ready(ReadyNode),
    /// Its certificate was read again.
    CertificateRead,
}

/// A node that serves.
#[derive(Debug)]
pub struct ReadyNode {
    /// Where, if it listens on TCP.
    pub address: Option<SocketAddr>,
    /// It uses a pairing.
    pub is_paired: bool,
    pub serves: Serves,
}

/// The engine or the devices of a node.
#[derive(Debug)]
pub enum Serves {
    /// An engine; `None`: it does not describe itself.
    Engine(Option<Box<NodeInfo>>),
    /// Lent devices, by their names.
    Devices(Vec<String>),
}

/// Takes the events of a node.
pub type Tell = fn(NodeEvent);
