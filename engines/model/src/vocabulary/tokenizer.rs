//! The tokenizer of a model's file: gives the tokens that llama.cpp gives.

use aho_corasick::AhoCorasick;
use baton_schemas::{EngineError, Token};
use tokio_util::sync::CancellationToken;

use super::byte_pairs::BytePairs;
use super::file::{FileVocabulary, VocabularyError, VocabularyKind};
use super::ranked_pieces::RankedPieces;
use super::sentence_pieces::SentencePieces;
use super::special::{Fragment, SpecialSpellings};
use super::{SHOWN_CONTROL, TextTokenizer, caller_has_gone, cut_spellings};

/// A model's tokenizer.
pub struct FileTokenizer {
    special: SpecialSpellings,
    /// Finds control tokens that are read in any text.
    shown_control: AhoCorasick,
    words: WordTokenizer,
    before: Vec<Token>,
    after: Vec<Token>,
}

enum WordTokenizer {
    SentencePieces(SentencePieces),
    BytePairs(BytePairs),
    RankedPieces(RankedPieces),
}

impl FileTokenizer {
    /// The tokenizer of a vocabulary. Blocking: up to a second.
    pub fn new(vocabulary: FileVocabulary) -> Result<Self, VocabularyError> {
        let failed = |e: aho_corasick::BuildError| VocabularyError::Tokenizer(e.to_string());
        let special = SpecialSpellings::new(vocabulary.special()).map_err(failed)?;
        let shown = SHOWN_CONTROL.iter().filter(|shown| vocabulary.spellings().any(|known| known == **shown));
        let shown_control = AhoCorasick::new(shown).map_err(failed)?;
        let before = vocabulary.bos.filter(|_| vocabulary.add_bos).into_iter().collect();
        let after = vocabulary.eos.filter(|_| vocabulary.add_eos).into_iter().collect();
        let unknown = vocabulary.unknown.unwrap_or(0);
        let spellings: Vec<String> = vocabulary.spellings().map(str::to_owned).collect();
        let words = match vocabulary.kind {
            VocabularyKind::SentencePieces { scores, add_space_prefix } => {
                let spellings = spellings.iter().map(String::as_str);
                WordTokenizer::SentencePieces(SentencePieces::new(spellings, scores, unknown, add_space_prefix))
            }
            VocabularyKind::BytePairs { stages, merges } => {
                let pairs = BytePairs::new(&spellings, stages, &merges).map_err(VocabularyError::Tokenizer)?;
                WordTokenizer::BytePairs(pairs)
            }
            VocabularyKind::RankedPieces { merges } => {
                let pieces = RankedPieces::new(&spellings, &merges).map_err(VocabularyError::Tokenizer)?;
                WordTokenizer::RankedPieces(pieces)
            }
        };
        Ok(FileTokenizer { special, shown_control, words, before, after })
    }
}

impl TextTokenizer for FileTokenizer {
    fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
        is_abandoned: &CancellationToken,
    ) -> Result<Vec<Token>, EngineError> {
        let mut tokens = if add_special { self.before.clone() } else { Vec::new() };
        for fragment in self.special.cut(text, parse_special, is_abandoned)? {
            if is_abandoned.is_cancelled() {
                return Err(caller_has_gone());
            }
            match fragment {
                Fragment::Special(special) => tokens.push(special),
                Fragment::Text("") => {}
                Fragment::Text(text) => match &self.words {
                    WordTokenizer::SentencePieces(pieces) => pieces.tokenize(text, &mut tokens, is_abandoned)?,
                    WordTokenizer::BytePairs(pairs) => tokens.extend(pairs.tokenize(text, is_abandoned)?),
                    WordTokenizer::RankedPieces(pieces) => pieces.tokenize(text, &mut tokens, is_abandoned)?,
                },
            }
        }
        if add_special {
            tokens.extend(&self.after);
        }
        Ok(tokens)
    }

    fn tokenize_plain(&self, text: &str, is_abandoned: &CancellationToken) -> Result<Vec<Token>, EngineError> {
        cut_spellings(text, &self.shown_control, is_abandoned, |part| self.tokenize(part, false, false, is_abandoned))
    }
}
