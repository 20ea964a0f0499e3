//! An operator's certificate authority, and the certificates that it issues.

use std::path::PathBuf;

use baton_link::node::ServerTls;
use baton_link::transport::Transport;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// A certificate and its private key, as PEM files.
pub(crate) struct CertFiles {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

impl CertFiles {
    pub(crate) fn load(&self) -> ServerTls {
        ServerTls::load(&self.cert, &self.key).unwrap()
    }
}

/// An operator's certificate authority, in a folder of its own.
pub(crate) struct Ca {
    folder: tempfile::TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Ca {
    pub(crate) fn new() -> Ca {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Ca { folder, issuer }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    pub(crate) fn transport(&self) -> Transport {
        Transport::new(Some(&self.file()), false).unwrap()
    }

    /// Issues a certificate for a host, with `change` applied to its parameters.
    pub(crate) fn issue(&self, host: &str, change: impl FnOnce(&mut CertificateParams)) -> CertFiles {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([host.to_owned()]).unwrap();
        change(&mut params);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let path = |name: &str| self.folder.path().join(name);
        std::fs::write(path("cert.pem"), cert.pem()).unwrap();
        std::fs::write(path("key.pem"), key.serialize_pem()).unwrap();
        CertFiles { cert: path("cert.pem"), key: path("key.pem") }
    }
}
