//! KV of every class of cache that llama.cpp has, on tiny models with random weights: what follows a handoff, a checkpoint, a
//! fork, parking or a broken pull is what follows an uninterrupted run.

use baton_engines::llama::blob::BlobError;
use baton_engines::llama::checkpoint;
use baton_engines::llama::import_state::ImportState;
use baton_engines::llama::transfer::TransferError;
use baton_engines::registry::EngineOptions;
use baton_model::options::{CacheType, CacheTypes};
use baton_schemas::Token;
use baton_schemas::kv::{Dtype, RopePairing};
use baton_schemas::no_handoff::NoHandoffReason;
use bytes::Bytes;
use tiny_gguf::Architecture;

use crate::kv_rig::{Context, N_SLOTS, Rig, divergence};
use crate::{models, peers};

/// Tokens of the prompt, and of the reply, which are given.
const N: u32 = 300;
const N_REPLY: usize = 49;

/// Positions of a chunk: the whole prompt, a part, and a number that is no multiple of anything.
const CHUNKS: [usize; 3] = [300, 64, 17];

const N_CELLS: u32 = 1_024;

/// Llama.cpp's classes of caches, with the architectures that have them.
const PLAIN: [Architecture; 9] = [
    Architecture::Llama,
    Architecture::Qwen3Moe,
    Architecture::Glm4Moe,
    Architecture::MiniMaxM2,
    Architecture::DeepSeek2,
    Architecture::Qwen3Vl,
    Architecture::Qwen3VlMoe,
    Architecture::Gemma4,
    Architecture::Gemma4Moe,
];
const HYBRID: [Architecture; 12] = [
    Architecture::Qwen35,
    Architecture::Qwen35Moe,
    Architecture::Qwen3Next,
    Architecture::NemotronH,
    Architecture::NemotronHMoe,
    Architecture::GraniteHybrid,
    Architecture::FalconH1,
    Architecture::Jamba,
    Architecture::MiniMax01,
    Architecture::Lfm2,
    Architecture::Lfm2Moe,
    Architecture::KimiLinear,
];
const RECURRENT: [Architecture; 3] = [Architecture::Mamba, Architecture::Mamba2, Architecture::Rwkv7];
const SPARSE: [Architecture; 3] = [Architecture::DeepSeek32, Architecture::GlmDsa, Architecture::MiniMaxM3];
const WITH_STATES: [&[Architecture]; 3] = [&HYBRID, &[Architecture::Lfm2Windowed, Architecture::Glm5Next], &RECURRENT];

/// A tiny model and what follows its prompt.
struct Subject {
    architecture: Architecture,
    rig: Rig,
    tokens: Vec<u32>,
    folder: tempfile::TempDir,
}

impl Subject {
    fn new(architecture: Architecture) -> Subject {
        Self::with_caches(architecture, CacheType::F16, CacheType::F16)
    }

    fn with_caches(architecture: Architecture, k: CacheType, v: CacheType) -> Subject {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_gguf::write(&path, architecture, 1);
        let rig = Rig::with_caches(&path, CacheTypes { k, v });
        let tokens = rig.noise(N as usize + N_REPLY);
        Subject { architecture, rig, tokens, folder }
    }

    fn context(&self) -> Context<'_> {
        self.rig.context(N_CELLS)
    }

    /// The model of an engine that has started again.
    fn loaded_again(&self) -> Rig {
        Rig::load(&self.folder.path().join("tiny.gguf"))
    }

    fn prompt(&self) -> &[u32] {
        &self.tokens[..=N as usize]
    }

    fn reply(&self, context: &mut Context<'_>, slot: u32) -> Vec<Vec<f32>> {
        context.steps(slot, N, &self.tokens[N as usize..])
    }

    /// The logits of an uninterrupted run.
    fn expected(&self, n_chunk: usize) -> Vec<Vec<f32>> {
        let mut context = self.context();
        context.compute_chunks(0, &self.tokens, 0..N, n_chunk);
        self.reply(&mut context, 0)
    }

    fn assert_equal(&self, logits: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
        let first = logits.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!((first, logits.len()), (None, expected.len()), "{:?} {what}", self.architecture);
    }

    /// Where the cells differ from those of an uninterrupted run, llama.cpp itself rounds otherwise, and a model that chooses
    /// positions may choose others.
    fn assert_close(&self, logits: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
        let sum: f64 = logits.iter().zip(expected).map(|(a, b)| divergence(b, a)).sum();
        let mean = sum / expected.len() as f64;
        let chooses = SPARSE.contains(&self.architecture) || self.architecture == Architecture::Glm5Next;
        let bound = if chooses { 2e-2 } else { 1e-6 };
        assert!(mean <= bound, "{:?} {what}: mean KL {mean}", self.architecture);
    }
}

/// The end of a chunk in the middle of the prompt.
fn middle(n_chunk: usize) -> u32 {
    (192 / n_chunk * n_chunk).max(n_chunk) as u32
}

fn with_states() -> impl Iterator<Item = Subject> {
    WITH_STATES.into_iter().flatten().map(|architecture| Subject::new(*architecture))
}

fn check_handoff(subject: &Subject, chunks: &[usize]) {
    for &n_chunk in chunks {
        let expected = subject.expected(n_chunk);
        let what = format!("in chunks of {n_chunk}");
        let mut source = subject.context();
        let chunks = source.prefill(0, subject.prompt(), n_chunk);
        let states = source.has_states().then(|| source.export_state(0, N));
        subject.assert_equal(&subject.reply(&mut source, 0), &expected, &format!("{what}: the export disturbs"));
        let mut target = subject.context();
        target.import(0, &chunks);
        if let Some(states) = &states {
            assert!(!target.can_continue(0, N as usize), "rows without states");
            target.import_state(0, states);
        }
        assert!(target.can_continue(0, N as usize), "{:?} {what}", subject.architecture);
        subject.assert_equal(&subject.reply(&mut target, 0), &expected, &what);
        // Beside another sequence, in a cache of another size.
        let mut beside = subject.rig.context(2 * N_CELLS);
        beside.compute(0, 0, &subject.rig.noise(90)[30..]);
        beside.import(1, &chunks);
        if let Some(states) = &states {
            beside.import_state(1, states);
        }
        subject.assert_close(&subject.reply(&mut beside, 1), &expected, &format!("{what}, beside another sequence"));
    }
}

#[test]
fn plain_and_windowed_caches_continue_bit_for_bit() {
    PLAIN.into_iter().map(Subject::new).for_each(|subject| check_handoff(&subject, &CHUNKS));
}

#[test]
fn hybrid_caches_continue_bit_for_bit() {
    HYBRID.into_iter().map(Subject::new).for_each(|subject| check_handoff(&subject, &CHUNKS));
}

/// Its states have 66 MB.
#[test]
fn a_cache_of_real_size_continues_bit_for_bit() {
    check_handoff(&Subject::new(Architecture::Qwen36Of35B), &[64]);
}

#[test]
fn a_hybrid_with_a_window_continues_bit_for_bit() {
    check_handoff(&Subject::new(Architecture::Lfm2Windowed), &CHUNKS);
}

#[test]
fn recurrent_models_hand_over_nothing_but_states() {
    for architecture in RECURRENT {
        let subject = Subject::new(architecture);
        assert!(subject.context().kv.layout().sections.is_empty());
        check_handoff(&subject, &CHUNKS);
    }
}

#[test]
fn sparse_attention_continues_bit_for_bit() {
    let sparse = SPARSE.into_iter().chain([Architecture::Glm5Next]);
    sparse.map(Subject::new).for_each(|subject| check_handoff(&subject, &CHUNKS));
}

#[test]
fn quantized_caches_continue_bit_for_bit() {
    use CacheType::{F16, Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    let llama = [(Q8_0, Q8_0), (Q4_0, Q4_0), (Q8_0, F16), (Q8_0, Q4_0), (F16, Q5_1), (Q5_0, Q4_1), (Iq4Nl, Iq4Nl)];
    let mixed = [(Q8_0, Q8_0), (Q4_0, Q4_0), (Q8_0, F16)];
    let latent = [(Q8_0, Q8_0), (Q4_0, Q4_0)];
    let models = [
        (Architecture::Llama, &llama[..]),
        (Architecture::Qwen35, &mixed),
        (Architecture::Gemma4, &mixed),
        (Architecture::DeepSeek32, &latent),
        (Architecture::KimiLinear, &latent),
    ];
    for (architecture, types) in models {
        for (k, v) in types {
            println!("{architecture:?}, K of {k:?}, V of {v:?}");
            let subject = Subject::with_caches(architecture, *k, *v);
            check_handoff(&subject, &[64]);
        }
    }
}

/// The sizes of the rotations are part of the layout, so that no other cache reads such rows.
#[test]
fn rotated_rows_are_named() {
    let section = |subject: &Subject, i: usize| subject.context().kv.layout().sections[i].clone();
    let latent = Subject::new(Architecture::DeepSeek32);
    assert_eq!([0, 1].map(|i| section(&latent, i).n_rot), [[0, 0], [128, 0]]);
    let qwen = section(&Subject::with_caches(Architecture::Qwen35, CacheType::Q8_0, CacheType::F16), 0);
    assert_eq!((qwen.layers[0].k.dtype, qwen.layers[0].v.unwrap().dtype), (Dtype::Q8_0, Dtype::F16));
    assert_eq!(qwen.n_rot, [64, 0]);
}

#[test]
fn positions_of_text_on_several_axes_are_named() {
    for architecture in [Architecture::Qwen3Vl, Architecture::Qwen35] {
        assert_eq!(Subject::new(architecture).context().kv.layout().rope, RopePairing::MultiAxis);
    }
}

/// So the tests above can fail.
#[test]
fn rows_without_their_states_give_other_logits() {
    for subject in with_states() {
        let expected = subject.expected(64);
        let chunks = subject.context().prefill(0, subject.prompt(), 64);
        let mut target = subject.context();
        target.import(0, &chunks);
        assert!(subject.reply(&mut target, 0) != expected, "{:?}", subject.architecture);
    }
}

#[test]
fn a_sequence_returns_to_its_checkpoint() {
    for subject in with_states() {
        for n_chunk in CHUNKS {
            let (expected, end) = (subject.expected(n_chunk), middle(n_chunk));
            let mut context = subject.context();
            context.compute_chunks(0, &subject.tokens, 0..end, n_chunk);
            let checkpoint = context.checkpoint(0);
            let other: Vec<u32> = subject.tokens.iter().map(|token| token ^ 1).collect();
            context.compute_chunks(0, &other, end..N + 20, n_chunk);
            context.return_to(0, end, &checkpoint);
            context.compute_chunks(0, &subject.tokens, end..N, n_chunk);
            subject.assert_equal(&subject.reply(&mut context, 0), &expected, &format!("back to {end}"));
        }
    }
}

#[test]
fn a_fork_of_a_range_has_the_states_of_its_end() {
    for subject in with_states() {
        let (expected, end) = (subject.expected(64), middle(64));
        let mut context = subject.context();
        context.compute_chunks(0, &subject.tokens, 0..end, 64);
        let checkpoint = context.checkpoint(0);
        context.compute_chunks(0, &subject.tokens, end..N, 64);
        context.ctx.kv_cache_seq_cp(0, 1, Some(0), Some(end)).unwrap();
        assert!(!context.can_continue(1, end as usize), "{:?} has the newest states", subject.architecture);
        context.return_to(1, end, &checkpoint);
        context.compute_chunks(1, &subject.tokens, end..N, 64);
        subject.assert_close(&subject.reply(&mut context, 1), &expected, "of a fork");
        subject.assert_close(&subject.reply(&mut context, 0), &expected, "of a fork's source");
    }
}

#[test]
fn a_parked_sequence_comes_back_with_its_checkpoint() {
    for subject in with_states() {
        for n_chunk in CHUNKS {
            let expected = subject.expected(n_chunk);
            let mut context = subject.context();
            let chunks = context.prefill(0, subject.prompt(), n_chunk);
            let checkpoint = context.checkpoint(0);
            context.ctx.clear_kv_cache_seq(Some(0), None, None).unwrap();
            context.import(1, &chunks);
            context.return_to(1, N, &checkpoint);
            assert!(context.can_continue(1, N as usize));
            subject.assert_equal(&subject.reply(&mut context, 1), &expected, "after parking");
        }
    }
}

#[test]
fn a_broken_pull_returns_to_the_slots_own_checkpoint() {
    for subject in with_states() {
        let (expected, end) = (subject.expected(64), middle(64));
        let chunks = subject.context().prefill(0, subject.prompt(), 64);
        let mut target = subject.context();
        target.compute_chunks(0, &subject.tokens, 0..end, 64);
        let checkpoint = target.checkpoint(0);
        target.import(0, &chunks[3..4]);
        assert!(!target.can_continue(0, end as usize + 64), "{:?}", subject.architecture);
        target.return_to(0, end, &checkpoint);
        target.compute_chunks(0, &subject.tokens, end..N, 64);
        subject.assert_equal(&subject.reply(&mut target, 0), &expected, "after a broken pull");
    }
}

#[test]
fn the_rows_before_a_broken_pull_are_continued() {
    for subject in [&PLAIN[..], &SPARSE].concat().into_iter().map(Subject::new) {
        for n_chunk in [64, 17] {
            let (expected, end) = (subject.expected(n_chunk), middle(n_chunk));
            let chunks = subject.context().prefill(0, subject.prompt(), n_chunk);
            let mut target = subject.context();
            target.import(0, &chunks[..end as usize / n_chunk]);
            assert!(target.can_continue(0, end as usize));
            target.compute_chunks(0, &subject.tokens, end..N, n_chunk);
            subject.assert_equal(&subject.reply(&mut target, 0), &expected, &format!("from {end}"));
        }
    }
}

/// A prefill node ends in the middle of a pull, and the pull goes on with the one that takes its place; then the decode node ends,
/// and its successor gets all of it.
#[test]
fn engines_that_start_again_hand_over_the_same_kv() {
    let every = [&PLAIN[..], &SPARSE].concat().into_iter().map(Subject::new).chain(with_states());
    for subject in every {
        let expected = subject.expected(64);
        let before = subject.context().prefill(0, subject.prompt(), 64);
        let (first, second) = (subject.loaded_again(), subject.loaded_again());
        let mut source = first.context(N_CELLS);
        let after = source.prefill(1, subject.prompt(), 64);
        let states = source.has_states().then(|| source.export_state(1, N));
        let chunks = [&before[..2], &after[2..]].concat();
        for rig in [&subject.rig, &second] {
            let mut target = rig.context(N_CELLS);
            target.import(0, &chunks);
            states.iter().for_each(|states| target.import_state(0, states));
            subject.assert_equal(&subject.reply(&mut target, 0), &expected, "after a restart");
        }
    }
}

/// Models that llama.cpp computes and whose KV no other node gets: the node says why, and answers all the same.
#[tokio::test]
async fn models_that_are_not_handed_over_say_why() {
    let kinds = [
        // The window is llama.cpp's own, and begins anew at each multiple of its length.
        (Architecture::Llama4, &[][..], NoHandoffReason::UnknownCache),
        (Architecture::Llama, &[("ple.ngram_size", 2)], NoHandoffReason::TokensInCache),
    ];
    for (architecture, numbers, reason) in kinds {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_gguf::write_with(&path, architecture, 1, numbers);
        let options = EngineOptions { n_threads: Some(1), n_ctx: Some(256), ..models::of_llama(path) };
        let engine = models::start(options, None).await;
        let info = engine.info().await.unwrap();
        assert_eq!((info.kv.is_none(), info.no_handoff), (true, Some(reason)), "{architecture:?}");
        let prompt: Vec<Token> = (3..100).collect();
        let first = peers::generate(&*engine, peers::request(&prompt, 8, None)).await.tokens;
        assert_eq!(first.len(), 8, "{architecture:?}");
        assert_eq!(peers::generate(&*engine, peers::request(&prompt, 8, None)).await.tokens, first);
    }
}

#[test]
fn states_of_another_position_or_model_are_refused() {
    let subject = Subject::new(Architecture::Qwen35);
    let mut source = subject.context();
    let chunks = source.prefill(0, subject.prompt(), 64);
    let states = source.export_state(0, N);
    assert_eq!(
        source.kv.export_state(&source.ctx, 0, N - 1).err(),
        Some(TransferError::NoStates { slot: 0, position: N - 1 })
    );
    // The rows end before the states: the slot is empty afterwards.
    let mut target = subject.context();
    target.import(0, &chunks[..2]);
    let early = ImportState::build(&states, target.kv.layout()).unwrap();
    let refused = target.kv.import_state(&mut target.ctx, 0, &early);
    assert_eq!(refused, Err(TransferError::NoStates { slot: 0, position: N }));
    target.import(0, &chunks);
    let no_slot = target.kv.import_state(&mut target.ctx, N_SLOTS, &early);
    assert_eq!(no_slot, Err(TransferError::NoSuchSlot { slot: N_SLOTS, n_slots: N_SLOTS }));
    let other = Subject::new(Architecture::Mamba);
    let mut of_mamba = other.context();
    of_mamba.prefill(0, other.prompt(), 300);
    let theirs = ImportState::build(&of_mamba.export_state(0, N), of_mamba.kv.layout()).unwrap();
    assert_eq!(target.kv.import_state(&mut target.ctx, 0, &theirs), Err(TransferError::OtherLayout));
    let mut nan = states.clone();
    nan.tensors[0] = [&f32::NAN.to_le_bytes(), &nan.tensors[0][4..]].concat().into();
    let refused = ImportState::build(&nan, target.kv.layout()).err();
    assert_eq!(refused, Some(BlobError::NotFinite { tensor: 0 }));
    target.import_state(0, &states);
    subject.assert_equal(&subject.reply(&mut target, 0), &subject.expected(64), "after refusals");
}

#[test]
fn a_checkpoint_of_another_end_empties_the_slot() {
    let subject = Subject::new(Architecture::Qwen35);
    let mut context = subject.context();
    assert!(checkpoint::take(&context.ctx, 0).is_err(), "an empty slot has no states");
    context.compute_chunks(0, &subject.tokens, 0..64, 64);
    let checkpoint = context.checkpoint(0);
    for (n_keep, bytes) in [(63, &checkpoint), (65, &checkpoint), (0, &checkpoint), (64, &checkpoint.slice(..99))] {
        context.compute_chunks(1, &subject.tokens, 0..128, 64);
        assert!(checkpoint::return_to(&mut context.ctx, 1, n_keep, bytes).is_err(), "{n_keep}");
        assert_eq!(context.ctx.kv_cache_seq_pos_max(1), -1, "{n_keep}");
    }
    context.compute_chunks(1, &subject.tokens, 0..128, 64);
    context.return_to(1, 64, &checkpoint);
    assert!(context.can_continue(1, 64));
}

/// NaN in a state stays in its cell when the sequence goes: the next one there would be spoilt.
#[test]
fn overwriting_the_cache_removes_nan_from_states() {
    for subject in with_states() {
        let expected = subject.expected(64);
        let mut context = subject.context();
        context.compute_chunks(0, &subject.tokens, 0..64, 64);
        let checkpoint = context.checkpoint(0);
        let n = checkpoint.len();
        let nan: Bytes = [&checkpoint[..n - 4], &f32::NAN.to_le_bytes()].concat().into();
        // LFM2's last state has no values: a header ends the bytes.
        if checkpoint::return_to(&mut context.ctx, 0, 64, &nan).is_ok() {
            context.compute(0, 64, &subject.tokens[64..65]);
        }
        context.ctx.clear_kv_cache();
        context.compute_chunks(0, &subject.tokens, 0..N, 64);
        subject.assert_equal(&subject.reply(&mut context, 0), &expected, "after NaN");
    }
}
