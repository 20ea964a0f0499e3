//! TLS of clients whose connections this crate opens itself.

use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};

use super::Transport;

/// The names of protocols inside TLS (ALPN).
pub const ALPN_HTTP1: &[u8] = b"http/1.1";
pub const ALPN_HTTP2: &[u8] = b"h2";

impl Transport {
    /// TLS that trusts the system's certificates and the configured ones. `protocols` are those to offer, the preferred
    /// one first. Errors, for the operator.
    pub fn client_tls(&self, protocols: &[&[u8]]) -> Result<ClientConfig, String> {
        let mut roots = RootCertStore::empty();
        // A system without certificates is like one whose certificates do not fit: the handshake says so.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        roots.add_parsable_certificates(self.roots.iter().cloned());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| format!("TLS cannot be set up: {error}"))?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Ok(config)
    }
}
