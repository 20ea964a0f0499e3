//! llguidance for one vocabulary, and what a constraint may cost there.

use std::sync::Arc;

use baton_model::vocabulary::Vocabulary;
use baton_schemas::Token;
use llguidance::ParserFactory;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// toktrie's prefix for tokens that are not text.
const SPECIAL_MARK: u8 = 0xFF;

/// The most symbols of a grammar while it is compiled, each about 1 KB. llguidance ends a compilation that needs more than
/// 65,000 in the end.
const MAX_SYMBOLS: usize = 100_000;

/// The most states of a lexer, each 1 to 2 KB. A sequence adds some with its text.
const MAX_STATES: usize = 50_000;

/// Compiles constraints for a vocabulary. Errors: the reason why it cannot, in words.
pub(super) fn factory(vocabulary: &Vocabulary) -> Result<ParserFactory, String> {
    let Some(&end) = vocabulary.end_of_generation().first() else {
        return Err("the model has no token that ends a reply".into());
    };
    let info = TokRxInfo::new(vocabulary.n_tokens() as u32, end);
    let words: Vec<Vec<u8>> = (0..vocabulary.n_tokens() as Token)
        .map(|t| {
            let piece = vocabulary.piece(t);
            let is_text = !vocabulary.is_control(t) && !vocabulary.is_end_of_generation(t);
            if is_text || piece.is_empty() { piece } else { [&[SPECIAL_MARK], &piece[..]].concat() }
        })
        .collect();
    let trie = TokTrie::from(&info, &words).with_eos_tokens(vocabulary.end_of_generation());
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    limits.max_grammar_size = MAX_SYMBOLS;
    limits.max_lexer_states = MAX_STATES;
    Ok(factory)
}
