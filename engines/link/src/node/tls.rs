//! The node's certificate, which can be renewed while the node runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio_rustls::TlsAcceptor;

use crate::proof::ConnectionEnd;
use crate::transport::{TlsError, certificates, private_key, unusable};

/// The protocols inside TLS, preferred first: `auto::Builder` supports both.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A certificate and its key, from files that can be read again. Cheap to clone; a reload affects all clones.
#[derive(Clone)]
pub struct ServerTls(Arc<TlsFiles>);

struct TlsFiles {
    cert: PathBuf,
    key: PathBuf,
    current: RwLock<Certificate>,
}

/// A certificate in use. Cheap to clone.
#[derive(Clone)]
pub(super) struct Certificate {
    config: Arc<ServerConfig>,
    /// [`ConnectionEnd::hash`] of it.
    pub(super) hash: [u8; 32],
    dns_name: Option<Arc<str>>,
}

impl Certificate {
    /// The acceptor for one connection.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}

impl ServerTls {
    /// Reads PEM files: the certificate, followed by intermediate certificates, and its private key.
    pub fn load(cert: &Path, key: &Path) -> Result<ServerTls, TlsError> {
        let current = RwLock::new(read(cert, key)?);
        Ok(ServerTls(Arc::new(TlsFiles { cert: cert.to_owned(), key: key.to_owned(), current })))
    }

    /// Reads the files again for new connections. On an error the old certificate stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let current = read(&self.0.cert, &self.0.key)?;
        *self.0.current.write().unwrap_or_else(PoisonError::into_inner) = current;
        Ok(())
    }

    /// The certificate for the next connection.
    pub(super) fn current(&self) -> Certificate {
        self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The first host name of the certificate. `None`: it is for addresses only.
    pub fn dns_name(&self) -> Option<Arc<str>> {
        self.current().dns_name
    }
}

/// The first name that one host can have.
fn dns_name(leaf: &CertificateDer<'_>) -> Option<Arc<str>> {
    let leaf = webpki::EndEntityCert::try_from(leaf).ok()?;
    leaf.valid_dns_names().find(|name| !name.contains('*')).map(Arc::from)
}

fn read(cert: &Path, key: &Path) -> Result<Certificate, TlsError> {
    let chain = certificates(cert)?;
    let leaf =
        chain.first().cloned().ok_or_else(|| TlsError::Missing { path: cert.to_owned(), wanted: "certificate" })?;
    let private = private_key(key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|e| unusable(cert, "certificate", e))?.with_no_client_auth();
    let mut config = builder.with_single_cert(chain, private).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => TlsError::KeyMismatch { cert: cert.to_owned(), key: key.to_owned() },
        rustls::Error::InvalidCertificate(_) => unusable(cert, "certificate", error),
        // The remaining errors mean a key of an unsupported kind.
        error => unusable(key, "private key", error),
    })?;
    config.alpn_protocols = ALPN.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Certificate { config: Arc::new(config), hash: ConnectionEnd::hash(&leaf), dns_name: dns_name(&leaf) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let cert = folder.join(format!("{name}.pem"));
        let key = folder.join(format!("{name}.key"));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        (cert, key)
    }

    #[test]
    fn errors_of_the_files_are_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = pair(folder.path(), "a");
        let (_, other_key) = pair(folder.path(), "b");
        assert!(ServerTls::load(&cert, &key).is_ok());
        let check = |cert: &Path, key: &Path, expected: &str| {
            let message = ServerTls::load(cert, key).err().unwrap().to_string();
            assert!(message.starts_with("TLS: ") && message.contains(expected), "{message}");
            assert!(!message.contains('\n'), "{message}");
        };
        check(&folder.path().join("absent"), &key, "cannot read");
        check(&cert, &folder.path().join("absent"), "cannot read");
        check(&key, &key, "holds no certificate");
        check(&cert, &cert, "holds no private key");
        check(&cert, &other_key, "does not belong to the certificate");
        let damaged = folder.path().join("damaged");
        std::fs::write(&damaged, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        check(&damaged, &key, "cannot be used");
        std::fs::write(&damaged, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n").unwrap();
        check(&cert, &damaged, "cannot be used");
    }

    #[test]
    fn a_failed_reload_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = pair(folder.path(), "a");
        let tls = ServerTls::load(&cert, &key).unwrap();
        let before = tls.current();
        assert_eq!(before.dns_name.as_deref(), Some("localhost"));
        std::fs::write(&cert, "").unwrap();
        assert!(tls.reload().is_err());
        assert_eq!(before.hash, tls.current().hash);
        pair(folder.path(), "a");
        tls.reload().unwrap();
        assert_ne!(before.hash, tls.current().hash);
    }
}
