//! Proves that a stranger in the network has the cluster key, before the key is sent to it.
//!
//! Every other call to a node carries the key. That is right for an address that the operator has configured, and wrong
//! for one that was announced: whoever answers there would learn the key. So what is found must prove it first:
//!
//! 1. The caller sends its message of SPAKE2 (RFC 9382), whose password is the cluster key.
//! 2. The node answers with its own message, and with a MAC of its end of the connection, its process and its role. The MAC's key is what
//!    SPAKE2 has given to both; it differs each time, and is the same at both ends only if the cluster key is.
//!
//! Neither message helps to guess the key: each exchange tests one guess, also for a short key. That end is the
//! address where the node was reached and the certificate that it showed. A stranger can pass the messages on to a real
//! node and back, but then the end in the MAC is that node's and not the stranger's.

use std::net::{IpAddr, SocketAddr};

use baton_schemas::node::{KeyProof, Role};
use spake2::{Ed25519Group, Identity, Password, Spake2};
use subtle::ConstantTimeEq;

/// Bytes of a message of SPAKE2 over Ed25519: the side and a point.
const MESSAGE_BYTES: usize = 33;

/// The context of the MAC's key.
const CONTEXT: &str = "baton 2026-11 proof of the cluster key";

/// Where a connection to a node ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionEnd {
    /// The node's own end.
    pub address: SocketAddr,
    /// The hash of the certificate that the node shows there; `None` without TLS.
    pub certificate: Option<[u8; 32]>,
}

impl ConnectionEnd {
    /// The hash of a certificate in DER.
    pub fn hash(certificate: &[u8]) -> [u8; 32] {
        *blake3::hash(certificate).as_bytes()
    }
}

/// What a node has proven about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proven {
    /// [`NodeInfo::process`](baton_schemas::node::NodeInfo::process): its identity until it ends.
    pub process: u64,
    pub role: Role,
}

/// Why what answers is no node of this cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotProven {
    /// It knows another key, or none.
    #[error("it has another cluster key")]
    OtherKey,
    /// A node with the key has answered, but from elsewhere.
    #[error("a node with the cluster key answers, but at another address or with another certificate than it knows of")]
    Elsewhere,
    /// It does not speak the protocol.
    #[error("it is not a Baton node that can prove its key")]
    NotANode,
}

/// A question that waits for its proof.
pub struct Question {
    state: Spake2<Ed25519Group>,
    message: String,
}

impl Question {
    /// Asks for a proof of this key.
    pub fn new(cluster_key: &str) -> Question {
        let (caller, node) = identities();
        let (state, message) = Spake2::start_a(&password(cluster_key.as_bytes()), &caller, &node);
        Question { state, message: hex::encode(&message) }
    }

    /// What the node gets, hexadecimal.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Verifies the answer that came over a connection to `end`.
    pub fn verify(self, answer: &KeyProof, end: ConnectionEnd) -> Result<Proven, NotProven> {
        let message = from_hex(&answer.message).ok_or(NotProven::NotANode)?;
        let theirs: [u8; 32] =
            from_hex(&answer.confirmation).and_then(|bytes| bytes.try_into().ok()).ok_or(NotProven::NotANode)?;
        let shared = self.state.finish(&message).map_err(|_| NotProven::NotANode)?;
        let proven = Proven { process: answer.process, role: answer.role };
        let of = |end: ConnectionEnd| bool::from(confirmation(&shared, end, proven).as_bytes().ct_eq(&theirs));
        if of(end) {
            return Ok(proven);
        }
        // With the claimed address it is the right key at another end. A certificate is not told, so with TLS only
        // another address shows.
        match of(ConnectionEnd { address: answer.address, ..end })
            || of(ConnectionEnd { address: answer.address, certificate: None })
        {
            true => Err(NotProven::Elsewhere),
            false => Err(NotProven::OtherKey),
        }
    }
}

/// A node's answer to the message of a question. `None`: it is no such message.
pub fn answer(cluster_key: &[u8], message: &str, end: ConnectionEnd, proven: Proven) -> Option<KeyProof> {
    let message = from_hex(message)?;
    let (caller, node) = identities();
    let (state, ours) = Spake2::<Ed25519Group>::start_b(&password(cluster_key), &caller, &node);
    let shared = state.finish(&message).ok()?;
    let Proven { process, role } = proven;
    let confirmation = confirmation(&shared, end, proven).to_hex().to_string();
    Some(KeyProof { message: hex::encode(&ours), address: end.address, process, role, confirmation })
}

fn password(cluster_key: &[u8]) -> Password {
    Password::new(cluster_key)
}

/// Two names, so that a message cannot be sent back as its own answer.
fn identities() -> (Identity, Identity) {
    (Identity::new(b"baton caller"), Identity::new(b"baton node"))
}

fn confirmation(
    shared: &[u8],
    ConnectionEnd { address, certificate }: ConnectionEnd,
    Proven { process, role }: Proven,
) -> blake3::Hash {
    let key = blake3::derive_key(CONTEXT, shared);
    // Every part has a fixed length. The scope of a link-local address differs at both ends, so it does not count.
    let ip = match address.ip().to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let role = match role {
        Role::Prefill => 1,
        Role::Decode => 2,
        Role::Both => 3,
        Role::Draft => 4,
    };
    let mut told = Vec::with_capacity(60);
    told.extend(ip.octets());
    told.extend(address.port().to_le_bytes());
    told.push(u8::from(certificate.is_some()));
    told.extend(certificate.unwrap_or_default());
    told.extend(process.to_le_bytes());
    told.push(role);
    blake3::keyed_hash(&key, &told)
}

/// At most the bytes of a message.
fn from_hex(text: &str) -> Option<Vec<u8>> {
    (text.len() <= 2 * MESSAGE_BYTES).then(|| hex::decode(text).ok())?
}

#[cfg(test)]
mod tests;
