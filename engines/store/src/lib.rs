//! KV that outlives its slot. An engine's cache holds a few conversations; what leaves it is kept here, in memory and, if a
//! folder is named, in sealed files that a later process finds again.
//!
//! ```text
//! KvStore::add     ──► BlockTree: blocks under a prefix tree of their tokens ──► memory, by what each byte saves
//!                                         │ in the background
//!                                         └──► BlockFolder: one sealed file a block, one budget for all processes
//! KvStore::find, restore ◄── Restore: blocks in their order, read ahead
//! ```
//!
//! Conversations with the same beginning share its blocks. Scopes share nothing. A file that was cut, changed or sealed with
//! another key is refused and removed, so wrong KV never comes back.
//!
//! ```
//! use std::sync::Arc;
//!
//! use baton_schemas::CacheScope;
//! use baton_schemas::kv::{Chunk, Dtype, Fingerprint, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows};
//! use baton_store::{KvBlock, KvStore, Restored, StoreKey, StoreOptions};
//!
//! let rows = Rows { dtype: Dtype::F16, n_values: 2 };
//! let section = Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers: vec![LayerShape { k: rows, v: None }] };
//! let layout = Arc::new(KvLayout { rope: RopePairing::None, sections: vec![section], states: Vec::new() });
//! let model = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
//! let options = StoreOptions { memory_bytes: 1 << 20, disk: None };
//! let store = KvStore::open(options, StoreKey::derive(b"secret"), &model, layout)?;
//!
//! // Three positions of four bytes.
//! let layer = LayerRows { k: vec![7; 12].into(), v: Default::default() };
//! let chunk = Chunk { p0: 0, p1: 3, sections: vec![SectionRows { start: 0, layers: vec![layer] }] };
//! let block = KvBlock { chunk, state: None, is_lossy: false };
//! assert!(store.add(CacheScope::SHARED, &[10, 11, 12], block.clone()));
//!
//! let found = store.find(CacheScope::SHARED, &[10, 11, 12, 13]);
//! assert_eq!(found.n_tokens(), 3);
//! let Restored::Block(restored) = store.restore(&found, Arc::new(|| {})).poll() else { panic!() };
//! assert_eq!(restored, block);
//! assert_eq!(store.find(CacheScope(7), &[10, 11, 12]).n_tokens(), 0, "another scope");
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Rooms in reading order: [`KvBlock`] is the unit, `tree` finds and drops blocks without I/O, `seal` encrypts, `file` is a
//! block's bytes on disk, `labels` reads files, `folder` a model's files, `finding` adds those of other processes, `store_folder` those of all models with their budget, `private` files that only this user may read, `disk` the thread that
//! changes files, `reading` those that read them, [`KvStore`] joins them, [`Restore`] gives blocks back, `inventory` is for people who ask what is there, `clears` tells running processes what was cleared, `scope_counts` reads lines of counts, `keyholders` remembers which scopes have an API
//! key. It uses `baton-schemas` alone and knows no engine.

mod block;
mod blocks;
mod clears;
mod disk;
mod file;
mod finding;
mod folder;
mod held;
mod inventory;
mod keyholders;
mod labels;
mod private;
mod reading;
mod restore;
mod scope_counts;
mod seal;
mod store;
mod store_folder;
#[cfg(test)]
mod tests;
mod tree;
mod worth;

pub use self::block::KvBlock;
pub use self::clears::ClearedKv;
pub use self::folder::DiskOptions;
pub use self::inventory::{Cleared, Inventory, StoredModel, StoredScope, Verified, WrittenDay, clear, list, verify};
pub use self::keyholders::keep_scopes;
pub use self::reading::READERS;
pub use self::restore::{Restore, Restored};
pub use self::seal::StoreKey;
pub use self::store::{CLOSE_DEADLINE, KvStore, MAX_BLOCK_TOKENS, StoreOptions, StoredPrefix};
pub use self::store_folder::{FolderFault, check_folder};
pub use self::tree::WantedKv;
pub use self::worth::GreedyDual;
