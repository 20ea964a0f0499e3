//! Certificates of one authority for one name, at any address: how paired machines know each other.
//!
//! The authority issues certificates only to the machines of its cluster, so a certificate for that name proves membership,
//! whatever address was called. Addresses of machines change; a certificate for addresses would have to follow.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::ALPN_HTTP1;

/// TLS that trusts what `authority` issued for `name`, and what `others` issued for the host that is called. Not the
/// system's authorities: they know nothing of a cluster. Errors, for the operator.
pub(super) fn pinned_tls(
    authority: Vec<CertificateDer<'static>>,
    name: &str,
    others: &[CertificateDer<'static>],
) -> Result<ClientConfig, String> {
    let name = ServerName::try_from(name.to_owned()).map_err(|error| error.to_string())?;
    let others = if others.is_empty() { None } else { Some(verifier(others.iter().cloned())?) };
    let verifier = PinnedVerifier { cluster: verifier(authority)?, name, others };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    // "Dangerous" is a verifier that checks less than the usual one. This one calls the usual one with another name.
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = vec![ALPN_HTTP1.to_vec()];
    Ok(config)
}

fn verifier(roots: impl IntoIterator<Item = CertificateDer<'static>>) -> Result<Arc<WebPkiServerVerifier>, String> {
    let mut store = RootCertStore::empty();
    for root in roots {
        store.add(root).map_err(|error| error.to_string())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider).build();
    verifier.map_err(|error| error.to_string())
}

#[derive(Debug)]
struct PinnedVerifier {
    /// Knows the cluster's authority alone.
    cluster: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
    /// Knows the operator's other authorities.
    others: Option<Arc<WebPkiServerVerifier>>,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        called: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.cluster.verify_server_cert(certificate, intermediates, &self.name, ocsp, now);
        match (&self.others, &verified) {
            (Some(others), Err(_)) => others.verify_server_cert(certificate, intermediates, called, ocsp, now),
            _ => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.cluster.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.cluster.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.cluster.supported_verify_schemes()
    }
}
