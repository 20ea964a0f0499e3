//! Structured output with llguidance: decides which tokens may come next.
//!
//! A schema is compiled once and cached. Each sequence gets its own matcher, which follows the tokens and gives, before
//! each draw, those that can still lead to a valid text. The compiler refuses unknown keywords, since ignoring one
//! would break the constraint silently. It also refuses constraints that no text can satisfy, if that shows before the
//! first token; if it shows later, the sequence ends with the same error. Masks are computed beside the scheduler's thread
//! ([`Masks`]).

mod factory;
mod masks;
mod progress;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_model::vocabulary::Vocabulary;
use baton_schemas::constraint::{Asker, Constraint, Rule};
use baton_schemas::{EngineError, KeyTag, Token};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::json;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::factory::factory;
pub(crate) use self::masks::Masks;
pub(crate) use self::progress::{Constrained, NoToken};
use self::progress::{first_line, is_dead_end, thread_time};
use super::deep_stack::on_deep_stack;
use super::derivable::is_derivable;
use super::expansion;
use super::lane::{Lane, LaneTurn};
use super::lark::{self, with_settings};
use super::matcher_cache::MatcherCache;

/// Constraints that are compiled at the same time.
const MAX_COMPILING: u32 = 4;

/// Constraints that wait to be compiled.
const MAX_WAITING: u32 = 64;

/// The longest problem that an error tells.
const MAX_PROBLEM_CHARS: usize = 500;

/// The processor time that a schema may take to compile.
const COMPILE_BUDGET: Duration = Duration::from_secs(10);

/// How long a caller waits for a compilation. A busy machine takes several times as long as the budget, which is not the schema's fault.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the replay of what was generated before may take. It takes microseconds for each token.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);

/// Stack for a compilation. llguidance follows chains of references by recursion, and a schema of the permitted size has
/// up to 7,000.
const STACK_BYTES: usize = 256 << 20;

/// Compiles constraints for one vocabulary.
pub(crate) struct Compiler {
    vocabulary: Arc<Vocabulary>,
    /// Created at first use, since that reads the whole vocabulary.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The compiled constraints.
    cache: MatcherCache,
    /// A compilation cannot be interrupted everywhere. It keeps its turn until it ends, even if nobody waits for it.
    compiling: Lane,
}

/// A compiled constraint.
struct Compiled {
    /// At the beginning of the text.
    matcher: Matcher,
    /// The bytes of its lexer.
    lexer_bytes: usize,
}

/// A compilation on a thread of its own.
struct Compilation<'a> {
    factory: &'a ParserFactory,
    is_abandoned: &'a CancellationToken,
    /// The thread's processor time at its end at the latest.
    ends_at: Duration,
}

impl<'a> Compilation<'a> {
    fn new(factory: &'a ParserFactory, is_abandoned: &'a CancellationToken) -> Self {
        Compilation { factory, is_abandoned, ends_at: thread_time() + COMPILE_BUDGET }
    }

    /// Errors: the reason why it ends here.
    fn check(&self) -> Result<(), String> {
        if self.is_abandoned.is_cancelled() {
            return Err("its caller has gone".to_owned());
        }
        match thread_time() > self.ends_at {
            true => Err("the schema takes too long to compile".to_owned()),
            false => Ok(()),
        }
    }
}

impl Compiler {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Compiler {
            vocabulary,
            factory: OnceLock::new(),
            cache: MatcherCache::default(),
            compiling: Lane::new(MAX_COMPILING, MAX_WAITING),
        }
    }

    /// Compiles a constraint for a key and replays what was generated under it before. Each part has its own deadline, so that a
    /// wait for others, or a long reply, never counts against the schema. The thread that owns the model waits for none.
    /// Errors: the constraint cannot be enforced or takes too long to compile; too many others are compiled.
    pub(crate) async fn constrained(
        self: &Arc<Self>,
        constraint: &Constraint,
        generated: &[Token],
        key: KeyTag,
    ) -> Result<Constrained, EngineError> {
        let source = source(constraint)?;
        let cached = self.cache.get(&source);
        let turn = match cached {
            Some(_) => None,
            None => Some(self.compiling.turn(key).await?),
        };
        let is_abandoned = CancellationToken::new();
        let _abandons = is_abandoned.clone().drop_guard();
        let compile = {
            let (compiler, constraint, is_abandoned) = (Arc::clone(self), constraint.clone(), is_abandoned.clone());
            move || match cached {
                Some(matcher) => Ok(matcher.deep_clone()),
                None => compiler.compile(&constraint, source, turn, &is_abandoned),
            }
        };
        let matcher = timeout(COMPILE_TIMEOUT, spawn_blocking(compile))
            .await
            .map_err(|_| EngineError::Unavailable { reason: "the schema could not be compiled in time".to_owned() })?;
        let matcher = matcher.map_err(EngineError::internal)??;
        let generated = generated.to_vec();
        let replay = spawn_blocking(move || Constrained::after(matcher, &generated, &is_abandoned));
        let replayed = timeout(REPLAY_TIMEOUT, replay).await.map_err(|_| EngineError::Unavailable {
            reason: "the reply so far could not be checked against its schema in time".to_owned(),
        })?;
        replayed.map_err(EngineError::internal)?
    }

    /// A matcher at the beginning of the text. Blocking: a new schema takes milliseconds to seconds, and keeps its turn
    /// for so long. Errors: the constraint cannot be enforced, or its caller has gone.
    fn compile(
        &self,
        constraint: &Constraint,
        source: String,
        _turn: Option<LaneTurn>,
        is_abandoned: &CancellationToken,
    ) -> Result<Matcher, EngineError> {
        // It may be cached by now.
        if let Some(matcher) = self.cache.get(&source) {
            return Ok(matcher.deep_clone());
        }
        let factory = self.factory.get_or_init(|| factory(&self.vocabulary));
        let factory = factory.as_ref().map_err(EngineError::internal)?;
        let compile = || self.compile_with(&Compilation::new(factory, is_abandoned), constraint);
        let compiled = on_deep_stack(STACK_BYTES, compile)??;
        self.cache.put(source, compiled.matcher.deep_clone(), compiled.lexer_bytes);
        Ok(compiled.matcher)
    }

    fn compile_with(&self, compilation: &Compilation<'_>, constraint: &Constraint) -> Result<Compiled, EngineError> {
        let problem = match self.matcher(compilation, constraint) {
            Ok(compiled) => return Ok(compiled),
            Err(problem) => problem,
        };
        let field = constraint.field();
        let Constraint::Grammar { rule, .. } = constraint else {
            return Err(EngineError::invalid_field(field, problem));
        };
        if !rule.has_alternatives() {
            return Err(self
                .culprit(compilation, rule, field)
                .unwrap_or_else(|| EngineError::invalid_field(field, problem)));
        }
        // The problem may be in parts that need not be enforced, so each of them is tried alone. If each works alone,
        // they are too complex together.
        let mut n_known = 0;
        let one_by_one = rule.decided(&mut |part| {
            let part = Constraint::Grammar { rule: part.clone(), field: field.to_owned() };
            let is_known = self.matcher(compilation, &part).is_ok();
            n_known += u32::from(is_known);
            is_known
        });
        tracing::info!(field, problem, n_known, "some schemas cannot be enforced; the optional ones are left out");
        let decided = |rule| Constraint::Grammar { rule, field: field.to_owned() };
        self.compile_with(compilation, &decided(one_by_one)).or_else(|error| match n_known {
            0 => Err(error),
            _ => self.compile_with(compilation, &decided(rule.decided(&mut |_| false))),
        })
    }

    /// A matcher for a constraint that can be enforced. Errors: the reason why it cannot be, in words.
    fn matcher(&self, compilation: &Compilation<'_>, constraint: &Constraint) -> Result<Compiled, String> {
        compilation.check()?;
        let can_end = match constraint {
            Constraint::JsonObject => true,
            Constraint::JsonSchema { schema, held, .. } => is_derivable(held.as_ref().unwrap_or(schema)),
            Constraint::Grammar { rule, field } => {
                rule.schemas(Asker { field, tool: None }).into_iter().all(|(_, schema)| is_derivable(schema))
            }
        };
        if !can_end {
            return Err("the schema describes no JSON that ends".to_owned());
        }
        expansion::check(constraint)?;
        // With its causes: the first words may only say which property cannot be written.
        let parser = compilation
            .factory
            .create_parser(self.grammar(constraint))
            .map_err(|error| shortened(&reason(&format!("{error:#}"))))?;
        compilation.check()?;
        let lexer_bytes = parser.parser.lexer_stats().num_bytes;
        let mut matcher = Matcher::new(Ok(parser));
        let mask = matcher.compute_mask_or_eos();
        compilation.check()?;
        match mask {
            Ok(mask) if !mask.is_zero() => Ok(Compiled { matcher, lexer_bytes }),
            outcome => {
                tracing::debug!(error = ?outcome.err(), "no token satisfies the constraint at the start of the text");
                Err(if is_dead_end(&matcher) { "no text keeps it" } else { "is too complex" }.to_owned())
            }
        }
    }

    fn grammar(&self, constraint: &Constraint) -> TopLevelGrammar {
        match constraint {
            Constraint::JsonObject => TopLevelGrammar::from_json_schema(with_settings(json!({ "type": "object" }))),
            Constraint::JsonSchema { schema, held, .. } => {
                TopLevelGrammar::from_json_schema(with_settings(held.as_ref().unwrap_or(schema).clone()))
            }
            Constraint::Grammar { rule, .. } => TopLevelGrammar::from_lark(lark::write(rule, &self.vocabulary)),
        }
    }

    /// The error of the first schema in a rule that cannot be enforced even on its own. `None`: each of them can be.
    fn culprit(&self, compilation: &Compilation<'_>, rule: &Rule, field: &str) -> Option<EngineError> {
        rule.schemas(Asker { field, tool: None }).into_iter().find_map(|(asker, schema)| {
            let alone = Constraint::Grammar { rule: Rule::Json(schema.clone()), field: field.to_owned() };
            let problem = self.matcher(compilation, &alone).err()?;
            Some(match asker.tool {
                Some(tool) => EngineError::invalid_field(asker.field, format!("the schema of {tool:?}: {problem}")),
                None => EngineError::invalid_field(asker.field, problem),
            })
        })
    }
}

/// The key of a constraint in the cache.
fn source(constraint: &Constraint) -> Result<String, EngineError> {
    serde_json::to_string(constraint).map_err(EngineError::internal)
}

/// The first line of a compiler's error. That of a regular expression has its reason further down, below the pattern.
fn reason(problem: &str) -> String {
    match problem.lines().find_map(|line| line.strip_prefix("error: ")) {
        Some(reason) => format!("its regular expression is wrong: {reason}"),
        None => first_line(problem).to_owned(),
    }
}

/// The compiler's errors repeat patterns, which may be long.
fn shortened(problem: &str) -> String {
    // This advice names an option that no client has.
    let problem = problem.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf");
    match problem.char_indices().nth(MAX_PROBLEM_CHARS) {
        Some((at, _)) => format!("{}…", &problem[..at]),
        None => problem,
    }
}

#[cfg(test)]
#[cfg(feature = "llama")]
mod tests;
