//! Cuts text into words as llama.cpp does, in time linear in the text, before byte pairs are merged in each word.
//!
//! The patterns are those of `llm_tokenizer_bpe` in llama.cpp's `llama-vocab.cpp`, of the version that Cargo.toml pins.
//! Most run on a copy of the text with a byte for each character: ASCII as it is, other characters by their category.
//! This crate's engine for them is an automaton without look-ahead. So `((?=[\p{L}])[^a-z])` is written `[\p{Lu}]`, and
//! `\s+(?!\S)|\s+` is written `\s+` and `Spaces::LeaveOne`.

use std::sync::LazyLock;

use regex::{Regex, bytes};
use regex_syntax::hir::{Class, HirKind};

/// How a vocabulary's text is cut into words.
pub enum PreTokenizer {
    /// llama.cpp does it in a loop. `None`: the stages are not known here.
    Loop(Option<Stages>),
    /// llama.cpp does it by recursion, with these stages.
    Recursive(Stages),
    /// llama.cpp does it by recursion, with patterns that are not known here.
    Unknown,
}

/// The stages of a pre-tokenizer. Each cuts the pieces of the one before.
pub struct Stages {
    stages: Vec<Stage>,
    /// A word that is a token is not merged from its bytes.
    pub ignore_merges: bool,
}

enum Stage {
    /// A pattern on the categories of characters.
    Categories { pattern: bytes::Regex, spaces: Spaces },
    /// A pattern on the characters themselves.
    Characters(Regex),
    /// Ends a piece after each group of three digits, counted from the end of the number.
    Thousands,
}

/// What becomes of the last space before text, if a match consists of several spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spaces {
    /// It belongs to the match.
    Keep,
    /// It begins the next match.
    LeaveOne,
    /// It begins the next match, unless it is a line break.
    LeaveOneUnlessNewline,
}

/// English contractions.
const CONTRACTION: &str = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])";

impl PreTokenizer {
    /// By the value of `tokenizer.ggml.pre`; without one, llama.cpp takes `default`.
    pub fn named(name: Option<&str>) -> Result<PreTokenizer, regex::Error> {
        use Spaces::{Keep, LeaveOne, LeaveOneUnlessNewline};
        let mut ignore_merges = false;
        let looped = |stages, ignore_merges| Ok(PreTokenizer::Loop(Some(Stages { stages, ignore_merges })));
        let stages = match name.unwrap_or("default") {
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
            | "jina-v5-nano" => return looped(vec![categories(&words("{1,3}"), LeaveOneUnlessNewline)?], true),
            "dbrx" | "smaug-bpe" => return looped(vec![categories(&words("{1,3}"), LeaveOneUnlessNewline)?], false),
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "stablelm2" | "megrez" | "hunyuan" | "solar-open" => {
                return looped(vec![categories(&words(""), LeaveOneUnlessNewline)?], false);
            }
            "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "gigachat" | "jina-v2-es" | "jina-v2-de" | "a.x-4.0"
            | "mellum" | "modern-bert" | "jina-v1-en" | "jina-v2-code" | "roberta-bpe" | "mpt" | "olmo" | "jais"
            | "trillion" | "granite-docling" | "exaone4" => return looped(vec![categories(GPT2, LeaveOne)?], false),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
                return looped(vec![categories(r"\p{N}", Keep)?, categories(GPT2, LeaveOne)?], false);
            }
            "qwen35" => return looped(vec![categories(&words_with_marks(), LeaveOneUnlessNewline)?], false),
            "gemma4"
            | "granite-embed-multi-311m"
            | "mmbert"
            | "sarvam-moe"
            | "chatglm-bpe"
            | "glm4"
            | "glm5"
            | "kimi-k2"
            | "grok-2"
            | "laguna" => return Ok(PreTokenizer::Loop(None)),
            "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => {
                vec![categories(&cased("", CONTRACTION, "{1,3}"), LeaveOneUnlessNewline)?]
            }
            "granite-embed-multi-97m" => {
                ignore_merges = true;
                vec![categories(&cased(r"\p{M}", CONTRACTION, "{1,3}"), LeaveOneUnlessNewline)?]
            }
            "tekken" => {
                ignore_merges = true;
                // An empty group: no contraction belongs to a word.
                vec![categories(&cased("", "(?:)", ""), LeaveOneUnlessNewline)?]
            }
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => vec![
                categories(r"\p{N}{1,3}", Keep)?,
                characters(HAN_AND_KANA)?,
                categories(&symbols(r"[\r\n]*|\s*[\r\n]+"), LeaveOneUnlessNewline)?,
            ],
            "spark2_5" => vec![
                categories(r"\p{N}{1,3}", Keep)?,
                characters(HAN_AND_KANA)?,
                categories(&symbols(r"|[\r\n]"), LeaveOne)?,
                categories(r"\p{N}", Keep)?,
            ],
            "afmoe" => vec![
                Stage::Thousands,
                characters(ASIAN)?,
                categories(&symbols(r"[\r\n]*|\s*[\r\n]+"), LeaveOneUnlessNewline)?,
            ],
            "youtu" => {
                ignore_merges = true;
                let asian = format!(
                    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u{{3001}}-\u{{303F}}\u{{FE30}}-\u{{FE4F}}]+|[ㄅ-ㄯ]+|{HAN_AND_KANA}"
                );
                vec![characters(&asian)?, categories(&uncased(""), LeaveOneUnlessNewline)?]
            }
            "tiny_aya" | "cohere2moe" => {
                vec![Stage::Thousands, categories(&uncased("{1,3}"), LeaveOneUnlessNewline)?]
            }
            "deepseek-coder" => vec![
                characters(r"[\r\n]")?,
                categories(r"\s?\p{L}+", Keep)?,
                categories(r"\s?\p{P}+", Keep)?,
                characters(r"[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+")?,
                categories(r"\p{N}", Keep)?,
            ],
            "falcon" => vec![
                categories(r"[\p{P}\$\+<=>\^~\|`]+", Keep)?,
                categories(GPT2, LeaveOne)?,
                characters("[0-9][0-9][0-9]")?,
            ],
            "default" => vec![
                categories(r"[\p{P}\$\+<=>\^~\|]+", Keep)?,
                categories(GPT2, LeaveOne)?,
                categories(r"\p{N}+", Keep)?,
                characters("[0-9][0-9][0-9]")?,
            ],
            "poro-chat" | "bloom" | "gpt3-finnish" => vec![characters(PHRASES)?],
            "viking" => vec![characters(PHRASES)?, categories(r"\p{N}", Keep)?],
            "bailingmoe" | "bailingmoe2" | "llada-moe" => {
                let pattern = format!(
                    r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+"
                );
                vec![categories(&pattern, LeaveOneUnlessNewline)?]
            }
            "seed-coder" => {
                let pattern = format!(
                    r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+"
                );
                vec![categories(&pattern, LeaveOneUnlessNewline)?]
            }
            "ufakzeka" => {
                let pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
                vec![categories(pattern, LeaveOneUnlessNewline)?]
            }
            "exaone-moe" => {
                let pattern = format!(
                    r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+"
                );
                vec![categories(&pattern, LeaveOneUnlessNewline)?]
            }
            "minicpm5" => {
                ignore_merges = true;
                let pattern = format!(
                    r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
                );
                vec![categories(r"\p{N}{1,3}", Keep)?, categories(&pattern, LeaveOneUnlessNewline)?]
            }
            _ => return Ok(PreTokenizer::Unknown),
        };
        let stages = Stages { stages, ignore_merges };
        Ok(PreTokenizer::Recursive(stages))
    }
}

/// The words of Llama 3 and Qwen 2, with numbers of so many digits.
fn words(digits: &str) -> String {
    format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
}

/// The words of Qwen 3.5, with marks among the letters.
fn words_with_marks() -> String {
    format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
}

/// llama.cpp has a loop for this pattern, which vocabularies with other stages use, too.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

const HAN_AND_KANA: &str = r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";

/// The Asian scripts that AFMoE cuts out. llama.cpp has U+8C48 where U+F900 is meant.
const ASIAN: &str = r"[\u{4E00}-\u{9FFF}\u{3400}-\u{4DBF}\u{8C48}-\u{FAFF}\u{3040}-\u{309F}\u{30A0}-\u{30FF}\u{FF65}-\u{FF9F}\u{2F00}-\u{2FDF}\u{0E40}-\u{0E7F}\u{0E80}-\u{0EFF}\u{1780}-\u{17FF}\u{1000}-\u{109F}\u{AA60}-\u{AA7F}\u{A9E0}-\u{A9FF}\u{AC00}-\u{D7AF}\u{1100}-\u{11FF}]+";

/// Everything up to a space, a bracket or the end of a clause.
const PHRASES: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// Words whose capital letters come first, with `marks` among the letters.
fn cased(marks: &str, contraction: &str, digits: &str) -> String {
    let upper = format!(r"[\p{{Lu}}{marks}]");
    let lower = format!(r"[\p{{Ll}}{marks}]");
    format!(
        r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}?|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}?|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+"
    )
}

/// Words of letters and marks. llama.cpp's patterns name upper and lower case but do not distinguish them.
fn uncased(digits: &str) -> String {
    format!(
        r"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{CONTRACTION}?|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+"
    )
}

/// Words, and symbols with what follows them.
fn symbols(after_symbols: &str) -> String {
    format!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{after_symbols}|\s+"##
    )
}

fn categories(pattern: &str, spaces: Spaces) -> Result<Stage, regex::Error> {
    let pattern = bytes::RegexBuilder::new(&on_categories(pattern)).unicode(false).build()?;
    Ok(Stage::Categories { pattern, spaces })
}

fn characters(pattern: &str) -> Result<Stage, regex::Error> {
    Regex::new(pattern).map(Stage::Characters)
}

/// The bytes that stand for characters outside ASCII.
const NUMBER: u8 = 0xD1;
const LETTER: u8 = 0xD2;
const PUNCTUATION: u8 = 0xD3;
const MARK: u8 = 0xD4;
const SYMBOL: u8 = 0xD5;
const OTHER: u8 = 0xD0;
const SPACE: u8 = 0x0B;

/// A pattern's categories as bytes: those of ASCII, and the one that stands for all other characters of the category.
/// Outside ASCII, case is not known.
fn on_categories(pattern: &str) -> String {
    const BYTES: [(&str, &str); 7] = [
        (r"\p{N}", r"0-9\xD1"),
        (r"\p{L}", r"A-Za-z\xD2"),
        (r"\p{Lu}", r"A-Z\xD2"),
        (r"\p{Ll}", r"a-z\xD2"),
        (r"\p{P}", r"!-#%-*,-/:;?@\[\\\]_{}\xD3"),
        (r"\p{M}", r"\xD4"),
        (r"\p{S}", r"$+<->\^`|~\xD5"),
    ];
    let mut out = String::new();
    let mut in_class = false;
    let mut rest = pattern;
    while let Some(first) = rest.chars().next() {
        if let Some((name, bytes)) = BYTES.iter().find(|(name, _)| rest.starts_with(name)) {
            out += &if in_class { (*bytes).to_owned() } else { format!("[{bytes}]") };
            rest = &rest[name.len()..];
            continue;
        }
        let n_bytes = match first {
            '\\' => 2,
            _ => first.len_utf8(),
        };
        match first {
            '[' => in_class = true,
            ']' => in_class = false,
            _ => {}
        }
        out += &rest[..n_bytes];
        rest = &rest[n_bytes..];
    }
    out
}

/// The byte that stands for a character.
fn category(c: char) -> u8 {
    static RANGES: LazyLock<Vec<(char, char, u8)>> = LazyLock::new(|| {
        let classes =
            [("N", NUMBER), ("L", LETTER), ("P", PUNCTUATION), ("M", MARK), ("S", SYMBOL)].map(|(name, byte)| {
                let parsed = regex_syntax::parse(&format!(r"\p{{{name}}}")).map(|class| class.into_kind());
                let ranges = match parsed {
                    Ok(HirKind::Class(Class::Unicode(class))) => class.ranges().to_vec(),
                    // The self-check against llama.cpp would find it.
                    _ => Vec::new(),
                };
                ranges.into_iter().map(move |range| (range.start(), range.end(), byte))
            });
        let mut ranges: Vec<_> = classes.into_iter().flatten().collect();
        ranges.sort_unstable();
        ranges
    });
    if c.is_ascii() {
        return c as u8;
    }
    if c.is_whitespace() {
        return SPACE;
    }
    let at = RANGES.partition_point(|(_, end, _)| *end < c);
    RANGES.get(at).filter(|(start, ..)| *start <= c).map_or(OTHER, |(_, _, byte)| *byte)
}

/// A text's words, and the length of the longest match in any stage, bytes. llama.cpp's recursion is at most as deep.
pub struct CutWords<'t> {
    pub words: Vec<&'t str>,
    pub longest: usize,
}

impl Stages {
    pub fn cut<'t>(&self, text: &'t str) -> CutWords<'t> {
        let mut words = vec![text];
        let mut longest = 0;
        for stage in &self.stages {
            let mut cut = StagePieces { pieces: Vec::new(), longest };
            words.into_iter().for_each(|piece| stage.cut(piece, &mut cut));
            longest = cut.longest;
            words = cut.pieces;
        }
        CutWords { words, longest }
    }
}

/// The pieces of one stage.
struct StagePieces<'t> {
    pieces: Vec<&'t str>,
    /// The length of the longest match, bytes.
    longest: usize,
}

impl<'t> StagePieces<'t> {
    /// Adds a match, and before it the text between it and the last one.
    fn add(&mut self, between: &'t str, found: &'t str) {
        self.pieces.extend([between, found].into_iter().filter(|piece| !piece.is_empty()));
        self.longest = self.longest.max(found.len());
    }
}

impl Stage {
    fn cut<'t>(&self, piece: &'t str, pieces: &mut StagePieces<'t>) {
        match self {
            Stage::Characters(pattern) => {
                let mut end = 0;
                for found in pattern.find_iter(piece) {
                    pieces.add(&piece[end..found.start()], found.as_str());
                    end = found.end();
                }
                pieces.add(&piece[end..], "");
            }
            Stage::Categories { pattern, spaces } => {
                let categories: Vec<u8> = piece.chars().map(category).collect();
                let mut rest = piece;
                let mut end = 0;
                while let Some(found) = pattern.find_at(&categories, end).filter(|found| !found.is_empty()) {
                    let n_left = spaces.n_left(found.as_bytes(), found.end() < categories.len());
                    let (between, from) = split_at_char(rest, found.start() - end);
                    let (word, after) = split_at_char(from, found.len() - n_left);
                    pieces.add(between, word);
                    rest = after;
                    end = found.end() - n_left;
                }
                pieces.add(rest, "");
            }
            Stage::Thousands => {
                let mut begun = 0;
                for end in thousands(piece).into_iter().chain([piece.len()]) {
                    pieces.add(&piece[begun..end], "");
                    begun = end;
                }
            }
        }
    }
}

impl Spaces {
    /// The number of characters at the end of a match that begin the next one.
    fn n_left(self, found: &[u8], has_more: bool) -> usize {
        let is_space = |byte: u8| matches!(byte, b'\t'..=b'\r' | b' ');
        let is_spaces = has_more && found.len() > 1 && found.iter().all(|&byte| is_space(byte));
        let ends_line = found.last().is_some_and(|byte| matches!(byte, b'\r' | b'\n'));
        match self {
            Spaces::Keep => 0,
            Spaces::LeaveOne => usize::from(is_spaces),
            Spaces::LeaveOneUnlessNewline => usize::from(is_spaces && !ends_line),
        }
    }
}

fn split_at_char(text: &str, n_chars: usize) -> (&str, &str) {
    text.split_at(text.char_indices().nth(n_chars).map_or(text.len(), |(at, _)| at))
}

/// The byte offsets in a text after which a number of the digits of an integer that follow are a multiple of three.
fn thousands(text: &str) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut digits = Vec::new();
    let mut end_number = |digits: &mut Vec<usize>| {
        let first = digits.len() % 3;
        ends.extend(digits.drain(..).enumerate().filter(|(i, _)| (i + 1) % 3 == first).map(|(_, end)| end));
    };
    for (at, c) in text.char_indices() {
        match category(c) {
            b'0'..=b'9' | NUMBER => digits.push(at + c.len_utf8()),
            _ => end_number(&mut digits),
        }
    }
    end_number(&mut digits);
    ends
}
