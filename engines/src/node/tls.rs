//! The certificate a node shows, and its renewal while the node runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use crate::transport::{TlsError, certificates, private_key, unusable};

/// What is spoken inside TLS, best first: `auto::Builder` understands both.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A certificate and its key, from files that can be read again. Cheap to clone; clones renew together.
#[derive(Clone)]
pub struct ServerTls(Arc<TlsFiles>);

struct TlsFiles {
    cert: PathBuf,
    key: PathBuf,
    config: RwLock<Arc<ServerConfig>>,
}

impl ServerTls {
    /// Reads PEM files: the certificate with the intermediate ones after it, and its private key.
    pub fn load(cert: &Path, key: &Path) -> Result<ServerTls, TlsError> {
        let config = RwLock::new(read(cert, key)?);
        Ok(ServerTls(Arc::new(TlsFiles { cert: cert.to_owned(), key: key.to_owned(), config })))
    }

    /// Reads the files again, for connections from now on. On an error the certificate stays what it was.
    pub fn reload(&self) -> Result<(), TlsError> {
        let config = read(&self.0.cert, &self.0.key)?;
        *self.0.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// For one connection.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0.config.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn read(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(cert)?;
    let private = private_key(key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|e| unusable(cert, "certificate", e))?.with_no_client_auth();
    let mut config = builder.with_single_cert(chain, private).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => TlsError::KeyMismatch { cert: cert.to_owned(), key: key.to_owned() },
        rustls::Error::InvalidCertificate(_) => unusable(cert, "certificate", error),
        // What is left is a key of a kind that the library does not know.
        error => unusable(key, "private key", error),
    })?;
    config.alpn_protocols = ALPN.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (cert, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        (cert, key)
    }

    #[test]
    fn what_is_wrong_with_the_files_is_said_in_one_line() {
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
    fn a_renewal_that_fails_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = pair(folder.path(), "a");
        let tls = ServerTls::load(&cert, &key).unwrap();
        let before = Arc::clone(&tls.0.config.read().unwrap());
        std::fs::write(&cert, "").unwrap();
        assert!(tls.reload().is_err());
        assert!(Arc::ptr_eq(&before, &tls.0.config.read().unwrap()));
        pair(folder.path(), "a");
        tls.reload().unwrap();
        assert!(!Arc::ptr_eq(&before, &tls.0.config.read().unwrap()));
    }
}
