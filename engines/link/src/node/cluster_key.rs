//! The key that every call to a node presents.

use std::sync::Arc;

use http::{HeaderMap, header};
use subtle::ConstantTimeEq;

/// The secret that all nodes and the proxy share. Compared in constant time and never printed.
#[derive(Clone)]
pub struct ClusterKey(Arc<str>);

impl ClusterKey {
    pub fn new(key: &str) -> Self {
        ClusterKey(key.into())
    }

    /// The bytes that keys of handoffs are derived from.
    pub(super) fn secret(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Returns true if the request presents the key as a bearer token.
    pub(super) fn admits(&self, headers: &HeaderMap) -> bool {
        let presented = headers
            .get(header::AUTHORIZATION)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| v.strip_prefix("Bearer "))
            .map(|key| blake3::hash(key.as_bytes()));
        // All hashes have the same length, so the comparison does not reveal the key's length.
        let expected = blake3::hash(self.secret());
        presented.is_some_and(|hash| bool::from(hash.as_bytes().ct_eq(expected.as_bytes())))
    }
}
