//! `[model.engine.kv_store]`: where KV goes that leaves the cache.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use baton_model::options::WrittenSize;
use baton_schemas::kv::Codec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::value::{OptionValue, ValueForm};

/// Bytes on disk unless they are written: some hundred conversations of 20,000 tokens with a model of 8B.
const DEFAULT_DISK_BUDGET: u64 = 32 << 30;

/// Bytes that a day may write unless they are written. A disk of 1 TB is rated for some 300 GB a day over five years.
const DEFAULT_DISK_WRITES: u64 = 100_000_000_000;

/// The store of KV, as it is written. As a flag: `--kv-store memory=8GiB,disk=/path`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KvStoreOptions {
    /// The most bytes in memory. 0: no store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<WrittenSize>,
    /// A folder for KV that survives the process. Without it, nothing is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<PathBuf>,
    /// How rows are kept on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec: Option<Codec>,
    /// The most bytes in the folder, of all models and processes together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_budget: Option<WrittenSize>,
    /// The most bytes that are written into it on a day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_writes: Option<WrittenSize>,
}

impl KvStoreOptions {
    /// The most bytes in memory. `None`: as many as the cache has.
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory.as_ref().and_then(WrittenSize::bytes)
    }

    /// The most bytes on disk.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_budget.as_ref().and_then(WrittenSize::bytes).unwrap_or(DEFAULT_DISK_BUDGET)
    }

    /// The most bytes that are written to disk on a day.
    pub fn disk_writes_a_day(&self) -> u64 {
        self.disk_writes.as_ref().and_then(WrittenSize::bytes).unwrap_or(DEFAULT_DISK_WRITES)
    }

    /// What is wrong: a key, and a message that completes `KEY …`.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        if let Some(key) = self.wrong_size() {
            return Some((key, format!("must be {}", WrittenSize::EXPECTED)));
        }
        if self.disk.is_none() {
            let of_disk = [
                (self.codec.is_some(), "kv_store.codec"),
                (self.disk_budget.is_some(), "kv_store.disk_budget"),
                (self.disk_writes.is_some(), "kv_store.disk_writes"),
            ];
            let of_disk = of_disk.into_iter().find(|(is_set, _)| *is_set);
            return of_disk.map(|(_, key)| (key, "needs disk, the folder where KV is kept".to_owned()));
        }
        if self.codec.is_some_and(|codec| !Codec::OF_ROWS.contains(&codec)) {
            return Some(("kv_store.codec", "must be a codec of rows, and not of states".to_owned()));
        }
        if self.disk_bytes() == 0 {
            return Some(("kv_store.disk_budget", "must not be 0: without disk, nothing is written".to_owned()));
        }
        let message = "must leave memory for KV that waits to be written to disk, and not be 0";
        (self.memory_bytes() == Some(0)).then(|| ("kv_store.memory", message.to_owned()))
    }

    /// Budgets without room for a block of so many bytes: a key, and a message that completes `KEY …`. A codec makes files smaller, so
    /// the disk's is known to be too small only without one.
    pub fn too_small(&self, block_bytes: u64) -> Vec<(&'static str, String)> {
        let memory = self.memory_bytes().filter(|n_bytes| *n_bytes > 0);
        let is_plain = self.disk.is_some() && self.codec.unwrap_or_default() == Codec::None;
        let disk = is_plain.then(|| self.disk_bytes());
        let writes = is_plain.then(|| self.disk_writes_a_day());
        let budgets = [
            ("kv_store.memory", memory, "nothing"),
            ("kv_store.disk_budget", disk, "nothing on disk"),
            ("kv_store.disk_writes", writes, "nothing on disk"),
        ];
        let wrong = |(key, n_bytes, kept): (_, Option<u64>, _)| {
            let n_bytes = n_bytes.filter(|n_bytes| *n_bytes < block_bytes)?;
            let message = format!(
                "must have room for a block of KV, and not be {n_bytes} bytes: one of this model has {block_bytes}, so {kept} \
                 would be kept"
            );
            Some((key, message))
        };
        budgets.into_iter().filter_map(wrong).collect()
    }

    /// The key of a value that is no size.
    fn wrong_size(&self) -> Option<&'static str> {
        let sizes = [
            (&self.memory, "kv_store.memory"),
            (&self.disk_budget, "kv_store.disk_budget"),
            (&self.disk_writes, "kv_store.disk_writes"),
        ];
        let is_wrong = |size: &WrittenSize| size.bytes().is_none();
        sizes.into_iter().find(|(size, _)| size.as_ref().is_some_and(is_wrong)).map(|(_, key)| key)
    }
}

/// The secret from which the keys of a store on disk are derived.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreSecret(pub String);

impl fmt::Debug for StoreSecret {
    /// Hides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreSecret")
    }
}

impl OptionValue for KvStoreOptions {
    const FORM: ValueForm = ValueForm::List(&ValueForm::Text);
    const NAME: &'static str = "KEY=VALUE";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        let mut table = serde_json::Map::new();
        for text in texts {
            let pair = text.to_str().and_then(|text| text.split_once('=')).filter(|(_, value)| !value.is_empty());
            let (key, value) = pair.ok_or("must be KEY=VALUE, such as memory=8GiB")?;
            table.insert(key.to_owned(), value.into());
        }
        let options: KvStoreOptions = serde_json::from_value(table.into()).map_err(|error| error.to_string())?;
        match options.wrong_size() {
            Some(key) => Err(format!("{key} must be {}", WrittenSize::EXPECTED)),
            None => Ok(options),
        }
    }

    fn is_empty(&self) -> bool {
        *self == KvStoreOptions::default()
    }

    fn resolve(&mut self, folder: &Path) {
        self.disk.iter_mut().for_each(|disk| disk.resolve(folder));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<KvStoreOptions, String> {
        KvStoreOptions::read(&text.split(',').map(OsStr::new).collect::<Vec<_>>())
    }

    #[test]
    fn a_flag_has_the_keys_of_the_table() {
        let options = read("memory=8GiB,disk=/a=b,disk_budget=1TB,disk_writes=0").unwrap();
        assert_eq!((options.memory_bytes(), options.disk_bytes()), (Some(8 << 30), 1_000_000_000_000));
        assert_eq!((options.disk.as_deref(), options.disk_writes_a_day()), (Some(Path::new("/a=b")), 0));
        assert_eq!(options.problem(), None);
        let check = |text: &str, expected: &str| assert!(read(text).unwrap_err().contains(expected), "{text}");
        check("memory", "KEY=VALUE");
        check("memory=much", "kv_store.memory must be a number of bytes");
        check("disk=", "KEY=VALUE");
        check("codec=zip", "expected one of `none`, `planes_zstd`");
        check("memroy=1GiB", "unknown field `memroy`, expected one of `memory`, `disk`");
    }

    #[test]
    fn a_budget_without_room_for_a_block_is_named_with_its_bytes() {
        let keys =
            |text: &str| read(text).unwrap().too_small(1 << 20).into_iter().map(|(key, _)| key).collect::<Vec<_>>();
        for enough in ["memory=0", "memory=1MiB", "disk=/d", "disk=/d,disk_budget=1KiB,codec=kvq"] {
            assert_eq!(keys(enough), [""; 0], "{enough}");
        }
        assert_eq!(keys("memory=1023KiB,disk=/d,disk_budget=1KiB"), ["kv_store.memory", "kv_store.disk_budget"]);
        let (_, message) = read("memory=1KiB").unwrap().too_small(1 << 20).pop().unwrap();
        assert!(message.contains("not be 1024 bytes: one of this model has 1048576"), "{message}");
    }

    #[test]
    fn keys_of_the_disk_need_a_disk_and_a_disk_needs_memory() {
        let key = |text: &str| read(text).unwrap().problem().map(|(key, _)| key);
        assert_eq!(key("memory=0"), None);
        assert_eq!(key("memory=0,disk=/a"), Some("kv_store.memory"));
        assert_eq!(key("disk_budget=1GiB"), Some("kv_store.disk_budget"));
        assert_eq!(key("disk_budget=0,disk=/a"), Some("kv_store.disk_budget"), "no block would fit");
        assert_eq!((key("codec=kvq"), key("codec=kvq,disk=/a")), (Some("kv_store.codec"), None));
        assert_eq!(key("codec=state_f16,disk=/a"), Some("kv_store.codec"));
        assert_eq!(key("memory=1GiB,disk_writes=1GiB"), Some("kv_store.disk_writes"));
        let written = WrittenSize::Text("lots".to_owned());
        let options = KvStoreOptions { memory: Some(written), ..KvStoreOptions::default() };
        assert!(options.problem().is_some_and(|(key, message)| key == "kv_store.memory" && message.contains("24GiB")));
    }
}
