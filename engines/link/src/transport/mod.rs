//! The rules for connections to nodes: which certificates are trusted, and what may be sent unencrypted.
//!
//! Every call carries the cluster key, and most carry prompts. Plain HTTP reveals both to the network, so to other
//! machines it needs the operator's explicit permission. See `docs/security.md`.

mod client_tls;
mod explain;
mod pem;
mod pinned;
mod short_body;

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Certificate, ClientBuilder, Url};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;

pub use self::client_tls::{ALPN_HTTP1, ALPN_HTTP2};
pub(crate) use self::explain::explain;
pub use self::explain::explain_tls;
pub use self::pem::TlsError;
pub(crate) use self::pem::{certificates, private_key, unusable};
pub use self::short_body::{ShortBodyError, short_body};

/// How long idle connections are kept. Shorter than a node keeps them, so that no request is sent on a connection that
/// the node is just closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the cluster key must not be sent to an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error(
        "{0} is plain HTTP to another machine: keys and prompts could be read on the way. \
         Pair the machines with `baton pair`, use https:// (a node takes --tls-cert and --tls-key), or allow it: \
         --allow-plain-http, or in a configuration file allow_plain_http = true"
    )]
    Plain(String),
    /// Not a URL of a node.
    #[error("{0:?} is not a node's address like https://spark.local:9000")]
    Invalid(String),
}

/// The certificates and permissions of a client of nodes. By default: the system's certificates, and plain HTTP only to
/// this machine.
#[derive(Debug, Clone, Default)]
pub struct Transport {
    certificates: Vec<Certificate>,
    /// The same certificates, for clients that are not reqwest's.
    roots: Vec<CertificateDer<'static>>,
    /// For nodes, instead of the system's certificates: TLS that trusts a cluster's own.
    pinned: Option<ClientConfig>,
    allow_plain_http: bool,
}

impl Transport {
    /// Trusts the certificates in the PEM file `ca` in addition to the system's. `allow_plain_http` allows sending the
    /// cluster key and prompts to other machines unencrypted. Errors: the file cannot be used.
    pub fn new(ca: Option<&Path>, allow_plain_http: bool) -> Result<Transport, TlsError> {
        let mut trusted = Vec::new();
        let mut roots = Vec::new();
        if let Some(path) = ca {
            // The store is dropped: it only finds invalid certificates here, where the file's name is known.
            let mut checked = rustls::RootCertStore::empty();
            for der in certificates(path)? {
                trusted.push(Certificate::from_der(&der).map_err(|e| unusable(path, "certificate", e))?);
                checked.add(der.clone()).map_err(|e| unusable(path, "certificate", e))?;
                roots.push(der);
            }
        }
        Ok(Transport { certificates: trusted, roots, pinned: None, allow_plain_http })
    }

    /// Of nodes, trusts those whose certificate the authority in the PEM file `authority` issued for `name`, at whatever
    /// address they are called; besides them only what [`Transport::new`] was given. Errors: the file cannot be used.
    pub fn pinned_to(self, authority: &Path, name: &str) -> Result<Transport, TlsError> {
        let pinned = pinned::pinned_tls(certificates(authority)?, name, &self.roots);
        let pinned = pinned.map_err(|reason| unusable(authority, "certificate", reason))?;
        Ok(Transport { pinned: Some(pinned), ..self })
    }

    /// Checks that the cluster key may be sent to `url`.
    pub fn check(&self, url: &str) -> Result<(), AddressError> {
        let invalid = || AddressError::Invalid(url.to_owned());
        let parsed = Url::parse(url).map_err(|_| invalid())?;
        let host = parsed.host_str().ok_or_else(invalid)?;
        match parsed.scheme() {
            "https" => Ok(()),
            "http" if self.allow_plain_http || is_this_machine(host) => Ok(()),
            "http" => Err(AddressError::Plain(url.to_owned())),
            _ => Err(invalid()),
        }
    }

    /// The builder of every client of a node.
    pub fn client(&self) -> ClientBuilder {
        let builder = reqwest::Client::builder()
            // A redirect would send the prompt, and on the same host the key, to an address that is not configured.
            .redirect(Policy::none())
            // Nor may a proxy from the environment get them.
            .no_proxy()
            // HTTP/1.1 upgrades the connection of all streams. Each pull of KV needs a connection of its own: TCP's window
            // is its backpressure, and closing it cancels the pull.
            .http1_only()
            .tcp_nodelay(true)
            .pool_idle_timeout(IDLE_TIMEOUT);
        match &self.pinned {
            Some(pinned) => builder.use_preconfigured_tls(pinned.clone()),
            None => self.certificates.iter().cloned().fold(builder, ClientBuilder::add_root_certificate),
        }
    }
}

/// Returns true if a URL's host is `localhost` or a loopback address. Other names are not resolved, because their
/// address can change between the check and the call.
fn is_this_machine(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_sent_unencrypted_only_to_this_machine() {
        let check = |url: &str| Transport::default().check(url);
        for url in ["http://127.0.0.1:9000", "http://LOCALHOST:1", "http://[::1]:9000", "http://[::ffff:127.0.0.1]:1"] {
            assert_eq!(check(url), Ok(()), "{url}");
        }
        for url in ["https://spark.local:9000", "https://192.168.0.7"] {
            assert_eq!(check(url), Ok(()), "{url}");
        }
        let plain = [
            "http://192.168.0.7:9000",
            "http://spark.local:9000",
            "http://localhost.example.com",
            "http://127.0.0.1.example.com",
            "http://127.0.0.1@example.com:9000",
            "http://[fe80::1]:9000",
            "http://0.0.0.0:9000",
        ];
        for url in plain {
            assert_eq!(check(url), Err(AddressError::Plain(url.to_owned())));
            assert_eq!(Transport::new(None, true).unwrap().check(url), Ok(()));
        }
        for url in ["spark.local:9000", "ftp://127.0.0.1", "unix:/tmp/a.sock", "http://", ""] {
            assert_eq!(check(url), Err(AddressError::Invalid(url.to_owned())));
        }
    }

    #[test]
    fn errors_name_the_file_that_is_not_a_ca() {
        let folder = tempfile::tempdir().unwrap();
        let check = |content: Option<&str>, expected: &str| {
            let path = folder.path().join("ca.pem");
            drop(std::fs::remove_file(&path));
            if let Some(content) = content {
                std::fs::write(&path, content).unwrap();
            }
            let message = Transport::new(Some(&path), false).unwrap_err().to_string();
            assert!(message.contains("ca.pem") && message.contains(expected), "{message}");
            assert!(!message.contains('\n'), "{message}");
        };
        check(None, "cannot read");
        check(Some(""), "holds no certificate");
        check(Some("hello"), "holds no certificate");
        check(Some("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"), "cannot be used");
        check(Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "cannot be used");
    }
}
