//! Encrypts what leaves this process's memory, so that a stolen disk tells nothing, and no changed byte is ever used.
//!
//! AEGIS-256X2 (RFC 10032) with random nonces of 256 bits. Keys are derived by BLAKE3's key derivation: labels, which say
//! whose KV a file holds, have one key, and the KV of each scope has its own.

use aegis::aegis256x2::Aegis256X2;
use baton_schemas::CacheScope;

/// The number of bytes that sealing adds: nonce and tag.
pub(crate) const SEAL_BYTES: usize = NONCE_BYTES + TAG_BYTES;

/// The bytes before the sealed content.
pub(crate) const NONCE_BYTES: usize = 32;

/// The bytes behind it.
pub(crate) const TAG_BYTES: usize = 32;

/// Characters of a name.
pub(crate) const NAME_CHARS: usize = 32;

/// The secret from which every key of a store is derived.
#[derive(Clone)]
pub struct StoreKey([u8; 32]);

/// A file was changed, cut, or sealed with another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it was changed, or written with another key")]
pub(crate) struct Unsealed;

impl StoreKey {
    /// Derives the key of a store from a secret of any length, such as a cluster's key.
    pub fn derive(secret: &[u8]) -> StoreKey {
        StoreKey(blake3::derive_key("baton 2026-11 KV store", secret))
    }

    /// The key of labels.
    pub(crate) fn of_labels(&self) -> [u8; 32] {
        blake3::derive_key("baton 2026-11 KV store label", &self.0)
    }

    /// The key of a scope's KV.
    pub(crate) fn of_scope(&self, scope: CacheScope) -> [u8; 32] {
        let secret = [&self.0[..], &scope.0.to_le_bytes()].concat();
        blake3::derive_key("baton 2026-11 KV store rows", &secret)
    }

    /// A name that tells nothing of `content` without the key.
    pub(crate) fn name(&self, content: &[u8]) -> String {
        let hash = blake3::keyed_hash(&blake3::derive_key("baton 2026-11 KV store name", &self.0), content);
        hex::encode(&hash.as_bytes()[..NAME_CHARS / 2])
    }
}

/// Seals `buffer` after its first [`NONCE_BYTES`], which become the nonce, and appends the tag. `bound` is not written: it must
/// be the same when it is opened.
pub(crate) fn seal(key: &[u8; 32], buffer: &mut Vec<u8>, bound: &[u8]) {
    let nonce: [u8; NONCE_BYTES] = rand::random();
    buffer[..NONCE_BYTES].copy_from_slice(&nonce);
    let tag = Aegis256X2::<TAG_BYTES>::new(key, &nonce).encrypt_in_place(&mut buffer[NONCE_BYTES..], bound);
    buffer.extend_from_slice(&tag);
}

/// An empty buffer for [`seal`], with room for `n_bytes`.
pub(crate) fn to_seal(n_bytes: usize) -> Vec<u8> {
    let mut buffer = Vec::with_capacity(n_bytes + SEAL_BYTES);
    buffer.resize(NONCE_BYTES, 0);
    buffer
}

/// Opens in place what [`seal`] made, and returns the content.
pub(crate) fn open<'b>(key: &[u8; 32], sealed: &'b mut [u8], bound: &[u8]) -> Result<&'b mut [u8], Unsealed> {
    let (nonce, rest) = sealed.split_first_chunk_mut::<NONCE_BYTES>().ok_or(Unsealed)?;
    let (content, tag) = rest.split_last_chunk_mut::<TAG_BYTES>().ok_or(Unsealed)?;
    Aegis256X2::<TAG_BYTES>::new(key, nonce).decrypt_in_place(content, tag, bound).map_err(|_| Unsealed)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_opens_that_was_changed_cut_or_bound_to_something_else() {
        let keys = StoreKey::derive(b"secret");
        let key = keys.of_scope(CacheScope(7));
        let mut sealed = to_seal(5);
        sealed.extend_from_slice(b"hello");
        seal(&key, &mut sealed, b"label");
        assert_eq!(sealed.len(), 5 + SEAL_BYTES);
        assert!(!sealed.windows(5).any(|window| window == b"hello"));
        let try_open = |mut sealed: Vec<u8>, key: &[u8; 32], bound: &[u8]| {
            open(key, &mut sealed, bound).map(|content| content.to_vec())
        };
        assert_eq!(try_open(sealed.clone(), &key, b"label"), Ok(b"hello".to_vec()));
        assert_eq!(try_open(sealed.clone(), &key, b"other"), Err(Unsealed));
        for scope in [CacheScope(8), CacheScope::SHARED] {
            assert_eq!(try_open(sealed.clone(), &keys.of_scope(scope), b"label"), Err(Unsealed));
        }
        assert_eq!(
            try_open(sealed.clone(), &StoreKey::derive(b"other").of_scope(CacheScope(7)), b"label"),
            Err(Unsealed)
        );
        for idx in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[idx] ^= 1;
            assert_eq!(try_open(changed, &key, b"label"), Err(Unsealed), "byte {idx}");
            assert_eq!(try_open(sealed[..idx].to_vec(), &key, b"label"), Err(Unsealed), "cut at {idx}");
        }
    }
}
