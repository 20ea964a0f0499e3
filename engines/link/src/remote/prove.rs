//! Asks what answers at an address to prove that it has the cluster key. The key is not sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_schemas::node::{BASE_PATH, KeyProof};
use reqwest::tls::TlsInfo;
use reqwest::{Client, Response, StatusCode};

use super::call_failure;
use super::paths::NodePaths;
use crate::links::is_on_link;
use crate::proof::{ConnectionEnd, NotProven, Proven, Question};
use crate::transport::{AddressError, Transport, explain_tls, short_body};

/// The deadline of a proof. Both ends compute it in a millisecond.
const DEADLINE: Duration = Duration::from_secs(2);

/// The longest answer, bytes.
const MAX_ANSWER_BYTES: usize = 4 << 10;

/// Why an address is not used. The words are for operators.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProofFailure {
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    /// This process has no descriptor, port or memory for a connection, which says nothing about the address.
    #[error("it could not be asked: {0}")]
    NotAsked(String),
    /// It speaks plain HTTP, which the operator has not allowed.
    #[error("it speaks plain HTTP, over which the cluster key could be read: allow_plain_http or TLS makes it usable")]
    PlainHttp,
    /// Its certificate is not trusted here.
    #[error("{0}")]
    Certificate(String),
    #[error("{0}")]
    NotProven(#[from] NotProven),
}

/// Asks one address for proofs.
pub struct Prover {
    url: String,
    address: SocketAddr,
    client: Client,
}

impl Prover {
    /// The prover of `address`, one of those that `url` stands for. It sends nothing yet. Errors: plain HTTP is not allowed, or
    /// there is no client.
    pub fn new(url: &str, address: SocketAddr, transport: &Transport) -> Result<Prover, ProofFailure> {
        transport.check(url).map_err(|error| match error {
            AddressError::Plain(_) => ProofFailure::PlainHttp,
            AddressError::Invalid(url) => ProofFailure::Unreachable(format!("{url} is no address")),
        })?;
        let paths = Arc::new(NodePaths::new(vec![address]));
        let client = transport.client().dns_resolver(paths).tls_info(true).timeout(DEADLINE).build();
        let client = client.map_err(|error| ProofFailure::Unreachable(call_failure::describe(&error)))?;
        Ok(Prover { url: url.to_owned(), address, client })
    }

    /// Asks what answers there to prove that it has `cluster_key`, which is not sent. Takes at most 2 s. Errors: it cannot, or
    /// the address, which anybody may have announced, is in no network of this machine: nothing is sent there.
    pub async fn prove(&self, cluster_key: &str) -> Result<Proven, ProofFailure> {
        if !is_on_link(self.address) {
            return Err(ProofFailure::Unreachable("it is in no network of this machine".into()));
        }
        let url = &self.url;
        let question = Question::new(cluster_key);
        let call = self.client.get(format!("{url}{BASE_PATH}/proof")).query(&[("message", question.message())]);
        let reply = call.send().await.map_err(|error| failure_of(&error, url))?;
        let is_here = |at: SocketAddr| at.ip() == self.address.ip() && at.port() == self.address.port();
        if !reply.remote_addr().is_some_and(is_here) {
            return Err(NotProven::Elsewhere.into());
        }
        let certificate =
            reply.extensions().get::<TlsInfo>().and_then(TlsInfo::peer_certificate).map(ConnectionEnd::hash);
        if reply.status() != StatusCode::OK || (certificate.is_none() && url.starts_with("https:")) {
            return Err(NotProven::NotANode.into());
        }
        let answer = answer_of(reply).await.ok_or(NotProven::NotANode)?;
        Ok(question.verify(&answer, ConnectionEnd { address: self.address, certificate })?)
    }
}

fn failure_of(error: &reqwest::Error, url: &str) -> ProofFailure {
    match explain_tls(error, Some(url)) {
        Some(tls) => ProofFailure::Certificate(tls),
        None if call_failure::is_own_lack(error) => ProofFailure::NotAsked(call_failure::describe(error)),
        None => ProofFailure::Unreachable(call_failure::describe(error)),
    }
}

/// `None`: it is too long, or no proof.
async fn answer_of(reply: Response) -> Option<KeyProof> {
    serde_json::from_slice(&short_body(reply, MAX_ANSWER_BYTES).await.ok()?).ok()
}
