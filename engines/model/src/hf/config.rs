//! Reads `config.json`: the model's family and sizes.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::checks::{Bidirectional, FULL, MAX_SIZE, within};
use super::error::FolderError;
use super::family::Family;
use super::files::{parse_json, read};
use super::gemma4::ListedLayers;
use super::linear_layers::LinearLayers;
use crate::gguf::Value;
use crate::gguf::window::{self, SectionLayers, Window};

/// Real ones have some kilobytes; those of quantized models have a key for each layer.
const MAX_BYTES: u64 = 4 << 20;

/// llama.cpp's limit.
const MAX_LAYERS: u64 = 512;

/// Real vocabularies have up to 262,144 tokens.
const MAX_VOCAB: u64 = 1 << 20;

/// A header's metadata under construction.
pub(super) type Metadata = BTreeMap<String, Value>;

/// The file of a model that also sees images: what reads text is described in it.
#[derive(Deserialize)]
struct WholeConfig {
    model_type: String,
    text_config: Option<Box<RawValue>>,
    quantization: Option<Box<RawValue>>,
    quantization_config: Option<Box<RawValue>>,
    model_file: Option<String>,
}

/// The file. Keys that change nothing here are ignored.
#[derive(Deserialize)]
struct ModelConfigFile {
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    vocab_size: u64,
    max_position_embeddings: Option<u64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    /// The base in layers with a window.
    rope_local_base_freq: Option<f64>,
    #[serde(default)]
    rope_traditional: bool,
    rope_scaling: Option<Box<RawValue>>,
    rope_parameters: Option<Box<RawValue>>,
    layer_types: Option<Vec<String>>,
    sliding_window: Option<u64>,
    sliding_window_pattern: Option<u64>,
    /// Attention's scores are divided by its square root.
    query_pre_attn_scalar: Option<f64>,
    final_logit_softcapping: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<Bidirectional>,
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
}

/// One token or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u64),
    Several(Vec<u64>),
}

impl TokenIds {
    fn first(&self) -> Option<u64> {
        match self {
            TokenIds::One(id) => Some(*id),
            TokenIds::Several(ids) => ids.first().copied(),
        }
    }
}

/// RoPE's settings. Transformers 5 writes the base only into `rope_parameters`, where mlx-lm does not look for it in all
/// families.
#[derive(Debug, Clone)]
pub struct Rope {
    pub base: f64,
    /// Of the layers that attend to all positions.
    pub scaling: Option<FileRopeScaling>,
    /// The base in layers with a window.
    pub windowed_base: f64,
    /// The part of a head that is rotated.
    part: f64,
}

/// How RoPE is scaled.
#[derive(Debug, Clone)]
pub struct FileRopeScaling {
    /// Its Hugging Face name.
    kind: String,
    factor: Option<f64>,
    /// All of it, as in the file.
    pub text: Box<RawValue>,
}

/// What is read of RoPE's settings.
#[derive(Deserialize, Default)]
struct RopeKeys {
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    /// The part of a head that is rotated.
    partial_rotary_factor: Option<f64>,
    /// Transformers 5 writes the settings of each kind of layers.
    full_attention: Option<Box<RawValue>>,
    sliding_attention: Option<Box<RawValue>>,
}

/// What is read of the quantization.
#[derive(Deserialize)]
struct Quantization {
    bits: Option<u64>,
}

/// A checked `config.json`.
pub(super) struct Config {
    pub(super) family: Family,
    pub(super) n_layers: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) head_size: usize,
    pub(super) n_embd: usize,
    pub(super) n_vocab: usize,
    /// Bits of a weight, if the weights are quantized.
    pub(super) quantized_bits: Option<u64>,
    pub(super) bos: Option<u64>,
    pub(super) eos: Option<u64>,
    /// Settings that change KV or logits and are in no tensor.
    pub(super) changes: Vec<String>,
    n_ctx_train: Option<u64>,
    epsilon: Option<f64>,
    pub(super) rope: Rope,
    pub(super) window: Option<Window>,
    pub(super) linear: Option<LinearLayers>,
    /// For a family that lists its layers.
    listed: Option<ListedLayers>,
}

impl Rope {
    /// The settings may stand in two places. Errors: they contradict each other.
    fn of(file: &ModelConfigFile, family: Family, path: &Path) -> Result<Rope, FolderError> {
        let read = |text: &RawValue| {
            let keys = serde_json::from_str::<Option<RopeKeys>>(text.get());
            keys.map(Option::unwrap_or_default).map_err(|source| FolderError::Json { path: path.to_owned(), source })
        };
        let mut bases: Vec<f64> = file.rope_theta.into_iter().collect();
        let mut windowed_bases: Vec<f64> = file.rope_local_base_freq.into_iter().collect();
        let mut scalings: Vec<FileRopeScaling> = Vec::new();
        let mut part = None;
        for text in [&file.rope_scaling, &file.rope_parameters].into_iter().flatten() {
            let mut text = text.clone();
            let mut keys = read(&text)?;
            if let Some(windowed) = keys.sliding_attention.take() {
                let windowed = read(&windowed)?;
                if windowed.scaling_kind().is_some() {
                    return Err(FolderError::unsupported(path, "RoPE is scaled in layers with a window"));
                }
                windowed_bases.extend(windowed.rope_theta);
            }
            if let Some(full) = keys.full_attention.take() {
                keys = read(&full)?;
                text = full;
            }
            bases.extend(keys.rope_theta);
            part = keys.partial_rotary_factor.or(part);
            scalings.extend(keys.scaling_kind().map(|kind| FileRopeScaling { kind, factor: keys.factor, text }));
        }
        let only = |bases: &[f64], default: f64| {
            let base = *bases.first().unwrap_or(&default);
            bases.iter().all(|other| *other == base).then_some(base)
        };
        let same = |a: &FileRopeScaling, b: &FileRopeScaling| a.kind == b.kind && a.factor == b.factor;
        let Some(base) = only(&bases, family.default_rope_base()) else {
            return Err(FolderError::malformed(path, CONTRADICTION));
        };
        let Some(windowed_base) = only(&windowed_bases, family.default_windowed_base().unwrap_or(base)) else {
            return Err(FolderError::malformed(path, CONTRADICTION));
        };
        if scalings.windows(2).any(|two| !same(&two[0], &two[1])) {
            return Err(FolderError::malformed(path, CONTRADICTION));
        }
        if let Some(base) = [base, windowed_base].into_iter().find(|base| !(base.is_finite() && *base >= 1.0)) {
            return Err(FolderError::malformed(path, format!("a base of RoPE is {base}")));
        }
        // The other families are computed as if they rotated whole heads, whatever their file says.
        let part = family.attention_interval().map_or(1.0, |_| part.unwrap_or(0.25));
        if !(part > 0.0 && part <= 1.0) {
            return Err(FolderError::malformed(path, format!("partial_rotary_factor is {part}")));
        }
        Ok(Rope { base, scaling: scalings.into_iter().next(), windowed_base, part })
    }
}

const CONTRADICTION: &str = "its settings of RoPE contradict each other";

impl RopeKeys {
    fn scaling_kind(&self) -> Option<String> {
        self.old_type.clone().or_else(|| self.rope_type.clone()).filter(|kind| kind != "default")
    }
}

/// The window of a family's layers, of which every `period`-th attends to all positions unless the file says otherwise. Errors:
/// the layers that have it are not those of llama.cpp and mlx-lm, or the file has a setting that mlx-lm ignores.
fn window(file: &ModelConfigFile, n_layers: usize, period: u64, path: &Path) -> Result<Window, FolderError> {
    let unsupported = |why: &str| Err(FolderError::unsupported(path, why));
    if file.use_bidirectional_attention.as_ref().is_some_and(Bidirectional::is_of_text) {
        return unsupported("its tokens attend to later ones (use_bidirectional_attention)");
    }
    if file.final_logit_softcapping.is_some() || file.attn_logit_softcapping.is_some() {
        return unsupported("it limits logits or scores (softcapping)");
    }
    let within = |name: &str, n: Option<u64>, default: u64| within(path, name, n.unwrap_or(default), MAX_SIZE);
    let Some(n_positions) = file.sliding_window else {
        return Err(FolderError::malformed(path, "it names no sliding_window"));
    };
    let n_positions = within("sliding_window", Some(n_positions), n_positions)?;
    let types = file.layer_types.as_deref();
    let listed = types.and_then(|types| types.iter().position(|kind| kind == FULL)).map(|first| first as u64 + 1);
    let period = within("sliding_window_pattern", file.sliding_window_pattern.or(listed), period)?;
    if period > n_layers {
        return unsupported("every layer has a sliding window (sliding_window_pattern)");
    }
    let window = Window { n_positions, period };
    let name = |layer| if window.covers(layer) { "sliding_attention" } else { FULL };
    if types.is_some_and(|types| !types.iter().map(String::as_str).eq((0..n_layers).map(name))) {
        return unsupported(
            "its layers are not some with a sliding window and then one without, again and again (layer_types)",
        );
    }
    Ok(window)
}

/// Bits of a quantized weight.
fn quantized_bits(quantization: &RawValue, path: &Path) -> Result<u64, FolderError> {
    let quantization: Quantization = serde_json::from_str(quantization.get())
        .map_err(|source| FolderError::Json { path: path.to_owned(), source })?;
    // Methods without the key have 4 bits: mxfp4 and its kind.
    within(path, "quantization.bits", quantization.bits.unwrap_or(4), 32).map(|bits| bits as u64)
}

impl Config {
    pub(super) fn read(folder: &Path) -> Result<Config, FolderError> {
        let path = &folder.join("config.json");
        let text = read(path, MAX_BYTES)?;
        let whole: WholeConfig = parse_json(path, &text)?;
        let unsupported = |why: String| FolderError::unsupported(path, why);
        let family = Family::named(&whole.model_type).ok_or_else(|| {
            unsupported(format!("its model_type is {:?}; {} are supported", whole.model_type, Family::NAMES.join(", ")))
        })?;
        let text = whole.text_config.as_ref().map_or(&text[..], |text| text.get().as_bytes());
        let file: ModelConfigFile = parse_json(path, text)?;
        if whole.model_file.is_some() {
            return Err(unsupported("it brings a program of its own (model_file), which is never run".into()));
        }
        if file.rope_traditional {
            return Err(unsupported("rope_traditional: its K has another order of elements".into()));
        }
        let within = |name: &str, n: u64, max: u64| within(path, name, n, max);
        let n_layers = within("num_hidden_layers", file.num_hidden_layers, MAX_LAYERS)?;
        let window = match family.period() {
            Some(period) => Some(window(&file, n_layers, period, path)?),
            None if !family.lists_layers() && file.layer_types.iter().flatten().any(|kind| kind != FULL) => {
                return Err(unsupported("some of its layers do not attend to all positions (layer_types)".into()));
            }
            None => None,
        };
        let n_heads = within("num_attention_heads", file.num_attention_heads, MAX_SIZE)?;
        let n_kv_heads = within("num_key_value_heads", file.num_key_value_heads.unwrap_or(n_heads as u64), MAX_SIZE)?;
        let n_embd = within("hidden_size", file.hidden_size, MAX_SIZE)?;
        let head_size = within("head_dim", file.head_dim.unwrap_or((n_embd / n_heads) as u64), MAX_SIZE)?;
        if !n_heads.is_multiple_of(n_kv_heads) || !head_size.is_multiple_of(2) {
            let what = format!("{n_heads} heads, {n_kv_heads} KV heads, {head_size} elements of a head");
            return Err(FolderError::malformed(path, what));
        }
        let rope = Rope::of(&file, family, path)?;
        let linear = LinearLayers::of(&parse_json(path, text)?, family, n_layers, path)?;
        let listed = match family {
            Family::Gemma4 => Some(ListedLayers::of(parse_json(path, text)?, n_layers, n_heads, n_kv_heads, path)?),
            _ => None,
        };
        let quantization = whole.quantization.as_deref().or(whole.quantization_config.as_deref());
        let quantized_bits = quantization.map(|text| quantized_bits(text, path)).transpose()?;
        let compact = |name: &str, text: Option<&RawValue>| text.map(|text| format!("{name}={}", text.get()));
        // The scaling of llama3 and yarn has numbers that the keys of the fingerprint do not name.
        let scaling = rope.scaling.as_ref().map(|scaling| &*scaling.text);
        let windowed = window.map(|Window { n_positions: _, period }| {
            format!("window={period},{},{:?}", rope.windowed_base, file.query_pre_attn_scalar)
        });
        let listed_changes = listed.as_ref().map(|listed| format!("{listed:?},{}", rope.windowed_base));
        let changes = [compact("rope", scaling), compact("quantization", quantization), windowed, listed_changes];
        Ok(Config {
            family,
            n_layers,
            n_heads,
            n_kv_heads,
            head_size,
            n_embd,
            n_vocab: within("vocab_size", file.vocab_size, MAX_VOCAB)?,
            quantized_bits,
            bos: file.bos_token_id.as_ref().and_then(TokenIds::first),
            eos: file.eos_token_id.as_ref().and_then(TokenIds::first),
            changes: changes.into_iter().flatten().collect(),
            n_ctx_train: file.max_position_embeddings,
            epsilon: file.rms_norm_eps,
            rope,
            window,
            linear,
            listed,
        })
    }

    /// The layers that keep KV, by their section of the KV layout: those that keep every position first, as in llama.cpp.
    pub(super) fn sections(&self) -> Vec<SectionLayers> {
        if let Some(listed) = &self.listed {
            return listed.sections(self.n_kv_heads, self.head_size);
        }
        let mut sections = window::sections(self.n_layers, self.window);
        let keeps_state = |layer: &usize| self.linear.as_ref().is_some_and(|linear| linear.layers.contains(layer));
        sections.iter_mut().for_each(|layers| layers.retain(|layer| !keeps_state(layer)));
        SectionLayers::alike(sections, self.window, self.n_kv_heads, self.head_size)
    }

    /// The keys of a GGUF file's header.
    pub(super) fn metadata(&self) -> Metadata {
        let mut metadata = Metadata::new();
        let architecture = self.family.as_str();
        metadata.insert("general.architecture".into(), Value::String(architecture.into()));
        let mut set = |suffix: &str, value: Value| metadata.insert(format!("{architecture}.{suffix}"), value);
        for (suffix, n) in [
            ("block_count", self.n_layers),
            ("embedding_length", self.n_embd),
            ("attention.head_count", self.n_heads),
            ("attention.head_count_kv", self.n_kv_heads),
            ("attention.key_length", self.head_size),
            ("attention.value_length", self.head_size),
            ("rope.dimension_count", (self.head_size as f64 * self.rope.part) as usize),
        ] {
            set(suffix, Value::Unsigned(n as u64));
        }
        if let Some(n) = self.n_ctx_train {
            set("context_length", Value::Unsigned(n));
        }
        if let Some(epsilon) = self.epsilon {
            set("attention.layer_norm_rms_epsilon", Value::Float(epsilon));
        }
        if let Some(linear) = &self.linear {
            linear.header().into_iter().for_each(|(suffix, n)| drop(set(suffix, Value::Unsigned(n as u64))));
        }
        set("rope.freq_base", Value::Float(self.rope.base));
        if let Some(Window { n_positions, period }) = self.window {
            set("attention.sliding_window", Value::Unsigned(n_positions as u64));
            set("attention.sliding_window_pattern", Value::Unsigned(period as u64));
            set("rope.freq_base_swa", Value::Float(self.rope.windowed_base));
        }
        if let Some(listed) = &self.listed {
            listed
                .header(self.n_kv_heads, self.head_size)
                .into_iter()
                .for_each(|(suffix, value)| drop(set(suffix, value)));
            set("rope.freq_base_swa", Value::Float(self.rope.windowed_base));
        }
        if let Some(FileRopeScaling { kind, factor, .. }) = &self.rope.scaling {
            set("rope.scaling.type", Value::String(kind.clone()));
            if let Some(factor) = factor {
                set("rope.scaling.factor", Value::Float(*factor));
            }
        }
        metadata
    }
}
