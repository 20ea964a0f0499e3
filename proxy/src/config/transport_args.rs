//! How nodes are reached over the network: options of `baton serve` and `baton node`, and keys of the configuration.

use std::ffi::OsString;
use std::path::PathBuf;

use baton_engines::transport::{TlsError, Transport};
use clap::Args;

/// Options for calls to nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct TransportArgs {
    /// Trust the CA certificates in this PEM file for nodes at https://, in addition to the system's
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Allow plain HTTP: the cluster key, prompts and KV are sent unencrypted. Only on a trusted network
    #[arg(long)]
    pub allow_plain_http: bool,
}

impl TransportArgs {
    /// Reads the files.
    pub fn transport(&self) -> Result<Transport, TlsError> {
        Transport::new(self.tls_ca.as_deref(), self.allow_plain_http)
    }

    /// The same options as arguments for a child.
    pub fn to_args(&self) -> Vec<OsString> {
        let ca = self.tls_ca.iter().flat_map(|path| ["--tls-ca".into(), path.into()]);
        ca.chain(self.allow_plain_http.then(|| "--allow-plain-http".into())).collect()
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
            TransportArgs { tls_ca: Some("a b.pem".into()), allow_plain_http: true },
            TransportArgs { tls_ca: Some("ca.pem".into()), allow_plain_http: false },
            TransportArgs::default(),
        ] {
            let args = std::iter::once("baton".into()).chain(all.to_args());
            assert_eq!(TransportFlags::parse_from(args).transport, all);
        }
    }
}
