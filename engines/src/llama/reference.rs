//! A plain llama.cpp loop: one context, with one or more sequences stepped together.
//!
//! `baton-bench engine` and the exactness tests compare with it. It prefills all tokens but the last in physical
//! batches and decodes greedily from there.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use baton_model::gguf::Gguf;
use baton_schemas::Token;
use baton_schemas::embed::Pooling;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{LlamaContextParams, LlamaPoolingType};
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;

use super::backend::backend;
use super::load::{self, ContextSizes};
use super::placed::Placed;
use super::vocabulary::{token, tokenize};
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::sampler::argmax;

/// A loaded model for plain loops.
pub struct Reference {
    model: LlamaModel,
    options: EngineOptions,
}

/// The output and the times of a plain loop.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The generated tokens of each sequence.
    pub tokens: Vec<Vec<Token>>,
    /// The logits for each token of the first sequence, `[n_tokens][n_vocab]`, if they were requested.
    pub logits: Vec<Vec<f32>>,
    /// Time of computing all prompts.
    pub prefill: Duration,
    /// Time of all decode steps.
    pub decode: Duration,
}

impl Reference {
    /// Loads the configured model. Plain loops use only the threads and the batch size.
    pub fn load(options: EngineOptions) -> Result<Reference, LoadError> {
        options.check_ranges().map_err(LoadError::Config)?;
        let gguf = Gguf::open(options.path()?)?;
        let model = load::model(&options, &gguf, &Placed::alone())?;
        Ok(Reference { model, options })
    }

    /// The options that it was loaded with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub fn model(&self) -> &LlamaModel {
        &self.model
    }

    /// A context like an engine's, with the configured slots and `n_cells` cells.
    pub fn context(&self, n_cells: u32) -> Result<LlamaContext<'_>, LoadError> {
        let n_batch = self.options.ubatch() + self.options.slots();
        load::context(&self.model, &self.options, None, ContextSizes { n_cells, n_batch, n_rollback: 0 })
    }

    /// Tokenizes text without BOS. Text that spells a control token becomes that token.
    pub fn tokenize(&self, text: &str) -> Vec<Token> {
        tokenize(&self.model, text, false, true)
    }

    /// The tokens that a prompt begins with: BOS, if the model has been trained with it.
    pub fn beginning(&self) -> Vec<Token> {
        let mut tokens = tokenize(&self.model, "", true, false);
        // Some models also end a text.
        tokens.truncate(1);
        tokens
    }

    /// Continues all prompts greedily by `n_new` tokens in lockstep. With `stop_at_end`, a sequence ends before an
    /// end-of-generation token.
    pub fn greedy(&self, prompts: &[Vec<Token>], n_new: usize, options: ReferenceOptions) -> Result<Run, LoadError> {
        let n_seq = u32::try_from(prompts.len().max(1)).unwrap_or(u32::MAX);
        let n_needed: usize = prompts.iter().map(|p| p.len() + n_new + 1).sum();
        let n_cells = u32::try_from(n_needed).unwrap_or(u32::MAX).next_multiple_of(256);
        let of_engine = EngineOptions { n_slots: Some(n_seq), ..self.options.clone() };
        let sizes = ContextSizes { n_cells, n_batch: of_engine.ubatch() + n_seq, n_rollback: 0 };
        let mut context = load::context(&self.model, &of_engine, None, sizes)?;
        let mut plain = Plain { context: &mut context, model: &self.model, n_ubatch: self.options.ubatch() as usize };
        plain.run(prompts, n_new, options)
    }

    /// A pair's scores, as llama.cpp pools them: all values of the classifier, from one batch.
    pub fn scores(&self, pair: &[Token]) -> Result<Vec<f32>, LoadError> {
        let context = self.states(pair, LlamaPoolingType::Rank)?;
        context.embeddings_seq_ith(0).map(<[f32]>::to_vec).map_err(|_| failed())
    }

    /// A text's vector, of length 1: the states of its tokens from one batch, pooled here and not by llama.cpp.
    pub fn embedding(&self, text: &[Token], pooling: Pooling) -> Result<Vec<f32>, LoadError> {
        let context = self.states(text, LlamaPoolingType::None)?;
        let state = |i: usize| context.embeddings_ith(i as i32).map_err(|_| failed());
        let mut vector = vec![0f32; state(0)?.len()];
        let counted = match pooling {
            Pooling::Mean => 0..text.len(),
            Pooling::Cls => 0..1,
            Pooling::Last => text.len() - 1..text.len(),
        };
        for i in counted {
            vector.iter_mut().zip(state(i)?).for_each(|(sum, value)| *sum += value);
        }
        let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
        vector.iter_mut().for_each(|value| *value /= length);
        Ok(vector)
    }

    /// A context that has computed a text in one batch.
    fn states(&self, text: &[Token], pooling: LlamaPoolingType) -> Result<LlamaContext<'_>, LoadError> {
        let n_tokens = u32::try_from(text.len()).unwrap_or(u32::MAX);
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(n_tokens.next_multiple_of(256)))
            .with_n_batch(n_tokens)
            .with_n_ubatch(n_tokens)
            .with_embeddings(true)
            .with_pooling_type(pooling);
        let mut context = self.model.new_context(backend()?, params).map_err(|_| failed())?;
        let mut batch = LlamaBatch::new(text.len(), 1);
        for (position, &t) in text.iter().enumerate() {
            batch.add(token(t), position as i32, &[0], true).map_err(|_| failed())?;
        }
        context.decode(&mut batch).map_err(|_| failed())?;
        Ok(context)
    }
}

fn failed() -> LoadError {
    LoadError::Config("the plain loop failed".into())
}

/// Options of a plain loop.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReferenceOptions {
    /// End a sequence at an end-of-generation token.
    pub stop_at_end: bool,
    /// Keep the first sequence's logits.
    pub keep_logits: bool,
}

struct Plain<'c, 'm> {
    context: &'c mut LlamaContext<'m>,
    model: &'m LlamaModel,
    n_ubatch: usize,
}

impl Plain<'_, '_> {
    fn run(&mut self, prompts: &[Vec<Token>], n_new: usize, options: ReferenceOptions) -> Result<Run, LoadError> {
        let mut batch = LlamaBatch::new(self.n_ubatch.max(prompts.len()), 1);
        let began = Instant::now();
        for (seq, prompt) in prompts.iter().enumerate() {
            let prefill = prompt.split_last().map_or(&prompt[..], |(_, rest)| rest);
            for (chunk_idx, chunk) in prefill.chunks(self.n_ubatch).enumerate() {
                batch.clear();
                for (i, &t) in chunk.iter().enumerate() {
                    Self::add(&mut batch, t, chunk_idx * self.n_ubatch + i, seq, false)?;
                }
                self.decode(&mut batch)?;
            }
        }
        let prefilled = Instant::now();
        let mut run = Run { tokens: vec![Vec::new(); prompts.len()], ..Run::default() };
        let mut last: Vec<Option<Token>> = prompts.iter().map(|p| p.last().copied()).collect();
        for step in 0..n_new {
            batch.clear();
            let mut rows = Vec::with_capacity(prompts.len());
            for (seq, next) in last.iter().enumerate() {
                if let Some(t) = *next {
                    rows.push(seq);
                    Self::add(&mut batch, t, prompts[seq].len() - 1 + step, seq, true)?;
                }
            }
            if rows.is_empty() {
                break;
            }
            self.decode(&mut batch)?;
            for (row, &seq) in rows.iter().enumerate() {
                let logits = self.context.get_logits_ith(row as i32);
                let id = argmax(logits);
                if options.keep_logits && seq == 0 {
                    run.logits.push(logits.to_vec());
                }
                if options.stop_at_end && self.model.vocab().is_eog(token(id)) {
                    last[seq] = None;
                    continue;
                }
                last[seq] = Some(id);
                run.tokens[seq].push(id);
            }
        }
        run.prefill = prefilled - began;
        run.decode = prefilled.elapsed();
        Ok(run)
    }

    fn add(batch: &mut LlamaBatch, t: Token, pos: usize, seq: usize, logits: bool) -> Result<(), LoadError> {
        batch
            .add(token(t), pos as i32, &[seq as i32], logits)
            .map_err(|e| LoadError::Config(format!("the plain loop's batch: {e}")))
    }

    fn decode(&mut self, batch: &mut LlamaBatch) -> Result<(), LoadError> {
        self.context.decode(batch).map_err(|e| LoadError::Config(format!("the plain loop's decode: {e}")))?;
        self.context.synchronize();
        Ok(())
    }
}
