//! KV of compressed rows, on a tiny model with random weights: DeepSeek V4. Each sequence has a cache of its own, and what arrives
//! waits beside it for its states.

use baton_engines::llama::checkpoint;
use baton_engines::llama::compressed::transfer::CompressedTransfer;
use baton_engines::llama::import_state::ImportState;
use baton_engines::llama::probe::{NoHandoff, ProbedKv, probe};
use baton_engines::llama::reference::Reference;
use baton_engines::llama::transfer::TransferError;
use baton_engines::registry::EngineOptions;
use baton_model::gguf::Gguf;
use baton_model::options::{CacheType, CacheTypes};
use baton_schemas::kv::{Chunk, StateKind, StatePart};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use tiny_gguf::Architecture;

use crate::kv_rig::{Rig, divergence};
use crate::models;

/// Tokens of the prompt: two rows of 128, and 11 rows of 4 and a part of one after them.
const N: u32 = 302;
const N_REPLY: usize = 49;
const CHUNKS: [usize; 3] = [300, 64, 17];
const N_CELLS: u32 = 1_024;

/// A model that some nodes have loaded, each with so many slots.
struct Subject {
    path: std::path::PathBuf,
    cache_types: CacheTypes,
    tokens: Vec<u32>,
    _folder: tempfile::TempDir,
}

/// A node.
struct Node {
    reference: Reference,
    gguf: Gguf,
    n_slots: u32,
}

struct Context<'m> {
    ctx: LlamaContext<'m>,
    kv: CompressedTransfer,
}

impl Subject {
    fn new() -> Subject {
        Self::with_caches(CacheType::F16)
    }

    fn with_caches(of_all: CacheType) -> Subject {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_gguf::write(&path, Architecture::DeepSeek4, 1);
        let tokens = Rig::load(&path).noise(2_000);
        Subject { path, cache_types: CacheTypes { k: of_all, v: of_all }, tokens, _folder: folder }
    }

    fn node(&self, n_slots: u32) -> Node {
        let options = EngineOptions {
            cache_types: self.cache_types,
            n_slots: Some(n_slots),
            n_threads: Some(1),
            n_ubatch: Some(512),
            ..models::of_llama(self.path.clone())
        };
        let gguf = Gguf::open(&self.path).unwrap();
        Node { reference: Reference::load(options).unwrap(), gguf, n_slots }
    }

    /// The logits of the reply after the first `n` tokens.
    fn reply(&self, context: &mut Context<'_>, slot: u32, n: u32) -> Vec<Vec<f32>> {
        let reply = (n..).zip(&self.tokens[n as usize..][..N_REPLY]);
        reply.map(|(position, token)| context.compute(slot, position, &[*token])).collect()
    }

    /// Those of an uninterrupted run.
    fn expected(&self, node: &Node, n: u32, n_chunk: usize) -> Vec<Vec<f32>> {
        let mut context = node.context(2 * N_CELLS);
        context.compute_chunks(0, &self.tokens, 0..n, n_chunk);
        self.reply(&mut context, 0, n)
    }
}

impl Node {
    fn context(&self, n_cells: u32) -> Context<'_> {
        let mut ctx = self.reference.context(n_cells).unwrap();
        match probe(&mut ctx, self.reference.model(), &self.gguf, self.n_slots, None).unwrap() {
            ProbedKv::Separate(kv) => Context { ctx, kv },
            ProbedKv::Shared(_) => panic!("one cache of all sequences"),
        }
    }
}

impl Context<'_> {
    fn compute(&mut self, slot: u32, p0: u32, tokens: &[u32]) -> Vec<f32> {
        self.kv.forget_exported();
        let mut batch = LlamaBatch::new(tokens.len(), 1);
        for (position, &token) in (p0..).zip(tokens) {
            let is_last = position + 1 == p0 + tokens.len() as u32;
            batch.add(LlamaToken(token as i32), position as i32, &[slot as i32], is_last).unwrap();
        }
        self.ctx.decode(&mut batch).unwrap();
        self.ctx.get_logits_ith(tokens.len() as i32 - 1).to_vec()
    }

    fn compute_chunks(&mut self, slot: u32, tokens: &[u32], positions: std::ops::Range<u32>, n_chunk: usize) {
        for p0 in positions.clone().step_by(n_chunk) {
            let p1 = positions.end.min(p0 + n_chunk as u32);
            self.compute(slot, p0, &tokens[p0 as usize..p1 as usize]);
        }
    }

    /// Computes the tokens of `positions`, exports each chunk when it is computed, and the states of the end.
    fn prefill(
        &mut self,
        slot: u32,
        tokens: &[u32],
        positions: std::ops::Range<u32>,
        n_chunk: usize,
    ) -> (Vec<Chunk>, StatePart) {
        let end = positions.end;
        let chunks = positions.step_by(n_chunk).map(|p0| {
            let p1 = end.min(p0 + n_chunk as u32);
            self.compute(slot, p0, &tokens[p0 as usize..p1 as usize]);
            self.export(slot, p0..p1, end)
        });
        let chunks = chunks.collect();
        (chunks, self.kv.export_state(&self.ctx, slot, end).unwrap())
    }

    fn export(&mut self, slot: u32, positions: std::ops::Range<u32>, end: u32) -> Chunk {
        self.kv.export(&self.ctx, slot, positions, end).unwrap()
    }

    fn import(&mut self, slot: u32, chunks: &[Chunk]) {
        chunks.iter().for_each(|chunk| self.kv.restore(&self.ctx, slot, chunk).unwrap());
    }

    fn import_state(&mut self, slot: u32, part: &StatePart) {
        let states = ImportState::build(part, self.kv.layout()).unwrap();
        self.kv.import_state(&mut self.ctx, slot, &states).unwrap();
    }

    fn checkpoint(&self, slot: u32) -> Bytes {
        checkpoint::take(&self.ctx, slot).unwrap()
    }

    fn return_to(&mut self, slot: u32, n_keep: u32, checkpoint: &Bytes) {
        self.kv.return_to(&mut self.ctx, slot, n_keep, checkpoint).unwrap();
        assert!(self.kv.can_continue(&self.ctx, slot, n_keep));
    }

    fn empty(&mut self, slot: u32) {
        self.kv.changes(slot);
        self.ctx.clear_kv_cache_seq(Some(slot), None, None).unwrap();
    }

    fn end(&self, slot: u32) -> i32 {
        self.ctx.kv_cache_seq_pos_max(slot as i32) + 1
    }
}

fn assert_equal(logits: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let first = logits.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!((first, logits.len()), (None, expected.len()), "{what}");
}

/// From a node with two slots to one with three, whose streams a blob names.
fn check_handoff(subject: &Subject) {
    let (from, to) = (subject.node(2), subject.node(3));
    for n_chunk in CHUNKS {
        let what = format!("{:?} in chunks of {n_chunk}", subject.cache_types.k);
        let expected = subject.expected(&from, N, n_chunk);
        let mut source = from.context(N_CELLS);
        let (chunks, states) = source.prefill(0, &subject.tokens, 0..N, n_chunk);
        assert_equal(&subject.reply(&mut source, 0, N), &expected, &format!("{what}: the export disturbs"));
        let mut target = to.context(N_CELLS);
        target.compute(0, 0, &subject.tokens[900..990]);
        target.import(2, &chunks);
        assert!(!target.kv.can_continue(&target.ctx, 2, N), "rows without states");
        target.import_state(2, &states);
        assert!(target.kv.can_continue(&target.ctx, 2, N));
        let checkpoint = target.checkpoint(2);
        assert_equal(&subject.reply(&mut target, 2, N), &expected, &what);
        // So this test can fail: the windows and the states alone are not enough.
        let mut without_rows = to.context(N_CELLS);
        without_rows.compute(2, 0, &subject.tokens[900..][..N as usize]);
        without_rows.return_to(2, N, &checkpoint);
        assert!(subject.reply(&mut without_rows, 2, N) != expected, "{what}: without rows");
    }
}

#[test]
fn compressed_caches_continue_bit_for_bit() {
    check_handoff(&Subject::new());
}

#[test]
fn quantized_compressed_caches_continue_bit_for_bit() {
    check_handoff(&Subject::with_caches(CacheType::Q8_0));
}

#[test]
fn the_layout_names_windows_compressed_rows_and_compressors() {
    let node = Subject::new().node(2);
    let context = node.context(N_CELLS);
    let layout = context.kv.layout();
    let sections: Vec<_> = layout.sections.iter().map(|s| (s.window, s.tokens_per_row, s.layers.len())).collect();
    assert_eq!(sections, [(Some(128), 1, 4), (None, 4, 2), (None, 128, 1), (None, 4, 2)]);
    use StateKind::{Compressor, CompressorScore};
    assert_eq!(layout.states.iter().map(|s| s.kind).collect::<Vec<_>>(), [Compressor, CompressorScore].repeat(5));
    // Layer 1: eight tokens of two halves, of the rows and of the indexer; layer 2: 128 tokens.
    let n_values: Vec<_> = layout.states.iter().step_by(2).map(|s| s.values.n_values).collect();
    assert_eq!(n_values, [8 * 512, 8 * 256, 128 * 256, 8 * 512, 8 * 256]);
    assert_eq!(Some(layout.state_bytes() as u64), node.gguf.kv_shape().map(|shape| shape.state_bytes));
    let mut ctx = node.reference.context(256).unwrap();
    let probed = probe(&mut ctx, node.reference.model(), &node.gguf, 2, None).unwrap();
    assert_eq!(probed.shared().err(), Some(NoHandoff::Separate));
}

/// The slot ends within a row of 4 and one of 128; the chunks complete both.
#[test]
fn a_slot_takes_only_what_it_lacks() {
    let subject = Subject::new();
    let node = subject.node(2);
    let expected = subject.expected(&node, N, 130);
    let mut source = node.context(N_CELLS);
    source.compute_chunks(1, &subject.tokens, 0..130, 130);
    let (chunks, states) = source.prefill(1, &subject.tokens, 130..N, 130);
    let mut target = node.context(N_CELLS);
    target.compute_chunks(0, &subject.tokens, 0..130, 130);
    target.import(0, &chunks);
    target.import_state(0, &states);
    assert_equal(&subject.reply(&mut target, 0, N), &expected, "the rest");
}

#[test]
fn a_broken_pull_leaves_what_the_slot_had() {
    let subject = Subject::new();
    let node = subject.node(2);
    let (chunks, _) = node.context(N_CELLS).prefill(0, &subject.tokens, 0..N, 64);
    let expected = subject.expected(&node, N, 64);
    for n_arrived in 1..3 {
        let mut target = node.context(N_CELLS);
        target.compute_chunks(0, &subject.tokens, 0..128, 64);
        let checkpoint = target.checkpoint(0);
        target.import(0, &chunks[2..2 + n_arrived]);
        target.return_to(0, 128, &checkpoint);
        target.compute_chunks(0, &subject.tokens, 128..N, 64);
        assert_equal(&subject.reply(&mut target, 0, N), &expected, "after a broken pull");
    }
    // A slot that had nothing computes all of it.
    let mut target = node.context(N_CELLS);
    target.import(1, &chunks[..2]);
    target.empty(1);
    target.compute_chunks(1, &subject.tokens, 0..N, 64);
    assert_equal(&subject.reply(&mut target, 1, N), &expected, "from the beginning");
}

#[test]
fn a_sequence_returns_to_its_checkpoint() {
    let subject = Subject::new();
    let node = subject.node(2);
    for n_chunk in CHUNKS {
        let end = 204 / n_chunk as u32 * n_chunk as u32;
        let end = if end == 0 { 300 } else { end };
        let expected = subject.expected(&node, N, n_chunk);
        let mut context = node.context(N_CELLS);
        context.compute_chunks(0, &subject.tokens, 0..end, n_chunk);
        let checkpoint = context.checkpoint(0);
        context.compute_chunks(0, &subject.tokens[500..], end..N + 20, n_chunk);
        context.return_to(0, end, &checkpoint);
        context.compute_chunks(0, &subject.tokens, end..N, n_chunk);
        assert_equal(&subject.reply(&mut context, 0, N), &expected, &format!("back to {end}"));
    }
}

/// Also in a slot that no other one touches: copies of llama.cpp's own would be made before its next batch.
#[test]
fn a_fork_of_a_range_has_the_states_of_its_end() {
    let subject = Subject::new();
    let node = subject.node(3);
    let expected = subject.expected(&node, N, 64);
    let mut context = node.context(N_CELLS);
    context.compute_chunks(0, &subject.tokens, 0..192, 64);
    let checkpoint = context.checkpoint(0);
    context.compute_chunks(0, &subject.tokens, 192..N, 64);
    context.kv.copy(&mut context.ctx, 0, 2).unwrap();
    context.return_to(2, 192, &checkpoint);
    context.compute_chunks(2, &subject.tokens, 192..N, 64);
    assert_equal(&subject.reply(&mut context, 2, N), &expected, "of a fork");
    context.kv.copy(&mut context.ctx, 0, 1).unwrap();
    context.empty(0);
    assert_equal(&subject.reply(&mut context, 1, N), &expected, "of a fork whose source has gone");
}

#[test]
fn a_parked_sequence_comes_back_with_its_checkpoint() {
    let subject = Subject::new();
    let node = subject.node(2);
    let expected = subject.expected(&node, N, 64);
    let mut context = node.context(N_CELLS);
    context.compute_chunks(0, &subject.tokens, 0..192, 64);
    let early = context.checkpoint(0);
    context.compute_chunks(0, &subject.tokens, 192..N, 64);
    let late = context.checkpoint(0);
    // The parts of an unchanged slot, of which the first ones have no windows.
    let chunks: Vec<Chunk> = (0..N).step_by(50).map(|p0| context.export(0, p0..N.min(p0 + 50), N)).collect();
    context.empty(0);
    for (n, checkpoint) in [(N, &late), (192, &early)] {
        context.import(1, &chunks);
        context.return_to(1, n, checkpoint);
        context.compute_chunks(1, &subject.tokens, n..N, 64);
        assert_equal(&subject.reply(&mut context, 1, N), &expected, &format!("back to {n}"));
        context.empty(1);
    }
}

/// The windows' cells are used again, so llama.cpp adds in another order: it rounds otherwise.
#[test]
fn long_prompts_are_handed_over_without_the_windows_that_nothing_attends_to() {
    let subject = Subject::new();
    let node = subject.node(2);
    let n = 1_703;
    let expected = subject.expected(&node, n, 400);
    let mut source = node.context(2 * N_CELLS);
    let (chunks, states) = source.prefill(0, &subject.tokens, 0..n, 400);
    let starts: Vec<_> = chunks.iter().map(|chunk| chunk.p1 - chunk.sections[0].start).collect();
    assert_eq!(starts, [127, 127, 127, 127, 103]);
    let mut target = node.context(2 * N_CELLS);
    target.import(1, &chunks);
    target.import_state(1, &states);
    let logits = subject.reply(&mut target, 1, n);
    let sum: f64 = logits.iter().zip(&expected).map(|(a, b)| divergence(b, a)).sum();
    assert!(sum / N_REPLY as f64 <= 1e-6, "mean KL {}", sum / N_REPLY as f64);
}

/// Where the windows' cells were used again, those of a checkpoint or a copy lie in another order, so llama.cpp rounds otherwise, and
/// the indexer may choose other rows.
#[test]
fn a_long_prompt_is_near_at_a_checkpoint_and_in_a_copy() {
    let subject = Subject::new();
    let node = subject.node(2);
    let n = 802;
    let expected = subject.expected(&node, n, 401);
    let mean =
        |logits: &[Vec<f32>]| logits.iter().zip(&expected).map(|(a, b)| divergence(b, a)).sum::<f64>() / N_REPLY as f64;
    let mut context = node.context(2 * N_CELLS);
    context.compute_chunks(0, &subject.tokens, 0..n, 401);
    let checkpoint = context.checkpoint(0);
    context.kv.copy(&mut context.ctx, 0, 1).unwrap();
    let copied = mean(&subject.reply(&mut context, 1, n));
    context.compute_chunks(0, &subject.tokens[1_000..], n..n + 150, 401);
    context.return_to(0, n, &checkpoint);
    let returned = mean(&subject.reply(&mut context, 0, n));
    println!("mean KL: {returned} back at a checkpoint, {copied} in a copy");
    assert!(returned <= 1e-4 && copied <= 1e-4, "{returned}, {copied}");
}

#[test]
fn rows_and_states_that_do_not_fit_are_refused() {
    let subject = Subject::new();
    let node = subject.node(2);
    let (chunks, states) = node.context(N_CELLS).prefill(0, &subject.tokens, 0..N, 64);
    let mut target = node.context(N_CELLS);
    target.import(0, &chunks[..1]);
    let gap = target.kv.restore(&target.ctx, 0, &chunks[2]);
    assert_eq!(gap, Err(TransferError::NotAnExtension { p0: 128, p1: 192, n_present: 64 }));
    let early = ImportState::build(&states, target.kv.layout()).unwrap();
    assert_eq!(
        target.kv.import_state(&mut target.ctx, 0, &early),
        Err(TransferError::NoStates { slot: 0, position: N })
    );
    assert_eq!((target.end(0), target.kv.has_waiting(0)), (0, false));
    let refused = target.kv.restore(&target.ctx, 2, &chunks[0]);
    assert_eq!(refused, Err(TransferError::NoSuchSlot { slot: 2, n_slots: 2 }));
    let mut nan = chunks[0].clone();
    let k = &mut nan.sections[1].layers[0].k;
    *k = [&[0x00, 0x7e][..], &k[2..]].concat().into();
    assert!(target.kv.restore(&target.ctx, 0, &nan).is_err());
    let mut short = chunks[0].clone();
    short.sections[1].layers[0].k.truncate(0);
    assert!(target.kv.restore(&target.ctx, 0, &short).is_err());
    // A window that lacks rows which the next position attends to.
    let mut late = chunks.clone();
    for layer in &mut late.last_mut().unwrap().sections[0].layers {
        layer.k = Bytes::new();
    }
    late.last_mut().unwrap().sections[0].start = N;
    target.import(0, &late);
    assert!(target.kv.import_state(&mut target.ctx, 0, &early).is_err());
    assert_eq!((target.end(0), target.kv.has_waiting(0)), (0, false));
    let checkpoint = target.kv.return_to(&mut target.ctx, 0, 64, &Bytes::from_static(b"no checkpoint"));
    assert!(checkpoint.is_err());
    target.import(0, &chunks);
    target.import_state(0, &states);
    assert_equal(&subject.reply(&mut target, 0, N), &subject.expected(&node, N, 64), "after refusals");
}
