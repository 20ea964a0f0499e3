//! Finds the layout of a loaded model's KV cache by computing one token.
//!
//! The file's header does not determine what llama.cpp stores, which also depends on layers that share a cache, latent
//! attention and value types. So one position is computed and its state is parsed, in each form that is possible for such a
//! model: only one form ends where the state ends. Models whose state has none of them are served without handoffs, and the
//! reason is logged.

use std::sync::Arc;

use baton_model::gguf::Gguf;
use baton_schemas::kv::{KvLayout, RopePairing, StateKind, StateShape};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::{LlamaModel, RopeType};
use llama_cpp_2::token::LlamaToken;

use super::blob::BlobError;
use super::blob::form::{BlobForm, CellForm, SectionForm, SectionKind, StatesForm};
use super::blob::parse::{ParsedSection, ParsedStates, parse};
use super::compressed;
use super::compressed::form::CompressedForm;
use super::compressed::transfer::CompressedTransfer;
pub use super::no_kv::NoHandoff;
use super::shapes::{rows_form, shape};
use super::state::{self, SequencePart};
use super::transfer::{self, KvTransfer};

/// The sequence of the token.
const SEQUENCE: u32 = 0;

/// The transfer of KV that fits a context.
pub enum ProbedKv {
    /// All sequences share one cache.
    Shared(KvTransfer),
    /// Each sequence has a cache of its own, with compressed rows.
    Separate(CompressedTransfer),
}

impl ProbedKv {
    /// The layout of the model's KV.
    pub fn layout(&self) -> &Arc<KvLayout> {
        match self {
            ProbedKv::Shared(transfer) => transfer.layout(),
            ProbedKv::Separate(transfer) => transfer.layout(),
        }
    }

    /// The transfer of a cache that all sequences share. Errors: each has its own.
    pub fn shared(self) -> Result<KvTransfer, NoHandoff> {
        match self {
            ProbedKv::Shared(transfer) => Ok(transfer),
            ProbedKv::Separate(_) => Err(NoHandoff::Separate),
        }
    }
}

/// Finds the layout of the context's KV and returns what transfers it. The context must be empty, with sequences for
/// `n_slots` slots, and for scratch if they share a cache; it is empty again afterwards. `gpu` is ggml's index of the device
/// that holds the cache.
pub fn probe(
    ctx: &mut LlamaContext<'_>,
    model: &LlamaModel,
    gguf: &Gguf,
    n_slots: u32,
    gpu: Option<usize>,
) -> Result<ProbedKv, NoHandoff> {
    let rope = match model.rope_type() {
        None => RopePairing::None,
        Some(RopeType::Norm) => RopePairing::Interleaved,
        Some(RopeType::NeoX) => RopePairing::HalfSplit,
        Some(RopeType::MRope | RopeType::IMRope | RopeType::Vision) => RopePairing::MultiAxis,
    };
    if has(gguf, "ple.ngram_size") {
        return Err(NoHandoff::Tokens);
    }
    let decoded = decode_one(ctx, model);
    let exported = state::export(ctx, SEQUENCE, SequencePart::Everything, Vec::new());
    transfer::clear(ctx, SEQUENCE);
    decoded?;
    let blob = exported?.into();
    if compressed::is_compressed(&blob) {
        let window = gguf.sliding_window().and_then(|n| u32::try_from(n).ok()).ok_or(NoHandoff::SecondCache)?;
        let form = CompressedForm::of(&blob, rope, window)?;
        return Ok(ProbedKv::Separate(CompressedTransfer::new(form, n_slots, gpu)));
    }
    let sections = sections(&blob, CellForm::of(rope), model)?;
    let second = match (gguf.sliding_window(), has(gguf, "attention.indexer.key_length")) {
        (Some(window), false) => u32::try_from(window).ok().map(Second::Windowed),
        (None, true) => Some(Second::Indexer),
        _ => None,
    };
    let form = BlobForm::new(rope, form(sections, second)?)?;
    Ok(ProbedKv::Shared(KvTransfer::new(form, n_slots, gpu)))
}

/// Returns true if the file has this key of its architecture's own.
fn has(gguf: &Gguf, key: &str) -> bool {
    gguf.architecture().is_some_and(|architecture| gguf.get(&format!("{architecture}.{key}")).is_some())
}

fn decode_one(ctx: &mut LlamaContext<'_>, model: &LlamaModel) -> Result<(), NoHandoff> {
    // Any token will do; some tokenizers have no BOS.
    let bos = Some(model.vocab().bos()).filter(|t| (0..model.n_vocab()).contains(&t.0));
    let mut batch = LlamaBatch::new(1, 1);
    let added = batch.add(bos.unwrap_or(LlamaToken(0)), 0, &[SEQUENCE.cast_signed()], false);
    added.map_err(|e| NoHandoff::Decode(e.to_string()))?;
    ctx.decode(&mut batch).map_err(|e| NoHandoff::Decode(e.to_string()))?;
    ctx.synchronize();
    Ok(())
}

/// The sections of a state that holds one position.
fn sections(blob: &Bytes, cell: CellForm, model: &LlamaModel) -> Result<Vec<ParsedSection>, NoHandoff> {
    let mut first_fault = None;
    for kinds in possible(model.is_recurrent(), model.is_hybrid(), model.n_layer() as usize) {
        match parse(blob, cell, kinds) {
            Ok(sections) if of_model(&sections, model.n_layer()) => return Ok(sections),
            Ok(_) => {}
            Err(fault) => drop(first_fault.get_or_insert(fault)),
        }
    }
    let unknown = BlobError::Shape("none of the known forms".into());
    Err(NoHandoff::UnknownState(first_fault.unwrap_or(unknown)))
}

/// Returns true if the states are those of a model with `n_layers` layers. Rows are not read as states by accident then.
fn of_model(sections: &[ParsedSection], n_layers: u32) -> bool {
    sections.iter().all(|section| match section {
        ParsedSection::States(states) => states.n_layers == n_layers && states.last.is_some(),
        ParsedSection::Rows(rows) => rows.positions.len() == 1,
    })
}

/// The sections that a model's state can have. A blob says neither whether V follows K, nor how many layers are recurrent.
fn possible(is_recurrent: bool, is_hybrid: bool, n_layers: usize) -> Vec<Vec<SectionKind>> {
    let rows = [true, false].map(|has_v| SectionKind::Rows { has_v });
    let one = rows.iter().map(|first| vec![*first]);
    let two = rows.iter().flat_map(|first| rows.iter().map(|second| vec![*first, *second]));
    let rows: Vec<_> = if is_recurrent { vec![Vec::new()] } else { one.chain(two).collect() };
    if !is_recurrent && !is_hybrid {
        return rows;
    }
    let with_states = |n_recurrent: usize| {
        // States follow the attention's rows; an indexer's rows follow the states.
        let places = rows.iter().flat_map(|rows| (rows.len().min(1)..=rows.len()).map(move |place| (rows, place)));
        places.map(move |(rows, place)| {
            let (before, after) = rows.split_at(place);
            [before, &[SectionKind::States { n_recurrent }], after].concat()
        })
    };
    (1..=n_layers).flat_map(with_states).collect()
}

/// The purpose of a second section of rows.
#[derive(Clone, Copy)]
enum Second {
    Windowed(u32),
    Indexer,
}

fn form(sections: Vec<ParsedSection>, second: Option<Second>) -> Result<Vec<SectionForm>, NoHandoff> {
    let mut n_rows = 0;
    let form = |section| match section {
        ParsedSection::States(states) => states_form(states),
        ParsedSection::Rows(rows) => {
            n_rows += 1;
            match (n_rows, second) {
                (1, _) | (_, Some(Second::Indexer)) => Ok(SectionForm::Rows(rows_form(rows, None)?)),
                (_, Some(Second::Windowed(window))) => Ok(SectionForm::Rows(rows_form(rows, Some(window))?)),
                (_, None) => Err(NoHandoff::SecondCache),
            }
        }
    };
    sections.into_iter().map(form).collect()
}

fn states_form(parsed: ParsedStates) -> Result<SectionForm, NoHandoff> {
    let n_recurrent = parsed.tensors.len() / 2;
    let shapes = parsed.tensors.iter().enumerate().map(|(i, tensor)| {
        let kind = if i < n_recurrent { StateKind::Convolution } else { StateKind::Recurrence };
        Ok(StateShape { kind, values: shape(tensor)? })
    });
    let shapes = shapes.collect::<Result<_, NoHandoff>>()?;
    Ok(SectionForm::States(StatesForm { n_layers: parsed.n_layers, shapes }))
}
