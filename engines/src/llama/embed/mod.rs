//! Computes vectors of texts, and scores of documents, in the thread that owns the model's contexts, between the steps of generation.
//!
//! Vectors have their own context, created for the first text, so that they take no KV from slots. A step is one
//! `llama_decode`: as many whole texts as fit, from any requests, or a piece of one long text. While streams are
//! running, a step is as small as a prefill's.

pub(super) mod plan;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_schemas::embed::EmbedEvent;
use baton_schemas::{EngineError, Token};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;

use self::plan::{EmbedPlan, MAX_SEQUENCES};
use super::adapter::Adapter;
use super::load;
use super::vocabulary::token;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::jobs::{EmbedJob, EngineLoad};
use crate::serving::vectors::Vectors;

/// Owns the context for vectors and the queue of texts. See the module's documentation.
pub(crate) struct Embedder<'m> {
    model: &'m LlamaModel,
    options: EngineOptions,
    adapter: Option<Arc<Adapter>>,
    /// `None` for a model that gives no vectors; it gets no jobs.
    plan: Option<EmbedPlan>,
    /// Bytes of the context's KV and states.
    kv_bytes: u64,
    shared: Arc<EngineLoad>,
    context: Option<LlamaContext<'m>>,
    batch: LlamaBatch<'static>,
    jobs: VecDeque<EmbedJob>,
    /// Tokens of the first job's first text that are computed. Greater than 0 only between two pieces of a long text.
    n_done: usize,
}

/// A text that a step completes: its job and its llama.cpp sequence.
struct TextPart {
    job: usize,
    sequence: i32,
}

impl<'m> Embedder<'m> {
    pub(crate) fn new(
        model: &'m LlamaModel,
        options: EngineOptions,
        plan: Option<EmbedPlan>,
        kv_bytes: u64,
        shared: Arc<EngineLoad>,
    ) -> Self {
        let batch = LlamaBatch::new(plan.map_or(1, |plan| plan.n_ubatch as usize), 1);
        Embedder {
            model,
            options,
            adapter: None,
            plan,
            kv_bytes,
            shared,
            context: None,
            batch,
            jobs: VecDeque::new(),
            n_done: 0,
        }
    }

    /// Adds the adapter that changes the model's weights.
    pub(super) fn with_adapter(mut self, adapter: Option<Arc<Adapter>>) -> Self {
        self.adapter = adapter;
        self
    }

    /// Creates the context unless it exists.
    pub(super) fn prepare(&mut self) -> Result<(), LoadError> {
        if let (None, Some(plan)) = (&self.context, &self.plan) {
            let adapter = self.adapter.as_deref();
            let kv_bytes = self.kv_bytes;
            self.context = Some(load::embedding_context(self.model, &self.options, adapter, plan, kv_bytes)?);
        }
        Ok(())
    }

    /// Makes one `llama_decode` over at most `limit` tokens, or over one longer text that cannot be divided.
    fn decode(&mut self, limit: Option<usize>) {
        self.drop_cancelled();
        if self.is_idle() {
            return;
        }
        if let Err(error) = self.prepare() {
            tracing::error!(%error, "the context for vectors cannot be created; all waiting texts fail");
            let reason = format!("no vectors can be computed: {}", error.summary());
            return self.fail(0..self.jobs.len(), &EngineError::Unavailable { reason });
        }
        let Some(mut context) = self.context.take() else { return };
        let parts = self.fill_batch(limit);
        match context.decode(&mut self.batch) {
            Ok(()) => self.deliver(&context, &parts),
            Err(error) => {
                self.n_done = 0;
                // A piece of a long text belongs to the first job and completes no text.
                let jobs = parts.iter().map(|part| part.job).chain(parts.is_empty().then_some(0));
                self.fail(jobs, &EngineError::internal(error));
            }
        }
        if self.n_done == 0 {
            forget(&mut context);
            // Each request gets its turn to be first.
            let n_jobs = self.jobs.len().max(1);
            self.jobs.rotate_left(1 % n_jobs);
        }
        self.context = Some(context);
    }

    /// Drops the jobs whose readers have left, and frees their queue places.
    fn drop_cancelled(&mut self) {
        if self.n_done > 0 && self.jobs.front().is_some_and(|job| job.events.is_closed()) {
            self.n_done = 0;
            if let Some(context) = &mut self.context {
                forget(context);
            }
        }
        self.retain(|job| !job.events.is_closed());
    }

    fn retain(&mut self, keep: impl FnMut(&EmbedJob) -> bool) {
        let n_before = self.jobs.len();
        self.jobs.retain(keep);
        self.shared.n_queued.fetch_sub(n_before - self.jobs.len(), Ordering::AcqRel);
    }

    fn fail(&mut self, jobs: impl IntoIterator<Item = usize>, error: &EngineError) {
        for idx in jobs {
            if let Some(job) = self.jobs.get_mut(idx) {
                // The error is sent once, even if several of its texts were in the step.
                if !job.inputs.is_empty() {
                    job.send(Err(error.clone()));
                }
                job.inputs.clear();
            }
        }
        self.retain(|job| !job.inputs.is_empty());
    }

    /// Fills the batch with a piece of the first text if that is long, else with whole texts. Returns the texts that
    /// the step completes. If it completes none, `n_done` is the end of the piece.
    fn fill_batch(&mut self, limit: Option<usize>) -> Vec<TextPart> {
        let n_ubatch = self.plan.map_or(1, |plan| plan.n_ubatch as usize);
        let limit = limit.map_or(n_ubatch, |limit| limit.clamp(1, n_ubatch));
        self.batch.clear();
        let first = self.jobs.front_mut().and_then(|job| job.begin());
        if let Some(text) = first.filter(|text| self.n_done > 0 || text.len() > limit)
            && self.plan.is_some_and(|plan| plan.is_divisible)
        {
            let end = text.len().min(self.n_done + limit);
            add(&mut self.batch, &text[self.n_done..end], self.n_done, 0);
            let is_complete = end == text.len();
            self.n_done = if is_complete { 0 } else { end };
            return if is_complete { vec![TextPart { job: 0, sequence: 0 }] } else { Vec::new() };
        }
        let mut parts = Vec::new();
        let mut n_tokens = 0;
        for (idx, job) in self.jobs.iter_mut().enumerate() {
            for at in 0..job.inputs.len() {
                let sequence = parts.len() as i32;
                let n_more = job.inputs[at].len();
                if parts.len() >= MAX_SEQUENCES as usize || (n_tokens > 0 && n_tokens + n_more > limit) {
                    break;
                }
                job.begin();
                add(&mut self.batch, &job.inputs[at], 0, sequence);
                parts.push(TextPart { job: idx, sequence });
                n_tokens += n_more;
            }
        }
        parts
    }

    /// Sends the vectors of the texts that a step completed.
    fn deliver(&mut self, context: &LlamaContext<'_>, parts: &[TextPart]) {
        let Some(EmbedPlan { output, .. }) = self.plan else { return };
        for part in parts {
            let values = context.embeddings_seq_ith(part.sequence).map_err(EngineError::internal);
            let vector = values.and_then(|values| output.read(values));
            let Some(job) = self.jobs.get_mut(part.job).filter(|job| !job.inputs.is_empty()) else { continue };
            match vector {
                Ok(vector) => {
                    job.inputs.pop_front();
                    job.send(Ok(EmbedEvent::Vector(vector)));
                    if job.inputs.is_empty() {
                        job.finish();
                    }
                }
                Err(error) => {
                    job.inputs.clear();
                    job.send(Err(error));
                }
            }
        }
        self.retain(|job| !job.inputs.is_empty());
    }
}

impl Vectors for Embedder<'_> {
    fn push(&mut self, job: EmbedJob) {
        self.jobs.push_back(job);
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    fn backlog(&self) -> usize {
        self.jobs.iter().flat_map(|job| &job.inputs).map(Vec::len).sum::<usize>() - self.n_done
    }

    fn step(&mut self, limit: Option<usize>) {
        self.decode(limit);
    }
}

/// Removes every text's KV, sequence by sequence: clearing the cache as a whole would write to all of its memory.
fn forget(context: &mut LlamaContext<'_>) {
    for sequence in 0..MAX_SEQUENCES {
        if let Err(error) = context.clear_kv_cache_seq(Some(sequence), None, None) {
            tracing::error!(%error, "llama.cpp refused to remove the KV of a text");
        }
    }
}

/// Adds a text, or a piece of it that begins at position `from`. Every token's state is requested: llama.cpp pools
/// them.
fn add(batch: &mut LlamaBatch<'_>, tokens: &[Token], from: usize, sequence: i32) {
    for (position, &t) in (from..).zip(tokens) {
        let added = batch.add(token(t), position as i32, &[sequence], true);
        debug_assert!(added.is_ok(), "the batch holds n_ubatch tokens, and a step is no larger");
    }
}
