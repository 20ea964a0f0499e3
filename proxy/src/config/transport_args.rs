//! How nodes are reached over the network: options of `baton serve` and `baton node`, and keys of the configuration.
//!
//! A machine that `baton pair` has put into a cluster needs none of them: the cluster's key and certificates are used. If
//! the operator sets a key or allows plain HTTP, the pairing is not used at all.

use std::ffi::OsString;
use std::path::PathBuf;

use baton_link::transport::{TlsError, Transport};
use baton_pairing::{ClusterFolder, PairingError, authority};
use baton_schemas::node::KEY_VARIABLE;
use clap::Args;

use super::node_address::node_url;

/// Options for calls to nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct TransportArgs {
    /// Trust the CA certificates in this PEM file for nodes at https://, in addition to the system's
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub tls_ca: Option<PathBuf>,
    /// Allow plain HTTP: the cluster key, prompts and KV are sent unencrypted. Only on a trusted network
    #[arg(long, help_heading = "Network")]
    pub allow_plain_http: bool,
    /// Trust the nodes of the cluster whose pairing is in this folder
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub paired: Option<PathBuf>,
}

/// The folder of this machine's pairing, unless the environment has a cluster key, which wins.
///
/// Reads the environment, so call it at start-up.
pub fn found_pairing() -> Option<PathBuf> {
    if key_of_environment().is_some() {
        return None;
    }
    // Without a home there is no pairing.
    let folder = ClusterFolder::of_user().ok().filter(ClusterFolder::exists)?;
    Some(folder.path().to_owned())
}

/// Characters of a cluster key at least. Whoever sees a proof of it can try keys as fast as they hash.
const MIN_KEY_CHARS: usize = 16;

/// The reason why there is no cluster key.
#[derive(Debug, thiserror::Error)]
pub enum ClusterKeyError {
    #[error(
        "{KEY_VARIABLE} has {n} characters and could be guessed: it needs {MIN_KEY_CHARS} at least. `openssl rand -hex 32` prints \
         one, and `baton pair` needs none"
    )]
    TooShort { n: usize },
    #[error(transparent)]
    Pairing(#[from] PairingError),
}

fn checked(key: String) -> Result<String, ClusterKeyError> {
    match key.chars().count() {
        n if n < MIN_KEY_CHARS => Err(ClusterKeyError::TooShort { n }),
        _ => Ok(key),
    }
}

/// The cluster key that the operator has set.
fn key_of_environment() -> Option<String> {
    std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty())
}

impl TransportArgs {
    /// The same with this machine's pairing, if it has one and nothing else is chosen.
    pub fn or_paired(self) -> TransportArgs {
        let found = || found_pairing().filter(|_| !self.allow_plain_http);
        TransportArgs { paired: self.paired.clone().or_else(found), ..self }
    }

    /// Reads the files.
    pub fn transport(&self) -> Result<Transport, TlsError> {
        let transport = Transport::new(self.tls_ca.as_deref(), self.allow_plain_http)?;
        match self.pairing() {
            Some(folder) => transport.pinned_to(&folder.authority(), authority::NODE_NAME),
            None => Ok(transport),
        }
    }

    /// The pairing that is used.
    pub fn pairing(&self) -> Option<ClusterFolder> {
        self.paired.as_ref().map(ClusterFolder::at)
    }

    /// The cluster's key: the environment's, or the pairing's. `None` if there is neither. Errors: the environment's can be guessed,
    /// or the pairing is damaged.
    pub fn cluster_key(&self) -> Result<Option<String>, ClusterKeyError> {
        match key_of_environment() {
            Some(key) => checked(key).map(Some),
            None => Ok(self.pairing().map(|folder| folder.cluster_key()).transpose()?),
        }
    }

    /// A node's address as a URL. Without a scheme it is TLS with a pairing, and else plain HTTP.
    pub fn node_url(&self, address: &str) -> String {
        match self.paired.is_some() && !address.contains("://") {
            true => node_url(&format!("https://{address}")),
            false => node_url(address),
        }
    }

    /// The same options as arguments for a child.
    pub fn to_args(&self) -> Vec<OsString> {
        let ca = self.tls_ca.iter().flat_map(|path| ["--tls-ca".into(), path.into()]);
        let plain = self.allow_plain_http.then(|| "--allow-plain-http".into());
        let paired = self.paired.iter().flat_map(|folder| ["--paired".into(), folder.into()]);
        ca.chain(plain).chain(paired).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct TransportFlags {
        #[command(flatten)]
        transport: TransportArgs,
    }

    #[test]
    fn every_option_reaches_the_child() {
        for all in [
            TransportArgs { tls_ca: Some("a b.pem".into()), allow_plain_http: true, paired: None },
            TransportArgs { tls_ca: Some("ca.pem".into()), allow_plain_http: false, paired: Some("c d".into()) },
            TransportArgs::default(),
        ] {
            let args = std::iter::once("baton".into()).chain(all.to_args());
            assert_eq!(TransportFlags::parse_from(args).transport, all);
        }
    }

    #[test]
    fn a_key_that_can_be_guessed_is_refused_without_being_repeated() {
        let refused = checked("abc".to_owned()).unwrap_err().to_string();
        assert!(refused.contains("BATON_CLUSTER_KEY has 3 characters") && !refused.contains("abc"), "{refused}");
        assert!(checked("x".repeat(MIN_KEY_CHARS - 1)).is_err() && checked("é".repeat(MIN_KEY_CHARS)).is_ok());
    }

    #[test]
    fn a_paired_machine_reaches_nodes_by_tls_unless_told() {
        let alone = TransportArgs::default();
        let paired = TransportArgs { paired: Some("cluster".into()), ..TransportArgs::default() };
        assert_eq!(alone.node_url("spark.local:9000"), "http://spark.local:9000");
        assert_eq!(paired.node_url("spark.local:9000"), "https://spark.local:9000");
        for url in ["http://127.0.0.1:9000", "https://spark.local:9000"] {
            assert_eq!((alone.node_url(url), paired.node_url(url)), (url.to_owned(), url.to_owned()));
        }
    }
}
