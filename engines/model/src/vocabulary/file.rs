//! Reads a vocabulary from a model's file, or from a folder as the Hugging Face hub has it.
//!
//! Which tokens are control tokens, and which end a reply, follows llama.cpp's rules: `llama_vocab::impl::load` in
//! `llama-vocab.cpp`, of the version that Cargo.toml pins. Many of them go by a token's spelling, because files leave it out.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use baton_schemas::Token;

use super::pre::{PreTokenizer, Stages};
use super::special::SpecialSpelling;
use super::{SHOWN_CONTROL, TokenFacts, Vocabulary};
use crate::gguf::byte_level::{byte_token, decoded, spelled};
use crate::gguf::{Gguf, GgufError};
use crate::hf::{Merging, ModelFolder};

/// Why a model's vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The file has no tokens, or arrays of other lengths.
    #[error("its vocabulary is incomplete: {0}")]
    Incomplete(&'static str),
    /// Its kind is unknown here.
    #[error(
        "its vocabulary is of the kind {0:?}; \"llama\" (SentencePiece), \"gpt2\" (byte pairs) and \"gemma4\" are supported"
    )]
    Kind(String),
    /// Its rules for words are unknown here.
    #[error("its text is cut into words by rules that are not supported: {0:?}")]
    Words(String),
    /// A pattern or a merge cannot be used.
    #[error("its tokenizer cannot be prepared: {0}")]
    Tokenizer(String),
}

/// A vocabulary as the file has it.
pub struct FileVocabulary {
    tokens: Vec<FileToken>,
    pub(super) kind: VocabularyKind,
    pub bos: Option<Token>,
    pub eos: Option<Token>,
    pub(super) unknown: Option<Token>,
    pub add_bos: bool,
    pub(super) add_eos: bool,
    /// Prefix, suffix and middle of a gap to fill.
    pub infill: [Option<Token>; 3],
    end_of_generation: BTreeSet<Token>,
}

/// How text becomes tokens.
pub(super) enum VocabularyKind {
    SentencePieces { scores: Vec<f32>, add_space_prefix: bool },
    BytePairs { stages: Stages, merges: Vec<String> },
    RankedPieces { merges: Vec<String> },
}

struct FileToken {
    spelling: String,
    attributes: Attributes,
}

/// llama.cpp's attributes of a token. A token may have several.
#[derive(Debug, Clone, Copy, Default)]
struct Attributes {
    normal: bool,
    unknown: bool,
    control: bool,
    user_defined: bool,
    byte: bool,
    strips_right: bool,
}

impl Attributes {
    /// Of llama.cpp's number of a type of tokens.
    fn of(number: u32) -> Self {
        let none = Attributes::default();
        match number {
            1 => Attributes { normal: true, ..none },
            2 => Attributes { unknown: true, ..none },
            3 => Attributes { control: true, ..none },
            4 => Attributes { user_defined: true, ..none },
            6 => Attributes { byte: true, ..none },
            _ => none,
        }
    }

    /// It is cut out of texts before they are tokenized.
    fn is_special(self) -> bool {
        self.unknown || self.control || self.user_defined
    }
}

/// Tokens that end a reply.
const ENDS: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// The keys and the spellings of the tokens for filling a gap: prefix, suffix, middle.
const INFILL: [([&str; 2], &[&str]); 3] = [
    (
        ["fim_pre", "prefix"],
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
    ),
    (
        ["fim_suf", "suffix"],
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
    ),
    (
        ["fim_mid", "middle"],
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
    ),
];

/// The same of tokens around a gap that end a reply.
const INFILL_ENDS: [(&str, &[&str]); 3] = [
    ("fim_pad", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    ("fim_rep", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ("fim_sep", &["<|file_sep|>"]),
];

impl FileVocabulary {
    /// Reads the vocabulary of the file at `path`. Blocking: some megabytes.
    pub fn read(gguf: &Gguf, path: &Path) -> Result<Self, VocabularyError> {
        let spellings =
            Gguf::strings(path, "tokenizer.ggml.tokens")?.ok_or(VocabularyError::Incomplete("no tokens"))?;
        let types = Gguf::numbers(path, "tokenizer.ggml.token_type")?;
        let is_short = |n: usize| n < spellings.len();
        if types.as_ref().is_some_and(|types| is_short(types.len())) {
            return Err(VocabularyError::Incomplete("too few types of tokens"));
        }
        let kind = kind(gguf, path, spellings.len())?;
        let number = |i: usize| types.as_ref().map_or(1, |types| types[i] as u32);
        let tokens = spellings.into_iter().enumerate().map(|(i, spelling)| (spelling, number(i)));
        Ok(FileVocabulary::new(gguf, tokens.collect(), kind))
    }

    /// The vocabulary of a model's folder. Errors: its rules for words are unknown here.
    pub fn of_folder(folder: &ModelFolder) -> Result<Self, VocabularyError> {
        let ModelFolder { header, spellings, types, words, .. } = folder;
        let kind = match words {
            Merging::BytePairs { merges, pre } => {
                VocabularyKind::BytePairs { stages: stages(Some(pre))?, merges: merges.clone() }
            }
            Merging::SentencePieces { scores } => {
                VocabularyKind::SentencePieces { scores: scores.clone(), add_space_prefix: false }
            }
            Merging::RankedPieces { merges } => VocabularyKind::RankedPieces { merges: merges.clone() },
        };
        let tokens = spellings.iter().cloned().zip(types.iter().copied());
        Ok(FileVocabulary::new(header, tokens.collect(), kind))
    }

    /// `tokens` are the spelling and llama.cpp's number of the type of each.
    fn new(gguf: &Gguf, tokens: Vec<(String, u32)>, kind: VocabularyKind) -> Self {
        let tokens = tokens.into_iter().enumerate().map(|(i, (spelling, number))| {
            let spelling = if spelling.is_empty() { format!("[EMPTY_{i}]") } else { spelling };
            FileToken { attributes: Attributes::of(number), spelling }
        });
        let tokens: Vec<FileToken> = tokens.collect();
        let pre = gguf.str("tokenizer.ggml.pre").unwrap_or_default();
        // llama.cpp's defaults for files that name none.
        let ([bos, eos, unknown], adds_bos) = match kind {
            VocabularyKind::SentencePieces { .. } => ([Some(1), Some(2), Some(0)], true),
            VocabularyKind::BytePairs { .. } => ([Some(11), Some(11), None], ADD_BOS.contains(&pre)),
            VocabularyKind::RankedPieces { .. } => ([None; 3], true),
        };
        // llama.cpp adds it whatever the file says.
        let always_adds_bos = matches!(kind, VocabularyKind::RankedPieces { .. });
        let special = SpecialKeys { gguf, n_tokens: tokens.len() };
        let is_true = |key: &str| gguf.bool(&format!("tokenizer.ggml.{key}"));
        let mut vocabulary = FileVocabulary {
            bos: special.get("bos").or(special.within(bos)),
            eos: special.get("eos").or(special.within(eos)),
            unknown: special.get("unknown").or(special.within(unknown)),
            add_bos: always_adds_bos || is_true("add_bos_token").unwrap_or(adds_bos),
            add_eos: is_true("add_eos_token").unwrap_or(false),
            infill: [None; 3],
            end_of_generation: BTreeSet::new(),
            tokens,
            kind,
        };
        vocabulary.find_special(&special);
        vocabulary.strip_spaces(gguf.name().unwrap_or_default());
        vocabulary
    }

    /// Finds the tokens that have a role, by their keys and by their spellings.
    fn find_special(&mut self, special: &SpecialKeys<'_>) {
        let spellings = self.tokens.iter().zip(0..).map(|(token, id)| (token.spelling.clone(), id));
        let ids: HashMap<String, Token> = spellings.collect();
        let id = |spelling: &&str| ids.get(*spelling).copied();
        for (role, (keys, spellings)) in INFILL.into_iter().enumerate() {
            let by_key = keys.iter().find_map(|key| special.get(key));
            self.infill[role] = by_key.or_else(|| self.make_control(spellings.iter().find_map(id)));
        }
        for (key, spellings) in INFILL_ENDS {
            let end = special.get(key).or_else(|| self.make_control(spellings.iter().find_map(id)));
            self.end_of_generation.extend(end);
        }
        for end in ENDS.iter().filter_map(id) {
            self.make_control(Some(end));
            self.end_of_generation.insert(end);
        }
        for shown in SHOWN_CONTROL.iter().filter_map(id) {
            self.tokens[shown as usize].attributes = Attributes::of(4);
        }
        self.end_of_generation.extend([self.eos, special.get("eot"), special.get("eom")].into_iter().flatten());
        let ends = |spelling: &str| id(&spelling).filter(|id| self.end_of_generation.contains(id));
        let calls = ends("<|call|>").or(ends("<|calls|>"));
        let is_harmony = calls.is_some() && ends("<|return|>").or(ends("<|flush|>")).is_some();
        let has_plain_s = ends("<|tool_response>").or(ends("<|plamo:eos|>")).is_some();
        // In these vocabularies they are the end of a part of a reply, and text.
        let not_ends = [ends("<|end|>").filter(|_| is_harmony), ends("</s>").filter(|_| has_plain_s)];
        for (end, number) in not_ends.into_iter().zip([4, 1]) {
            if let Some(end) = end {
                self.end_of_generation.remove(&end);
                self.tokens[end as usize].attributes = Attributes::of(number);
            }
        }
    }

    /// Makes a token that looks like a control token one. Returns it.
    fn make_control(&mut self, token: Option<Token>) -> Option<Token> {
        if let Some(token) = token {
            self.tokens[token as usize].attributes.control = true;
        }
        token
    }

    /// In Phi 3's vocabularies, special tokens take the spaces after them.
    fn strip_spaces(&mut self, model: &str) {
        let model = model.to_lowercase();
        if !model.contains("phi-3") && !model.contains("phi3") {
            return;
        }
        for token in &mut self.tokens {
            let is_kept = ["<unk>", "<s>", "<|endoftext|>"].contains(&&*token.spelling);
            token.attributes.strips_right = (token.attributes.is_special() || token.spelling == "</s>") && !is_kept;
        }
    }

    /// The spellings of all tokens.
    pub(super) fn spellings(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().map(|token| &*token.spelling)
    }

    /// The tokens that are cut out of texts.
    pub(super) fn special(&self) -> impl Iterator<Item = SpecialSpelling<'_>> {
        let special = (0..).zip(&self.tokens).filter(|(_, token)| token.attributes.is_special());
        special.map(|(id, FileToken { spelling, attributes })| SpecialSpelling {
            token: id,
            spelling,
            is_control: attributes.control || attributes.unknown,
            strips_left: false,
            strips_right: attributes.strips_right,
        })
    }

    /// The spellings of control tokens, those included that replies show.
    pub fn control_spellings(&self) -> Vec<String> {
        let is_control = |token: &&FileToken| {
            let Attributes { control, unknown, .. } = token.attributes;
            control || unknown || SHOWN_CONTROL.contains(&&*token.spelling)
        };
        self.tokens.iter().filter(is_control).map(|token| token.spelling.clone()).collect()
    }

    /// The facts about every token.
    pub fn table(&self) -> Vocabulary {
        let bytes: HashMap<char, u8> = (0..=u8::MAX).map(|byte| (spelled(byte), byte)).collect();
        Vocabulary::new((0..).zip(&self.tokens).map(|(id, token)| TokenFacts {
            piece: self.piece(token, &bytes),
            is_control: token.attributes.control,
            is_end_of_generation: self.end_of_generation.contains(&id),
        }))
    }

    fn piece(&self, token: &FileToken, bytes: &HashMap<char, u8>) -> Vec<u8> {
        let FileToken { spelling, attributes } = token;
        if attributes.is_special() {
            return spelling.clone().into_bytes();
        }
        match self.kind {
            VocabularyKind::BytePairs { .. } if attributes.normal => decoded(spelling, bytes),
            VocabularyKind::BytePairs { .. } if attributes.byte => {
                spelling.chars().next().and_then(|c| bytes.get(&c)).copied().into_iter().collect()
            }
            VocabularyKind::BytePairs { .. } => Vec::new(),
            _ if attributes.normal => spelling.replace('\u{2581}', " ").into_bytes(),
            _ if attributes.byte => byte_token(spelling).into_iter().collect(),
            _ => Vec::new(),
        }
    }
}

/// Pre-tokenizers whose models want BOS unless the file says otherwise.
const ADD_BOS: [&str; 11] = [
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
    "chameleon",
];

fn kind(gguf: &Gguf, path: &Path, n_tokens: usize) -> Result<VocabularyKind, VocabularyError> {
    match gguf.str("tokenizer.ggml.model").unwrap_or_default() {
        "llama" => {
            let scores = Gguf::numbers(path, "tokenizer.ggml.scores")?;
            let scores: Vec<f32> = scores.unwrap_or_else(|| vec![0.0; n_tokens]).iter().map(|n| *n as f32).collect();
            if scores.len() < n_tokens {
                return Err(VocabularyError::Incomplete("too few scores"));
            }
            let add_space_prefix = gguf.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
            Ok(VocabularyKind::SentencePieces { scores, add_space_prefix })
        }
        "gpt2" => {
            let pre = gguf.str("tokenizer.ggml.pre").filter(|name| !name.is_empty());
            Ok(VocabularyKind::BytePairs { stages: stages(pre)?, merges: merges(path)? })
        }
        "gemma4" => Ok(VocabularyKind::RankedPieces { merges: merges(path)? }),
        other => Err(VocabularyError::Kind(other.to_owned())),
    }
}

fn merges(path: &Path) -> Result<Vec<String>, VocabularyError> {
    Gguf::strings(path, "tokenizer.ggml.merges")?.ok_or(VocabularyError::Incomplete("no merges"))
}

/// The rules for words of this name.
fn stages(pre: Option<&str>) -> Result<Stages, VocabularyError> {
    match PreTokenizer::named(pre).map_err(|e| VocabularyError::Tokenizer(e.to_string()))? {
        PreTokenizer::Loop(Some(stages)) | PreTokenizer::Recursive(stages) => Ok(stages),
        PreTokenizer::Loop(None) | PreTokenizer::Unknown => {
            Err(VocabularyError::Words(pre.unwrap_or_default().to_owned()))
        }
    }
}

/// The tokens that the file's keys name.
struct SpecialKeys<'g> {
    gguf: &'g Gguf,
    n_tokens: usize,
}

impl SpecialKeys<'_> {
    fn get(&self, role: &str) -> Option<Token> {
        let id = self.gguf.u64(&format!("tokenizer.ggml.{role}_token_id"))?;
        self.within(Token::try_from(id).ok())
    }

    fn within(&self, id: Option<Token>) -> Option<Token> {
        id.filter(|id| (*id as usize) < self.n_tokens)
    }
}
