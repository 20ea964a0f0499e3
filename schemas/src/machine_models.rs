//! The model files of machines. Nodes report theirs, `GET /baton/models` shows those of all machines, and orders change them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::handoff::KvSource;
use crate::printable::printable_within;

/// The most models of one machine that are reported.
pub const MAX_MODELS: usize = 1_000;

/// The most files of one model. The largest models have some hundred.
pub const MAX_MODEL_FILES: usize = 1_000;

/// The most files of one machine that are reported.
const MAX_FILES: usize = 10_000;

/// The longest name of a model, and the longest path of a file, bytes.
pub const MAX_NAME_BYTES: usize = 1_000;

/// Digits of a checksum.
const SHA256_DIGITS: usize = 64;

/// The longest text about a problem, characters.
const MAX_PROBLEM_CHARS: usize = 500;

/// A file of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileOnDisk {
    /// Its path in the folder of its repository, or its name.
    pub path: String,
    /// Its size.
    pub n_bytes: u64,
    /// Its checksum, lower-case hex; missing until it is computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A model in the models folder of a machine: one file, all parts of a split one, or a folder of safetensors; with the
/// projectors beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelOnDisk {
    /// As `baton pull` knows it: a name of the catalogue, `owner/repo:FILE`, or `owner/repo` for a folder.
    pub name: String,
    /// As its file's name says, such as `Q4_K_M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// Bytes of all its files.
    pub n_bytes: u64,
    /// Its weights and a tenth more are less than the memory that the machine has for models. An estimate: its context counts
    /// when it is loaded.
    pub fits: bool,
    /// A process on the machine uses it.
    pub in_use: bool,
    /// Its files.
    pub files: Vec<FileOnDisk>,
}

/// The models folder of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MachineModels {
    /// By name.
    pub models: Vec<ModelOnDisk>,
    /// Bytes that may still be written there; missing if the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Bytes of memory that models may take there; missing if the machine does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The latest transfer to this machine, which may have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<ModelTransfer>,
}

/// Returns true for a checksum: 64 hexadecimal digits in lower case.
pub fn is_sha256(text: &str) -> bool {
    text.len() == SHA256_DIGITS && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

impl MachineModels {
    /// What another machine says, within bounds, and printable.
    pub fn bounded(mut self) -> MachineModels {
        let is_short = |text: &String| text.len() <= MAX_NAME_BYTES;
        self.models.retain(|model| is_short(&model.name) && model.files.iter().all(|file| is_short(&file.path)));
        self.models.truncate(MAX_MODELS);
        let mut n_files = 0;
        self.models.retain(|model| {
            n_files += model.files.len();
            model.files.len() <= MAX_MODEL_FILES && n_files <= MAX_FILES
        });
        for model in &mut self.models {
            for file in &mut model.files {
                file.path = printable_within(&file.path, MAX_NAME_BYTES);
                file.sha256 = file.sha256.take().filter(|text| is_sha256(text));
            }
            model.name = printable_within(&model.name, MAX_NAME_BYTES);
            model.quantization = model.quantization.as_deref().map(|text| printable_within(text, 32));
        }
        if let Some(transfer) = &mut self.transfer {
            transfer.model = printable_within(&transfer.model, MAX_NAME_BYTES);
            transfer.problem = transfer.problem.as_deref().map(|problem| printable_within(problem, MAX_PROBLEM_CHARS));
        }
        self
    }
}

/// A model on its way to a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelTransfer {
    /// The number of the transfer since the process started; the first is 1.
    pub number: u64,
    /// The model.
    pub model: String,
    /// It comes from another machine, not from a hub or a package index.
    pub is_copy: bool,
    /// How far it is.
    pub state: TransferState,
    /// Bytes that are here, with those of earlier transfers.
    pub done_bytes: u64,
    /// Bytes of all files that were missing; missing if the sender does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The reason why it failed, or why the endpoint cannot serve the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TransferState {
    /// The sender looks for the files, or computes their checksums.
    Preparing,
    /// Bytes arrive, or are compared with their checksum.
    Receiving,
    /// The model is complete and verified.
    Done,
    /// It ended with a problem. What has arrived is kept for the next transfer.
    Failed,
    /// An operator ended it. What has arrived is kept for the next transfer.
    Cancelled,
}

impl TransferState {
    /// Returns true if nothing moves any more.
    pub fn is_over(self) -> bool {
        matches!(self, TransferState::Done | TransferState::Failed | TransferState::Cancelled)
    }
}

/// An order to one machine, in the node protocol.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum ModelOrder {
    /// Fetch a model as `baton pull` does.
    Pull {
        /// As `baton pull` takes it.
        model: String,
    },
    /// Fetch a model from another node.
    Copy {
        /// As the other node reports it, or as `baton pull` takes it.
        model: String,
        /// The other node.
        from: KvSource,
    },
    /// End the transfer to this machine.
    Cancel,
    /// Delete a model's files.
    Delete {
        /// As the node reports it.
        model: String,
    },
}

impl ModelOrder {
    /// The model that it brings to the machine.
    pub fn fetches(&self) -> Option<&str> {
        match self {
            ModelOrder::Pull { model } | ModelOrder::Copy { model, .. } => Some(model),
            ModelOrder::Cancel | ModelOrder::Delete { .. } => None,
        }
    }
}

/// The reply to an order that was taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderTaken {
    /// The number of the transfer that has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<u64>,
}

/// The model files of all machines: the reply to `GET /baton/models`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterModels {
    /// The endpoint's own machine is `local`, and comes first.
    pub machines: Vec<MachineReport>,
    /// The caller may change them.
    #[serde(default)]
    pub may_change: bool,
}

/// The model files of one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MachineReport {
    /// `local`, or the node's name.
    pub machine: String,
    /// Missing if the machine does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<MachineModels>,
    /// Why it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// An operator's order, about machines by their names in `GET /baton/models`: the body of `POST /baton/models`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClusterOrder {
    /// Copy a model from one machine to another.
    Copy {
        /// The model's name.
        model: String,
        /// The machine that has it.
        from: String,
        /// The machine that gets it.
        to: String,
    },
    /// Fetch a model from a hub or the package index.
    Pull {
        /// As `baton pull` takes it.
        model: String,
        /// The machine that gets it.
        on: String,
        /// The name under which the endpoint's own machine serves it; by default `model`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// Give a model that was fetched to the endpoint's own machine one more name.
    Name {
        /// One of its names.
        model: String,
        /// The new name.
        name: String,
    },
    /// Delete a model that no process uses. If a model was given several names, only this name goes.
    Delete {
        /// The model's name.
        model: String,
        /// The machine that has it.
        on: String,
    },
    /// End the transfer to a machine. What has arrived is kept.
    Cancel {
        /// The machine that receives.
        on: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, n_files: usize) -> ModelOnDisk {
        let file = FileOnDisk { path: "a.gguf".into(), n_bytes: 1, sha256: None };
        let files = vec![file; n_files];
        ModelOnDisk { name: name.into(), quantization: None, n_bytes: 1, fits: true, in_use: false, files }
    }

    #[test]
    fn what_another_machine_says_is_bounded_in_count_and_length() {
        let models = |models| MachineModels { models, ..MachineModels::default() }.bounded().models;
        assert_eq!(models(vec![model("m", 1); 2 * MAX_MODELS]).len(), MAX_MODELS);
        assert_eq!(models(vec![model(&"x".repeat(MAX_NAME_BYTES + 1), 1), model("m", 1)]).len(), 1);
        assert_eq!(models(vec![model("m", MAX_MODEL_FILES); 100]).len(), MAX_FILES / MAX_MODEL_FILES);
        assert!(models(vec![model("m", MAX_MODEL_FILES + 1)]).is_empty());
        assert!(!models(vec![model("\u{1b}[2J", 1)])[0].name.contains('\u{1b}'));
        let with = |path: &str, sha256: String| {
            let file = FileOnDisk { path: path.into(), n_bytes: 1, sha256: Some(sha256) };
            models(vec![ModelOnDisk { files: vec![file], ..model("m", 0) }])[0].files[0].clone()
        };
        assert!(!with("\u{1b}[2J", "a".repeat(64)).path.contains('\u{1b}'));
        assert_eq!(with("a", "0a".repeat(32)).sha256, Some("0a".repeat(32)));
        for wrong in ["\u{1b}[2J".to_owned(), "A".repeat(64), "a".repeat(63), "a".repeat(1 << 20)] {
            assert_eq!(with("a", wrong).sha256, None);
        }
    }

    #[test]
    fn an_order_is_read_as_it_is_documented() {
        let order: ClusterOrder = serde_json::from_str(r#"{"action":"copy","model":"m","from":"a","to":"b"}"#).unwrap();
        assert_eq!(order, ClusterOrder::Copy { model: "m".into(), from: "a".into(), to: "b".into() });
        assert!(serde_json::from_str::<ClusterOrder>(r#"{"action":"copy","model":"m","from":"a"}"#).is_err());
        assert!(serde_json::from_str::<ClusterOrder>(r#"{"action":"drop","model":"m"}"#).is_err());
    }
}
