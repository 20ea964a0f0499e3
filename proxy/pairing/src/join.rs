//! The part of a machine that joins.

use std::net::IpAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::authority::{self, Grant};
use super::code::PairingCode;
use super::error::PairingError;
use super::exchange::StartedJoiner;
use super::folder::ClusterFolder;
use super::membership::{About, MachineName};
use super::wire::{self, Answer, Kind};
use crate::mac_address::MacAddress;

/// The deadline of connecting.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The deadline of a run after connecting. It computes for milliseconds; the rest is for the network and slow disks.
const RUN_DEADLINE: Duration = Duration::from_secs(20);

/// A machine that joins.
pub struct Joiner {
    pub code: PairingCode,
    pub name: MachineName,
    /// Where its pairing goes.
    pub folder: ClusterFolder,
    /// Replace the pairing that it has.
    pub replaces: bool,
    /// The address of the network card that has this IP address, as far as it is known. The first machine is told, so that it can wake
    /// this one.
    pub mac_of: fn(IpAddr) -> Option<MacAddress>,
}

impl Joiner {
    /// Errors: this machine is in a cluster, and is not told to leave it; or a pairing cannot be stored.
    pub fn check(&self) -> Result<(), PairingError> {
        if !self.replaces {
            self.folder.check_free()?;
        }
        self.folder.check_usable()
    }
}

/// Joins the cluster of the machine at `address` (`HOST:PORT`), and stores the pairing. Errors: nothing was stored, unless
/// the connection was lost at the very end.
pub async fn join(joiner: &Joiner, address: &str) -> Result<About, PairingError> {
    // Before an attempt is spent.
    joiner.check()?;
    let unreachable = |error| PairingError::Unreachable { address: address.to_owned(), error };
    let connected = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(address)).await;
    let mut connection =
        connected.map_err(|_| unreachable(std::io::ErrorKind::TimedOut.into()))?.map_err(unreachable)?;
    let mac = connection.local_addr().ok().and_then(|own| (joiner.mac_of)(own.ip()));
    join_over(joiner, mac, &mut connection).await
}

/// The run, on an open connection.
pub(crate) async fn join_over(
    joiner: &Joiner,
    mac: Option<MacAddress>,
    connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> Result<About, PairingError> {
    tokio::time::timeout(RUN_DEADLINE, run(joiner, mac, connection)).await.unwrap_or(Err(PairingError::Late))
}

async fn run(
    joiner: &Joiner,
    mac: Option<MacAddress>,
    connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> Result<About, PairingError> {
    let (started, hello) = StartedJoiner::new(&joiner.code, joiner.name.clone())?;
    wire::send(connection, Kind::Hello, &hello.to_bytes()).await?;
    let answer = Answer::parse(&wire::receive(connection, Kind::Answer).await?)?;
    let keys = started.finish(&answer)?;
    wire::send(connection, Kind::JoinerProof, keys.joiner_proof()).await?;
    let proof = wire::exactly(wire::receive(connection, Kind::FirstProof).await?)?;
    if !keys.is_first_proof(proof) {
        return Err(PairingError::Unproven);
    }
    // Both sides know the code: from here on everything is sealed.
    let (key, request) = authority::request(keys.transcript())?;
    let request = serde_json::to_vec(&request).map_err(|_| PairingError::Protocol("a request without JSON"))?;
    wire::send(connection, Kind::Request, &keys.seal(Kind::Request, request)?).await?;
    let granted = keys.open(Kind::Grant, wire::receive(connection, Kind::Grant).await?)?;
    let granted: Grant = serde_json::from_slice(&granted).map_err(|_| PairingError::Protocol("a malformed grant"))?;
    let member = authority::accept(granted, &key, joiner.name.clone(), answer.name)?;
    joiner.folder.store(&member, joiner.replaces)?;
    // The pairing is complete even if the first machine does not hear of it.
    let stored = keys.seal(Kind::Stored, mac.map_or_else(Vec::new, |mac| mac.to_bytes().to_vec()))?;
    let _ = wire::send(connection, Kind::Stored, &stored).await;
    Ok(member.about)
}
