//! Reads `tokenizer.json` and the files beside it, as llama.cpp's converter does (`conversion/base.py`, `get_vocab_base`): a
//! folder and the GGUF file made from it have the same tokens, of the same kinds.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::added_tokens::{AddedToken, CONTROL, NORMAL, USER_DEFINED, retype};
use super::config::{Config, Metadata};
use super::error::FolderError;
use super::family::Family;
use super::files::{existing, read, read_json};
use super::pre_tokenizer::pre;
use crate::gguf::byte_level::byte_token;
use crate::gguf::{Array, Value};

/// The largest known ones have some 30 MB.
const MAX_BYTES: u64 = 128 << 20;

/// `tokenizer_config.json` lists every added token in some models.
const MAX_SETTINGS_BYTES: u64 = 16 << 20;

/// Templates have tens of kilobytes.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The character that stands for a space.
const SPACE: &str = "\u{2581}";

/// More of llama.cpp's numbers of types of tokens.
const UNUSED: u32 = 5;
const BYTE: u32 = 6;

/// `tokenizer.json`.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    #[serde(default)]
    post_processor: Json,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct TokenizerModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: Json,
    #[serde(default)]
    merges: Vec<FileMerge>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    continuing_subword_prefix: Option<String>,
    unk_token: Option<String>,
}

/// Old files have one string, new ones a pair.
#[derive(Deserialize)]
#[serde(untagged)]
enum FileMerge {
    Joined(String),
    Pair(String, String),
}

/// `tokenizer_config.json`.
#[derive(Deserialize, Default)]
struct Settings {
    bos_token: Option<Spelling>,
    eos_token: Option<Spelling>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Spelling {
    Plain(String),
    Described { content: String },
}

impl Spelling {
    fn as_str(&self) -> &str {
        match self {
            Spelling::Plain(text) | Spelling::Described { content: text } => text,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// How text becomes tokens.
pub(crate) enum Merging {
    /// By merging pairs of byte-level tokens.
    BytePairs {
        /// Each as `left right`, in the order of their ranks.
        merges: Vec<String>,
        /// llama.cpp's name of the rules that cut a text into words.
        pre: &'static str,
    },
    /// By merging pieces whose token has the best score, as SentencePiece does.
    SentencePieces { scores: Vec<f32> },
    /// By merging pairs of characters' tokens, each as `left right`, in the order of their ranks.
    RankedPieces { merges: Vec<String> },
}

/// A folder's tokens, and how text becomes tokens.
pub(super) struct FolderTokenizer {
    pub(super) spellings: Vec<String>,
    pub(super) types: Vec<u32>,
    pub(super) words: Merging,
    bos: Option<u64>,
    eos: Option<u64>,
    unknown: Option<u64>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    chat_template: Option<String>,
}

impl FolderTokenizer {
    /// Reads the tokenizer of a model with `n_vocab` embeddings.
    pub(super) fn read(folder: &Path, family: Family, n_vocab: usize) -> Result<FolderTokenizer, FolderError> {
        let path = &folder.join("tokenizer.json");
        let file: TokenizerFile = read_json(path, MAX_BYTES)?;
        let unsupported = |why: String| FolderError::unsupported(path, why);
        let model = file.model;
        let kind = model.kind.as_deref().unwrap_or_default();
        let has_prefix = model.continuing_subword_prefix.is_some_and(|prefix| !prefix.is_empty());
        if kind != "BPE" || has_prefix {
            let what = if has_prefix { "a prefix of subwords" } else { kind };
            return Err(unsupported(format!("its tokenizer is of the kind {what:?}; BPE is supported")));
        }
        let Json::Object(vocab) = model.vocab else {
            return Err(FolderError::malformed(path, "its vocab is no object"));
        };
        let (mut spellings, mut types) = tokens(path, &vocab, model.byte_fallback, &file.added_tokens, n_vocab)?;
        let words = if model.byte_fallback {
            let is_gemmas = matches!(family, Family::Gemma3 | Family::Gemma4) && !model.ignore_merges;
            if !is_gemmas || !replaces_spaces(&file.normalizer) || !cuts_at_spaces(&file.pre_tokenizer) {
                return Err(unsupported(
                    "it merges with a fallback to bytes, and its model or its rules are not Gemma's (normalizer, pre_tokenizer)".into(),
                ));
            }
            if family == Family::Gemma4 {
                retype(&file.added_tokens, &mut spellings, &mut types);
                Merging::RankedPieces { merges: model.merges.into_iter().map(FileMerge::joined).collect() }
            } else {
                // Gemma 3's was SentencePiece's: there any two neighbours that make a token are merged, and not only those that
                // are listed.
                check_order(path, &vocab, &model.merges, &types)?;
                Merging::SentencePieces { scores: scores(&types) }
            }
        } else {
            if !matches!(file.normalizer["type"].as_str(), None | Some("NFC")) {
                return Err(unsupported(format!("its tokenizer changes texts: {}", file.normalizer["type"])));
            }
            let pre = pre(&file.pre_tokenizer, model.ignore_merges).ok_or_else(|| {
                unsupported("its text is cut into words by rules that are not supported (pre_tokenizer)".into())
            })?;
            Merging::BytePairs { merges: model.merges.into_iter().map(FileMerge::joined).collect(), pre }
        };
        let settings = match existing(folder, "tokenizer_config.json") {
            Some(path) => read_json(&path, MAX_SETTINGS_BYTES)?,
            None => Settings::default(),
        };
        let ids: HashMap<&str, u64> = spellings.iter().map(String::as_str).zip(0..).collect();
        let id = |spelling: &Option<Spelling>| spelling.as_ref().and_then(|text| ids.get(text.as_str()).copied());
        let (bos, eos) = (id(&settings.bos_token), id(&settings.eos_token));
        let unknown = model.unk_token.and_then(|text| ids.get(text.as_str()).copied());
        let spelled = |spelling: &Option<Spelling>| spelling.as_ref().map(|text| text.as_str().to_owned());
        let added = |at_end: bool, wanted: &Option<Spelling>| {
            let found = added_by_template(&file.post_processor, at_end)?;
            Some(spelled(wanted).is_some_and(|wanted| wanted == found))
        };
        Ok(FolderTokenizer {
            bos,
            eos,
            unknown,
            add_bos: settings.add_bos_token.or_else(|| added(false, &settings.bos_token)),
            add_eos: settings.add_eos_token.or_else(|| added(true, &settings.eos_token)),
            words,
            chat_template: chat_template(folder, settings.chat_template)?,
            spellings,
            types,
        })
    }

    /// Adds the keys of a GGUF file's header.
    pub(super) fn describe(&self, config: &Config, metadata: &mut Metadata) {
        let mut set = |key: &str, value: Value| metadata.insert(format!("tokenizer.{key}"), value);
        set("ggml.tokens", strings(self.spellings.len()));
        match &self.words {
            Merging::BytePairs { merges, pre } => {
                set("ggml.model", Value::String("gpt2".into()));
                set("ggml.pre", Value::String((*pre).into()));
                set("ggml.merges", strings(merges.len()));
            }
            Merging::SentencePieces { .. } => {
                set("ggml.model", Value::String("llama".into()));
            }
            Merging::RankedPieces { merges } => {
                set("ggml.model", Value::String("gemma4".into()));
                set("ggml.merges", strings(merges.len()));
            }
        }
        let special = [("bos", self.bos.or(config.bos)), ("eos", self.eos.or(config.eos)), ("unknown", self.unknown)];
        for (key, id) in special {
            id.into_iter().for_each(|id| drop(set(&format!("ggml.{key}_token_id"), Value::Unsigned(id))));
        }
        for (key, adds) in [("bos", self.add_bos), ("eos", self.add_eos)] {
            adds.into_iter().for_each(|adds| drop(set(&format!("ggml.add_{key}_token"), Value::Bool(adds))));
        }
        if let Some(template) = &self.chat_template {
            set("chat_template", Value::String(template.clone()));
        }
    }
}

/// An array of so many strings, as a [`Gguf`](crate::gguf::Gguf) keeps it.
fn strings(n: usize) -> Value {
    /// GGUF's number of the type.
    const STRING: u32 = 8;
    Value::Array(Array { element_type: STRING, len: n as u64, elements: None })
}

impl FileMerge {
    /// Old files separate both by a space, which their tokens do not contain.
    fn parts(&self) -> (&str, &str) {
        match self {
            FileMerge::Joined(text) => text.split_once(' ').unwrap_or((text, "")),
            FileMerge::Pair(left, right) => (left, right),
        }
    }

    fn joined(self) -> String {
        match self {
            FileMerge::Joined(text) => text,
            FileMerge::Pair(left, right) => format!("{left} {right}"),
        }
    }
}

/// The spelling and the type of each token.
fn tokens(
    path: &Path,
    vocab: &Map<String, Json>,
    has_bytes: bool,
    added: &[AddedToken],
    n_vocab: usize,
) -> Result<(Vec<String>, Vec<u32>), FolderError> {
    let malformed = |what: String| FolderError::malformed(path, what);
    let mut all: Vec<Option<(String, u32)>> = vec![None; n_vocab];
    let mut put = |id: Option<u64>, spelling: String, kind: u32| {
        let place = id.and_then(|id| usize::try_from(id).ok()).and_then(|id| all.get_mut(id));
        let place = place.ok_or_else(|| malformed(format!("the token {spelling:?} is not one of {n_vocab}")))?;
        *place = Some((spelling, kind));
        Ok(())
    };
    for (spelling, id) in vocab {
        let is_byte = has_bytes && byte_token(spelling).is_some();
        put(id.as_u64(), spelling.clone(), if is_byte { BYTE } else { NORMAL })?;
    }
    // They may be in the vocab, too. Some have no embedding, as that of images in text models, so no model gives or takes them.
    let has_embedding = |added: &&AddedToken| added.id < n_vocab as u64;
    for AddedToken { id, content, special } in added.iter().filter(has_embedding) {
        match *special || looks_special(content) {
            true => put(Some(*id), content.clone(), CONTROL)?,
            false => put(Some(*id), content.replace(SPACE, " "), USER_DEFINED)?,
        }
    }
    let named = |(id, token): (usize, Option<(String, u32)>)| token.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
    Ok(all.into_iter().enumerate().map(named).unzip())
}

/// Tokens that llama.cpp's converter makes control tokens, whatever the file says.
fn looks_special(spelling: &str) -> bool {
    let is_between = |first: &str, last: &str| spelling.starts_with(first) && spelling.ends_with(last);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&spelling)
        || is_between("<|", "|>")
        || is_between("<｜", "｜>")
        || is_between("<unused", ">")
}

/// Returns true if spaces become the character that stands for them, and nothing else changes.
fn replaces_spaces(normalizer: &Json) -> bool {
    normalizer["type"] == "Replace" && normalizer["pattern"]["String"] == " " && normalizer["content"] == SPACE
}

/// Returns true if a text is cut nowhere: after the normalizer there are no spaces to cut it at.
fn cuts_at_spaces(pre_tokenizer: &Json) -> bool {
    pre_tokenizer.is_null() || pre_tokenizer["type"] == "Split" && pre_tokenizer["pattern"]["String"] == " "
}

/// Checks that the merges make the tokens in the order of their numbers, as those that were converted from SentencePiece do.
/// Then the scores follow from the numbers.
fn check_order(path: &Path, vocab: &Map<String, Json>, merges: &[FileMerge], types: &[u32]) -> Result<(), FolderError> {
    let mut last = 0;
    for merge in merges {
        let (left, right) = merge.parts();
        let merged = format!("{left}{right}");
        let id = vocab.get(&merged).and_then(Json::as_u64).and_then(|id| usize::try_from(id).ok());
        let Some((id, kind)) = id.and_then(|id| Some((id, *types.get(id)?))) else {
            return Err(FolderError::malformed(path, format!("the merge {merged:?} makes no token")));
        };
        // Added tokens are cut out of a text before anything is merged.
        if kind != NORMAL {
            continue;
        }
        if id < last {
            return Err(FolderError::unsupported(path, "its merges are in another order than its tokens"));
        }
        last = id;
    }
    Ok(())
}

/// SentencePiece's scores: it numbers the pieces in the order in which it has learnt to merge them. llama.cpp's converter
/// gives added tokens a score of its own.
fn scores(types: &[u32]) -> Vec<f32> {
    let mut n_normal = 0;
    let score = |kind: &u32| match *kind {
        NORMAL => {
            n_normal += 1;
            1.0 - n_normal as f32
        }
        BYTE => 0.0,
        _ => ADDED_SCORE,
    };
    types.iter().map(score).collect()
}

const ADDED_SCORE: f32 = -1000.0;

/// The special token that the template of single texts puts before or after a text. `None`: there is no template.
fn added_by_template(post_processor: &Json, at_end: bool) -> Option<String> {
    let all = match post_processor["type"].as_str()? {
        "Sequence" => post_processor["processors"].as_array()?.iter().collect(),
        _ => vec![post_processor],
    };
    let template = all.into_iter().find(|one| one["type"] == "TemplateProcessing")?["single"].as_array()?;
    let piece = if at_end { template.last() } else { template.first() };
    Some(piece?["SpecialToken"]["id"].as_str().unwrap_or_default().to_owned())
}

/// The template in a file of its own, else the one of the settings.
fn chat_template(folder: &Path, of_settings: Option<Templates>) -> Result<Option<String>, FolderError> {
    let template = match (existing(folder, "chat_template.jinja"), of_settings) {
        (Some(path), _) => {
            let text = String::from_utf8(read(&path, MAX_TEMPLATE_BYTES)?);
            Some(text.map_err(|_| FolderError::malformed(&path, "it is not UTF-8"))?)
        }
        (None, Some(Templates::One(template))) => Some(template),
        (None, Some(Templates::Named(all))) => {
            all.into_iter().find(|one| one.name == "default").map(|one| one.template)
        }
        (None, None) => None,
    };
    match template {
        Some(text) if text.len() as u64 > MAX_TEMPLATE_BYTES => {
            Err(FolderError::TooLong { path: folder.join("tokenizer_config.json"), max_bytes: MAX_TEMPLATE_BYTES })
        }
        template => Ok(template),
    }
}
