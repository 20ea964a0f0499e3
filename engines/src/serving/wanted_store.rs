//! The store of KV that an operator wants, and how it is opened.

use std::sync::Arc;

use baton_schemas::kv::{Codec, Fingerprint, KvLayout};
use baton_store::{DiskOptions, KvStore, StoreKey, StoreOptions};

use super::described::ModelLibrary;
use super::images::ImageEncoder;
use super::memory::available_memory;
use crate::engine_options::{EngineOptions, KvStoreOptions, StoreSecret};

/// What the options say of the store.
pub(super) struct WantedStore {
    options: KvStoreOptions,
    secret: Option<StoreSecret>,
    /// The model's name.
    model: String,
    /// What the rows depend on beside the weights: the engine and its version, and the projector of images. A handoff compares the KV of
    /// both sides ([`baton_link::handoff::canary`]); a file has nobody to ask.
    computed_by: String,
}

impl WantedStore {
    pub(super) fn of<L: ModelLibrary>(
        options: &EngineOptions,
        model: String,
        images: Option<&dyn ImageEncoder>,
    ) -> WantedStore {
        WantedStore {
            computed_by: format!("{} {} {}", L::ENGINE, L::VERSION, images.map_or("", ImageEncoder::id)),
            options: options.kv_store.clone().unwrap_or_default(),
            secret: options.store_secret.clone(),
            model,
        }
    }

    /// Opens it, with `default_bytes` of memory if the options do not say how many. `None`: it is not wanted, or cannot be opened.
    /// A disk that cannot be used costs only the disk.
    pub(super) fn open(
        &self,
        default_bytes: u64,
        fingerprint: &Fingerprint,
        layout: &Arc<KvLayout>,
    ) -> Option<KvStore> {
        let memory_bytes = self.options.memory_bytes().unwrap_or(default_bytes);
        let memory_bytes = usize::try_from(memory_bytes).unwrap_or(usize::MAX);
        if memory_bytes == 0 {
            return None;
        }
        let block_bytes = KvStore::block_bytes(layout);
        for (key, message) in self.options.too_small(block_bytes) {
            tracing::warn!("{key} {message}");
        }
        let free = available_memory();
        if let Some(wanted) = self.options.memory_bytes().filter(|wanted| *wanted > free) {
            tracing::warn!(
                "kv_store.memory is {wanted} bytes, and {free} are free: the system may swap, or end the engine"
            );
        }
        let weights = blake3::keyed_hash(&fingerprint.weights, self.computed_by.as_bytes()).into();
        let fingerprint = Fingerprint { weights, ..*fingerprint };
        let open = |disk: Option<DiskOptions>, secret: &[u8]| {
            let options = StoreOptions { memory_bytes, disk };
            KvStore::open(options, StoreKey::derive(secret), &fingerprint, Arc::clone(layout))
        };
        if let (Some(disk), Some(StoreSecret(secret))) = (self.disk(layout), &self.secret) {
            match open(Some(disk), secret.as_bytes()) {
                Ok(store) => return Some(store),
                Err(error) => {
                    tracing::error!(%error, "the disk of the KV store cannot be used; KV is kept in memory alone")
                }
            }
        }
        let store = open(None, &rand::random::<[u8; 32]>());
        store.inspect_err(|error| tracing::warn!(%error, "idle conversations stay in the cache")).ok()
    }

    fn disk(&self, layout: &KvLayout) -> Option<DiskOptions> {
        let codec = self.options.codec.unwrap_or_default();
        let codec = codec.check(layout).map_or_else(
            |error| {
                tracing::warn!(%error, "the KV on disk is kept as it is");
                Codec::None
            },
            |()| codec,
        );
        Some(DiskOptions {
            folder: self.options.disk.clone()?,
            max_bytes: self.options.disk_bytes(),
            max_written_a_day: self.options.disk_writes_a_day(),
            codec,
            model: self.model.clone(),
        })
    }
}

#[cfg(all(test, feature = "llama"))]
mod tests {
    use super::*;
    use crate::llama::Llama;

    /// An upgrade finds nothing of the engine before only if the names follow the crates.
    #[test]
    fn kv_is_that_of_an_engines_version() {
        let of_llama = WantedStore::of::<Llama>(&EngineOptions::default(), "m".to_owned(), None);
        assert_eq!(of_llama.computed_by, format!("llama {} ", Llama::VERSION));
        let lock = include_str!("../../../Cargo.lock");
        let named = [
            Llama::VERSION,
            #[cfg(feature = "candle")]
            crate::candle::Candle::VERSION,
        ];
        for (name, version) in named.iter().filter_map(|named| named.split_once(' ')) {
            assert!(lock.contains(&format!("name = \"{name}\"\nversion = \"{version}\"\n")), "{name} {version}");
        }
    }
}
