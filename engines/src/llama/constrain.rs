//! Structured output: which tokens may come next, kept by llguidance.
//!
//! A schema is compiled once and remembered; each sequence gets a matcher of its own, which follows the tokens and says
//! before each draw which of them keep the text on its way to something valid. The compiler refuses what it does not
//! know: a keyword that were silently left out would be a constraint that is not kept. It also refuses what nothing can
//! keep, as far as that shows before there is text; where it shows later, the sequence ends with the same error.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use baton_schemas::constraint::{Asker, Constraint, Rule};
use baton_schemas::{EngineError, Token};
use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use serde_json::json;
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::derivable::is_derivable;
use super::lark::{self, with_settings};
use super::vocabulary::Vocabulary;

/// Compiled constraints kept; an application has a handful of schemas.
const MAX_KEPT: usize = 64;

/// How toktrie marks a token that is not text.
const SPECIAL_MARK: u8 = 0xFF;

/// Compiles constraints for one vocabulary.
pub(super) struct Compiler {
    vocabulary: Arc<Vocabulary>,
    /// Made at first use: it goes through the whole vocabulary.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The most recently used last.
    kept: Mutex<VecDeque<(Constraint, Matcher)>>,
}

impl Compiler {
    pub(super) fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Compiler { vocabulary, factory: OnceLock::new(), kept: Mutex::default() }
    }

    /// A matcher at the beginning of the text. Takes milliseconds to seconds for a new schema: call it off the async
    /// threads. Errors: the schema says something that cannot be kept.
    pub(super) fn compile(&self, constraint: &Constraint) -> Result<Matcher, EngineError> {
        if let Some(matcher) = self.recall(constraint) {
            return Ok(matcher);
        }
        let factory = self.factory.get_or_init(|| factory(&self.vocabulary));
        let factory = factory.as_ref().map_err(EngineError::internal)?;
        let matcher = self.compile_with(factory, constraint)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MAX_KEPT {
            kept.pop_front();
        }
        kept.push_back((constraint.clone(), matcher.deep_clone()));
        Ok(matcher)
    }

    fn compile_with(&self, factory: &ParserFactory, constraint: &Constraint) -> Result<Matcher, EngineError> {
        let problem = match self.matcher(factory, constraint) {
            Ok(matcher) => return Ok(matcher),
            Err(problem) => problem,
        };
        let field = constraint.field();
        let Constraint::Grammar { rule, .. } = constraint else {
            return Err(EngineError::invalid_field(field, problem));
        };
        if !rule.has_alternatives() {
            return Err(self.culprit(factory, rule, (field, problem)));
        }
        // What is unknown may be in what need not be held: each such part is tried alone. If all of them are known, they
        // are too much together.
        let mut n_known = 0;
        let one_by_one = rule.decided(&mut |part| {
            let part = Constraint::Grammar { rule: part.clone(), field: field.to_owned() };
            let is_known = self.matcher(factory, &part).is_ok();
            n_known += u32::from(is_known);
            is_known
        });
        tracing::info!(field, problem, n_known, "schemas that nobody insists on are not held");
        let decided = |rule| Constraint::Grammar { rule, field: field.to_owned() };
        self.compile_with(factory, &decided(one_by_one)).or_else(|error| match n_known {
            0 => Err(error),
            _ => self.compile_with(factory, &decided(rule.decided(&mut |_| false))),
        })
    }

    /// A matcher of something that can be kept. Errors: in words, why it cannot.
    fn matcher(&self, factory: &ParserFactory, constraint: &Constraint) -> Result<Matcher, String> {
        let can_end = match constraint {
            Constraint::JsonObject => true,
            Constraint::JsonSchema { schema, .. } => is_derivable(schema),
            Constraint::Grammar { rule, field } => {
                rule.schemas(Asker { field, tool: None }).into_iter().all(|(_, schema)| is_derivable(schema))
            }
        };
        if !can_end {
            return Err("the schema describes no JSON that ends".to_owned());
        }
        let mut matcher = Matcher::new(factory.create_parser(self.grammar(constraint)));
        if let Some(problem) = matcher.get_error() {
            return Err(first_line(&problem).to_owned());
        }
        match matcher.compute_mask_or_eos() {
            Ok(mask) if !mask.is_zero() => Ok(matcher),
            outcome => {
                let stop = matcher.stop_reason();
                tracing::debug!(error = ?outcome.err(), ?stop, "a constraint that no text begins");
                Err(if is_too_complex(stop) { "is too complex" } else { "no text keeps it" }.to_owned())
            }
        }
    }

    fn grammar(&self, constraint: &Constraint) -> TopLevelGrammar {
        match constraint {
            Constraint::JsonObject => TopLevelGrammar::from_json_schema(with_settings(json!({ "type": "object" }))),
            Constraint::JsonSchema { schema, .. } => TopLevelGrammar::from_json_schema(with_settings(schema.clone())),
            Constraint::Grammar { rule, .. } => TopLevelGrammar::from_lark(lark::write(rule, &self.vocabulary)),
        }
    }

    /// The error of a rule that cannot be kept as a whole: that of the first schema in it that cannot be alone.
    fn culprit(&self, factory: &ParserFactory, rule: &Rule, (field, problem): (&str, String)) -> EngineError {
        for (asker, schema) in rule.schemas(Asker { field, tool: None }) {
            let alone = Constraint::Grammar { rule: Rule::Json(schema.clone()), field: field.to_owned() };
            let Err(problem) = self.matcher(factory, &alone) else { continue };
            return match asker.tool {
                Some(tool) => EngineError::invalid_field(asker.field, format!("the schema of {tool:?}: {problem}")),
                None => EngineError::invalid_field(asker.field, problem),
            };
        }
        EngineError::invalid_field(field, problem)
    }

    fn recall(&self, constraint: &Constraint) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == constraint)?;
        let entry = kept.remove(at)?;
        let matcher = entry.1.deep_clone();
        kept.push_back(entry);
        Some(matcher)
    }
}

fn factory(vocabulary: &Vocabulary) -> Result<ParserFactory, String> {
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
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

impl NoToken {
    /// How a sequence of this constraint ends.
    pub(super) fn error(self, constraint: Option<&Constraint>) -> EngineError {
        match (self, constraint) {
            (NoToken::DeadEnd, Some(constraint)) => {
                let problem = "the text has come to where nothing that it allows can follow";
                EngineError::invalid_field(constraint.field(), problem)
            }
            (NoToken::TooComplex, Some(constraint)) => {
                EngineError::invalid_field(constraint.field(), "is too complex for the text that it has come to")
            }
            _ => EngineError::internal("a token did not keep the constraint"),
        }
    }
}

/// One sequence's progress through its constraint.
pub(super) struct Constrained {
    matcher: Matcher,
    /// All of the text so far was drawn under it.
    is_kept: bool,
}

/// Why there is no next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoToken {
    /// Everything was kept, and nothing can follow: that is the constraint's fault.
    DeadEnd,
    /// Everything was kept, and what may follow takes too long to find out.
    TooComplex,
    /// A token came that does not fit, which is ours.
    NotKept,
}

impl Constrained {
    /// At the end of `generated`, which was drawn under the same constraint.
    pub(super) fn after(mut matcher: Matcher, generated: &[Token]) -> Self {
        let mut is_kept = true;
        for &t in generated {
            is_kept &= follow(&mut matcher, t);
        }
        Constrained { matcher, is_kept }
    }

    /// The tokens that may come next; at least one.
    pub(super) fn allowed(&mut self) -> Result<SimpleVob, NoToken> {
        match self.matcher.compute_mask_or_eos() {
            Ok(mask) if !mask.is_zero() => Ok(mask),
            outcome => {
                let stop = self.matcher.stop_reason();
                tracing::debug!(error = ?outcome.err(), ?stop, is_kept = self.is_kept, "no token keeps the constraint");
                Err(match stop {
                    _ if !self.is_kept => NoToken::NotKept,
                    stop if is_too_complex(stop) => NoToken::TooComplex,
                    _ => NoToken::DeadEnd,
                })
            }
        }
    }

    /// Takes note of the token that came.
    pub(super) fn accept(&mut self, t: Token) {
        self.is_kept &= follow(&mut self.matcher, t);
    }

    /// Whether the text is complete and nothing can follow.
    pub(super) fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }
}

/// Whether it was given up because of the compiler's limits.
fn is_too_complex(stop: StopReason) -> bool {
    matches!(stop, StopReason::LexerTooComplex | StopReason::ParserTooComplex)
}

/// Whether the token fits. One that does not leaves an error in the matcher, which the next mask reports.
fn follow(matcher: &mut Matcher, t: Token) -> bool {
    let fits = matcher.is_stopped() || matcher.consume_token(t).is_ok();
    if !fits {
        tracing::debug!(token = t, "a token did not follow its constraint");
    }
    fits
}
