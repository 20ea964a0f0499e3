//! Reads a model's folder as the Hugging Face hub and mlx-lm have it: `config.json`, `*.safetensors`, `tokenizer.json`.
//!
//! [`ModelFolder::header`] describes the model as the header of a GGUF file of it would, so that everything that asks a
//! header works for folders, too: sizes, names, vocabularies. Of the weights only the headers are read, and the samples that
//! identify them. Nothing of a folder is executed. Every length is checked before memory is allocated.

mod added_tokens;
mod checks;
mod config;
mod entries;
mod error;
mod family;
mod files;
mod gemma4;
mod linear_layers;
mod pre_tokenizer;
mod tensors;
mod tokenizer;

use std::path::Path;

use baton_schemas::kv::{Fingerprint, RopePairing};

use self::config::Config;
pub use self::config::{FileRopeScaling, Rope};
pub use self::error::FolderError;
pub use self::linear_layers::LinearLayers;
use self::tensors::Tensors;
use self::tokenizer::FolderTokenizer;
pub(crate) use self::tokenizer::Merging;
use crate::gguf::window::{SectionLayers, Window};
use crate::gguf::{Gguf, Value};
use crate::options::CacheTypes;

/// A model's folder, without its weights.
pub struct ModelFolder {
    /// What a GGUF file's header would say. Its tensors have their places in the folder's files.
    pub header: Gguf,
    /// The order in which GGUF files of this architecture have K's elements. In the folder they are always half-split.
    pub pairing: RopePairing,
    /// The spelling of each token, in the order of their numbers.
    pub(crate) spellings: Vec<String>,
    /// llama.cpp's number of each token's type.
    pub(crate) types: Vec<u32>,
    /// How text becomes tokens.
    pub(crate) words: Merging,
    tensors: Tensors,
    config: Config,
}

impl ModelFolder {
    /// Reads a folder. Blocking: some megabytes are read and parsed.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFolder, FolderError> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Err(FolderError::NoFolder { path: path.to_owned() });
        }
        let config = Config::read(path)?;
        let tensors = Tensors::read(path)?;
        let tokenizer = FolderTokenizer::read(path, config.family, config.n_vocab)?;
        let mut metadata = config.metadata();
        metadata.insert("general.name".into(), Value::String(ModelFolder::name(path)));
        tokenizer.describe(&config, &mut metadata);
        let file_type = if tensors.computes_in_f32() { ALL_F32 } else { MOSTLY_F16 };
        metadata.insert(FILE_TYPE.into(), Value::Unsigned(file_type));
        let FolderTokenizer { spellings, types, words, .. } = tokenizer;
        let header =
            Gguf::described(metadata, tensors.infos(config.quantized_bits), tensors.files.clone(), &spellings, &types);
        Ok(ModelFolder { header, pairing: config.family.pairing(), spellings, types, words, tensors, config })
    }

    /// The folder's name, which is the model's.
    fn name(path: &Path) -> String {
        path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
    }

    /// Hashes of the vocabulary and the weights, as [`Gguf::fingerprint`] makes them. The same weights in a GGUF file have
    /// another hash: whether they are the same shows the canary. Blocking: some hundred short reads.
    pub fn fingerprint(&self) -> Result<Fingerprint, FolderError> {
        Ok(self.header.fingerprint_of(self.tensors.hash()?, &self.config.changes))
    }

    /// The type of weights, as people call it: `F16`, or `4-bit` for quantized ones.
    pub fn quantization(&self) -> String {
        match self.config.quantized_bits {
            Some(bits) => format!("{bits}-bit"),
            None => self.tensors.main_type().to_owned(),
        }
    }

    /// The layers that keep KV, by their section of the KV layout.
    pub fn sections(&self) -> Vec<SectionLayers> {
        self.config.sections()
    }

    /// The window of some layers, of which every n-th attends to all positions. `None`: no layer has one, or the layers with
    /// one are listed in the file.
    pub fn window(&self) -> Option<Window> {
        self.config.window
    }

    /// RoPE's base and scaling.
    pub fn rope(&self) -> &Rope {
        &self.config.rope
    }

    /// The layers that keep a state instead of KV, if there are any.
    pub fn linear_layers(&self) -> Option<&LinearLayers> {
        self.config.linear.as_ref()
    }

    /// Elements of a token's state.
    pub fn n_embd(&self) -> usize {
        self.config.n_embd
    }
}

/// The number of tensors of a safetensors file in memory. For fuzz targets.
#[doc(hidden)]
pub fn count_tensors(file: &[u8]) -> Result<usize, FolderError> {
    Tensors::count(file)
}

/// GGUF's key for the type of a file's weights, and two of llama.cpp's numbers.
const FILE_TYPE: &str = "general.file_type";
const ALL_F32: u64 = 0;
const MOSTLY_F16: u64 = 1;

/// The types of K and V where they have the type in which the model computes, from its [`ModelFolder::header`].
pub fn cache_types(header: &Gguf) -> CacheTypes {
    if header.u64(FILE_TYPE) == Some(ALL_F32) { CacheTypes::F32 } else { CacheTypes::default() }
}

#[cfg(test)]
mod tests;
