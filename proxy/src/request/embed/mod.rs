//! The life of a request for vectors or scores: target, admission, tokens, node, results, and another node if the first is
//! lost.
//!
//! Unlike [`generate`](crate::request::generate), there is nothing to plan: no KV cache is kept or handed over, so the
//! least busy node is the best.

use std::sync::{Arc, Mutex, PoisonError};

use baton_schemas::embed::{
    EmbedEvent, EmbedInput, EmbedRequest, EmbedSequences, EmbedTask, EmbedTimings, EmbeddingFacts, MAX_INPUTS,
    MAX_TOTAL_TOKENS,
};
use baton_schemas::node::{NodeInfo, PairRequest};
use baton_schemas::{EngineError, Token};
use futures::StreamExt;
use futures::future::try_join_all;
use tracing::Instrument;

use crate::admission::{Admission, Place, SlotUse};
use crate::error::RequestError;
use crate::observe::{EmbedWatch, Observer};
use crate::request::caller::Caller;
use crate::request::failover::{PoisonMark, StartRetry};
use crate::request::prompt::{self, PromptNode};
use crate::request::seats::Seats;
use crate::targets::model_loading::KeepWish;
use crate::targets::models::{NodeWait, ServedModel};
use crate::targets::nodes::{Node, Task};
use crate::targets::upstreams::{self, EmbedQuestion};
use crate::targets::{Embedded, Target, Targets};
use crate::usage::RequestUsage;

/// The number of texts that are tokenized in parallel. Each is a small call to the node.
const TOKENIZED_TOGETHER: usize = 8;

/// The texts and tokens that a node gets at once: some steps of the engine, which computes requests in the order of their
/// arrival. A request with more texts lets others in between.
const PIECE_TEXTS: usize = 64;
const PIECE_TOKENS: usize = 4_096;

/// Computes the vectors, or the scores, of a request's texts. Dropping the future cancels the rest within one step of the engine.
pub async fn embed(
    admission: &Admission,
    targets: &Targets,
    observer: &Arc<Observer>,
    request: EmbedRequest,
    caller: &Caller,
) -> Result<Embedded, RequestError> {
    let usage = RequestUsage::new(&observer.usage, &caller.account, caller.secret);
    let mut watch = EmbedWatch::begin(observer, &caller.request_id, usage, caller.trace.clone());
    let span = watch.span().clone();
    let outcome = admit_and_compute(admission, targets, request, caller, &mut watch).instrument(span).await;
    match &outcome {
        Ok(embedded) => {
            watch.done(embedded.vectors.len() as u64, embedded.n_tokens);
            watch.usage.embedded(embedded.n_tokens, embedded.timings.compute_ms).await;
        }
        Err(error) => {
            watch.failed(error);
            watch.usage.never_began();
        }
    }
    outcome
}

async fn admit_and_compute(
    admission: &Admission,
    targets: &Targets,
    mut request: EmbedRequest,
    caller: &Caller,
    watch: &mut EmbedWatch,
) -> Result<Embedded, RequestError> {
    let wish = KeepWish::of(request.keep_alive, &caller.account);
    // An upstream knows no keys, so only an operator's wish reaches it.
    request.keep_alive = request.keep_alive.filter(|_| caller.account.limits.is_operator);
    let request = &request;
    let target = targets.resolve(Some(&request.model), &caller.account)?;
    watch.is_for(target.name());
    // The rate before memory, and memory before admission, as for generation. Texts count by their tokens.
    caller.admission.charge(&caller.account, 1).await?;
    caller.account.check_budgets()?;
    let _lease = targets.lease(&target, wish).await?;
    admission.set_targets(targets.places());
    let permit = admission.enter(&caller.account, &caller.admission);
    let model = match &target {
        // No fallback: vectors of another model are not comparable.
        Target::Nodes { model, .. } => model,
        Target::Upstreams(serving) => {
            let n_tokens = upstreams::estimated_input_tokens(&request.task, &request.inputs);
            watch.usage.reserve(n_tokens, Some(0), 1)?;
            let n_tokens = u32::try_from(n_tokens).unwrap_or(u32::MAX);
            let places = permit.places(watch.work());
            let watch = Mutex::new(watch);
            let asks = |server: &str| {
                let mut watch = watch.lock().unwrap_or_else(PoisonError::into_inner);
                watch.asks(server);
                // It computes from now on, even if the client leaves before the vectors come.
                watch.usage.begin(n_tokens, 0, Arc::default());
            };
            let question = EmbedQuestion { request, request_id: &caller.request_id, asks: &asks };
            let embedded = upstreams::embed(serving, &places, &question).await?;
            permit.charge_prompt(embedded.n_tokens);
            caller.memory.collect(embedded.vectors.iter().map(|vector| size_of_val(&vector[..])).sum())?;
            return Ok(embedded);
        }
    };
    // A node computes one piece of the texts at a time, so the request occupies one place, however many texts it has.
    let mut seats = Seats::none(permit.places(watch.work()), 1, NodeWait::ForNodes);
    seats.take_any(model, Some(&request.model)).await?;
    let key = caller.account.tag();
    let tokenize = |node: Arc<Node>, info: Arc<NodeInfo>| async move {
        let sizes = VectorSizes::of(&info, request)?;
        let at = PromptNode { node: &node, info: &info, key };
        Ok((tokens(at, request, sizes.n_ctx).await?, sizes))
    };
    let mut retry = StartRetry::about(&[], PoisonMark::of_prompt(&caller.poison));
    let (inputs, sizes) = retry.ask(model, Some(&request.model), tokenize).await?;
    let n_tokens = inputs.iter().map(Vec::len).sum::<usize>() as u32;
    watch.usage.reserve(n_tokens as usize, Some(0), 1)?;
    tracing::debug!(request_id = caller.request_id, n_inputs = inputs.len(), n_tokens, "embedding texts");
    permit.charge_prompt(n_tokens);
    caller.memory.collect(inputs.len() * sizes.n_values as usize * size_of::<f32>())?;
    watch.usage.begin(n_tokens, 0, Arc::default());
    let run = EmbedRun { model, sizes, places: seats.held, watch };
    let (vectors, timings) = run.compute(inputs, retry).await?;
    Ok(Embedded { vectors, n_tokens, timings })
}

/// The sizes of a model's inputs and results.
#[derive(Debug, Clone, Copy)]
struct VectorSizes {
    /// The most tokens of an input.
    n_ctx: u32,
    /// Values of a result.
    n_values: u32,
}

impl VectorSizes {
    /// The sizes for a request. Errors: the model cannot do what it asks for.
    fn of(info: &NodeInfo, request: &EmbedRequest) -> Result<VectorSizes, RequestError> {
        match (&request.task, info.embedding, info.reranking) {
            (EmbedTask::Embed, Some(facts), _) => {
                check_dimensions(request, facts)?;
                Ok(VectorSizes { n_ctx: facts.n_ctx, n_values: facts.n_embd })
            }
            (EmbedTask::Embed, None, _) => {
                let feature = "embeddings: its model gives no vectors of texts".to_owned();
                Err(EngineError::Unsupported { feature }.into())
            }
            (EmbedTask::Rerank { .. }, _, Some(facts)) => Ok(VectorSizes { n_ctx: facts.n_ctx, n_values: 1 }),
            (EmbedTask::Rerank { .. }, embedding, None) => {
                let does = match (info.generates, embedding) {
                    (true, _) => "generates text",
                    (false, Some(_)) => "computes vectors of texts",
                    (false, None) => "has no classifier",
                };
                let problem = format!(
                    "this model is no reranker: it {does}. Name a model that scores documents, such as a GGUF of \
                     bge-reranker-v2-m3 or Qwen3-Reranker"
                );
                Err(RequestError::InvalidField { field: "model", problem })
            }
        }
    }
}

/// Refuses dimensions other than the model's. Vectors can be shortened only if the model was trained for it (Matryoshka
/// embeddings), which the model's file does not say.
fn check_dimensions(request: &EmbedRequest, facts: EmbeddingFacts) -> Result<(), RequestError> {
    match request.dimensions {
        Some(n) if n != facts.n_embd => {
            let problem = format!("this model's vectors have {} values and cannot be cut to {n}", facts.n_embd);
            Err(RequestError::InvalidField { field: "dimensions", problem })
        }
        _ => Ok(()),
    }
}

/// Tokenizes every input and checks its length.
async fn tokens(at: PromptNode<'_>, request: &EmbedRequest, n_ctx: u32) -> Result<Vec<Vec<Token>>, RequestError> {
    let field = request.field;
    let by_tokens = request.inputs.iter().filter_map(|input| match input {
        EmbedInput::Tokens(tokens) => Some(tokens),
        EmbedInput::Text(_) => None,
    });
    prompt::check_vocabulary(field, by_tokens.flatten().copied(), at.info)?;
    if request.inputs.len() > MAX_INPUTS {
        let problem = format!("must have at most {MAX_INPUTS} texts, but has {}", request.inputs.len());
        return Err(RequestError::InvalidField { field, problem });
    }
    let mut inputs = Vec::with_capacity(request.inputs.len());
    let mut n_tokens = 0;
    for (chunk_idx, chunk) in request.inputs.chunks(TOKENIZED_TOGETHER).enumerate() {
        let first = chunk_idx * TOKENIZED_TOGETHER;
        let tokens = chunk.iter().zip(first..).map(|numbered| one_input(at, numbered, request, n_ctx));
        let tokens = try_join_all(tokens).await?;
        n_tokens += tokens.iter().map(Vec::len).sum::<usize>();
        // A long query counts with each document, so a small body can have many tokens.
        if n_tokens > MAX_TOTAL_TOKENS {
            let n_read = first + chunk.len();
            let problem =
                format!("must have at most {MAX_TOTAL_TOKENS} tokens in all, but the first {n_read} have {n_tokens}");
            return Err(RequestError::InvalidField { field, problem });
        }
        inputs.extend(tokens);
    }
    Ok(inputs)
}

async fn one_input(
    at: PromptNode<'_>,
    (input, idx): (&EmbedInput, usize),
    request: &EmbedRequest,
    n_ctx: u32,
) -> Result<Vec<Token>, RequestError> {
    let tokenized = match (input, &request.task) {
        (EmbedInput::Tokens(tokens), _) => Ok(tokens.clone()),
        // Only Ollama's dialect has empty texts.
        (EmbedInput::Text(text), EmbedTask::Embed) if text.is_empty() => empty_text(at).await,
        (EmbedInput::Text(text), EmbedTask::Embed) => at.tokenize(text.as_str(), true, false).await,
        (EmbedInput::Text(text), EmbedTask::Rerank { query }) => {
            let pair = PairRequest { query: Arc::clone(query), document: text.clone(), key: at.key };
            at.node.engine.pair(&pair).await
        }
    };
    let too_long = |n_tokens| match request.task {
        EmbedTask::Embed => RequestError::InputTooLong { field: request.field, idx, n_tokens, n_ctx },
        EmbedTask::Rerank { .. } => RequestError::DocumentTooLong { idx, n_tokens, n_ctx },
    };
    let tokens = match tokenized {
        // The text cannot fit, whatever its tokens are. Even with `truncate` it is not worth tokenizing.
        Err(EngineError::ContextOverflow { n_prompt, .. }) => return Err(too_long(n_prompt)),
        tokens => tokens?,
    };
    if tokens.is_empty() {
        let problem = format!("text {idx} has no tokens");
        return Err(RequestError::InvalidField { field: request.field, problem });
    }
    match tokens.len() > n_ctx as usize {
        false => Ok(tokens),
        true if request.truncate => cut(at, tokens, n_ctx as usize).await,
        true => Err(too_long(tokens.len() as u32)),
    }
}

/// The tokens of an empty text: those that every text has, or the one that ends a reply in a vocabulary without them.
async fn empty_text(at: PromptNode<'_>) -> Result<Vec<Token>, EngineError> {
    let tokens = at.tokenize("", true, false).await?;
    if !tokens.is_empty() {
        return Ok(tokens);
    }
    at.tokenize(at.info.facts.eos_token.as_str(), false, true).await
}

/// Truncates a text. If the model ends every text with a token, that token is kept: models that pool at it need it.
async fn cut(at: PromptNode<'_>, mut tokens: Vec<Token>, n_ctx: usize) -> Result<Vec<Token>, RequestError> {
    let empty = at.tokenize("", true, false).await?;
    let last = tokens.last().copied().filter(|last| empty.last() == Some(last));
    tokens.truncate(n_ctx);
    if let (Some(last), Some(end)) = (tokens.last_mut(), last) {
        *last = end;
    }
    Ok(tokens)
}

/// A request whose texts are tokens now.
struct EmbedRun<'a> {
    model: &'a ServedModel,
    sizes: VectorSizes,
    places: Vec<Place>,
    watch: &'a mut EmbedWatch,
}

impl EmbedRun<'_> {
    /// Computes all vectors. If a node is lost, its vectors are kept and another node continues from there.
    async fn compute(
        mut self,
        mut inputs: Vec<Vec<Token>>,
        mut retry: StartRetry,
    ) -> Result<(Vec<Vec<f32>>, EmbedTimings), RequestError> {
        let mut vectors = Vec::with_capacity(inputs.len());
        let mut timings = EmbedTimings::default();
        loop {
            let error = match choose(self.model, &mut retry).await {
                Ok(node) => {
                    self.watch.asks(&node.name);
                    let visit = retry.visit(node);
                    let (attempt, outcome) = self.attempt(node, &inputs[..piece(&inputs)]).await;
                    timings.queue_ms += attempt.timings.queue_ms;
                    timings.compute_ms += attempt.timings.compute_ms;
                    if !attempt.vectors.is_empty() {
                        retry.progressed();
                    }
                    inputs.drain(..attempt.vectors.len());
                    vectors.extend(attempt.vectors);
                    retry.note(self.model, &visit, &outcome);
                    match outcome {
                        Ok(()) if inputs.is_empty() => return Ok((vectors, timings)),
                        Ok(()) => continue,
                        Err(error) => error.into(),
                    }
                }
                Err(error) => error,
            };
            self.note(SlotUse::NoSlot);
            retry.go_on(self.model, error).await?;
        }
    }

    /// Returns the vectors that one node sends before it finishes or fails.
    async fn attempt(&mut self, node: &Node, inputs: &[Vec<Token>]) -> (PartialVectors, Result<(), EngineError>) {
        let mut attempt = PartialVectors::default();
        let outcome = self.fill(&mut attempt, node, inputs).await;
        (attempt, outcome)
    }

    async fn fill(
        &mut self,
        attempt: &mut PartialVectors,
        node: &Node,
        inputs: &[Vec<Token>],
    ) -> Result<(), EngineError> {
        let says_begin = node.info().is_some_and(|info| info.reports_begin);
        let asked = EmbedSequences { inputs: inputs.to_vec(), reports_begin: says_begin };
        let mut deltas = node.call(node.engine.embed(asked)).await?;
        // A node of an older version does not say when it begins.
        if !says_begin {
            self.note(SlotUse::Working);
        }
        while let Some(delta) = deltas.next().await {
            let delta = delta?;
            // Whatever comes shows that the texts wait no longer. Later pieces of them take turns with other requests' texts.
            self.note(SlotUse::Working);
            match delta {
                EmbedEvent::Begun if attempt.vectors.is_empty() => {}
                EmbedEvent::Vector(vector)
                    if vector.len() == self.sizes.n_values as usize && attempt.vectors.len() < inputs.len() =>
                {
                    attempt.vectors.push(vector);
                }
                EmbedEvent::Finished { timings } if attempt.vectors.len() == inputs.len() => {
                    attempt.timings = timings;
                    node.succeeded(Task::Decode);
                    return Ok(());
                }
                _ => return Err(EngineError::internal("the node sent vectors that were not asked for")),
            }
        }
        Err(EngineError::lost("the stream of vectors ended early"))
    }

    fn note(&mut self, slot_use: SlotUse) {
        self.places.iter_mut().for_each(|place| place.note(slot_use));
    }
}

/// The number of texts that are computed next.
fn piece(inputs: &[Vec<Token>]) -> usize {
    let mut n_tokens = 0;
    let fits = |input: &&Vec<Token>| {
        n_tokens += input.len();
        n_tokens <= PIECE_TOKENS
    };
    // A text that is longer than a piece is computed alone.
    inputs.iter().take(PIECE_TEXTS).take_while(fits).count().max(1)
}

/// Collects the vectors that one node sends before it finishes or fails.
#[derive(Default)]
struct PartialVectors {
    vectors: Vec<Vec<f32>>,
    timings: EmbedTimings,
}

/// Returns the least busy node that has not failed this request; if all have failed, any ready node. A request that
/// needs quarantine gets a node where it is alone.
async fn choose<'m>(model: &'m ServedModel, retry: &mut StartRetry) -> Result<&'m Arc<Node>, RequestError> {
    let left_out = match retry.left_out(model) {
        Some(left_out) if !retry.mark().is_quarantined() => left_out,
        _ => return Ok(retry.next_node(model, None).await?.0),
    };
    let untried = model
        .decode
        .iter()
        .enumerate()
        .filter(|(idx, node)| !left_out.contains(idx) && model.ready_decode(node).is_some());
    let best = untried.min_by_key(|(_, node)| {
        let load = node.load();
        (!node.is_trusted(Task::Decode), load.queued + load.active_slots)
    });
    match best {
        Some((_, node)) => {
            node.breakers.of(Task::Decode).try_pass();
            Ok(node)
        }
        None => Ok(retry.next_node(model, None).await?.0),
    }
}

#[cfg(test)]
mod tests;
