//! Exports and imports for architectures whose real models are too large for a test, on tiny models with random
//! weights.

use baton_engines::llama::transfer::TransferError;
use baton_model::gguf::Gguf;
use baton_schemas::kv::RopePairing;
use tiny_gguf::{Architecture, WINDOW};

use crate::kv_rig::{Rig, assert_part_of, divergence, without_window};

/// A tiny model, and the folder that holds its file until it is dropped.
fn tiny(architecture: Architecture) -> (tempfile::TempDir, Rig) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, architecture, 1);
    (folder, Rig::load(&path))
}

/// Exports a prompt chunk by chunk into another context, and compares the caches and what follows from them.
fn check_exact(architecture: Architecture, rope: RopePairing, has_v: bool) {
    let (_file, rig) = tiny(architecture);
    let tokens = rig.noise(301);
    for n_chunk in [300, 64] {
        let mut source = rig.context(512);
        let mut target = rig.context(512);
        let layout = source.kv.layout().clone();
        assert_eq!(layout.rope, rope, "{architecture:?}");
        assert_eq!(layout.sections.len(), 1, "{architecture:?}");
        assert!(layout.sections[0].layers.iter().all(|l| l.v.is_some() == has_v), "{architecture:?}");
        let chunks = source.prefill(0, &tokens, n_chunk);
        target.import(0, &chunks);
        let whole = source.export(0, 0, 300);
        assert!(target.export(0, 0, 300) == whole, "{architecture:?} in chunks of {n_chunk}");
        chunks.iter().for_each(|chunk| assert_part_of(chunk, &whole));
        let expected = source.compute(0, 300, &tokens[300..]);
        assert!(target.compute(0, 300, &tokens[300..]) == expected, "{architecture:?} in chunks of {n_chunk}");
        // Without the imported cache the logits differ, so this test can fail.
        assert!(target.compute(1, 0, &tokens[300..]) != expected, "{architecture:?}");
    }
}

#[test]
fn attention_of_every_kind_continues_bit_for_bit() {
    check_exact(Architecture::Llama, RopePairing::Interleaved, true);
    check_exact(Architecture::Qwen3, RopePairing::HalfSplit, true);
    check_exact(Architecture::Qwen3Moe, RopePairing::HalfSplit, true);
}

#[test]
fn latent_attention_has_no_v() {
    check_exact(Architecture::DeepSeek2, RopePairing::Interleaved, false);
}

#[test]
fn sinks_and_a_short_window_are_handed_over() {
    let (_file, rig) = tiny(Architecture::GptOss);
    // The windowed cache has 768 cells: it wraps twice.
    let n = 1_800;
    let tokens = rig.noise(n + 16);
    let mut source = rig.context(2_048);
    let mut whole = rig.context(2_048);
    let mut trimmed = rig.context(2_048);
    let windows: Vec<_> = source.kv.layout().sections.iter().map(|s| s.window).collect();
    assert_eq!(windows, [None, Some(WINDOW)]);
    let chunks = source.prefill(0, &tokens[..n], 200);
    let end = n as u32 - 1;
    whole.import(0, &chunks);
    let n_last = chunks.len() - 1;
    let fewer: Vec<_> = chunks[..n_last].iter().map(without_window).chain([chunks[n_last].clone()]).collect();
    trimmed.import(0, &fewer);
    let expected = source.export(0, 0, end);
    assert!(whole.export(0, 0, end) == expected && trimmed.export(0, 0, end) == expected);
    // The last target lacks the prompt, to show that the divergence is then large.
    let mut targets = [whole, trimmed, rig.context(2_048)];
    let mut sums = [0.0; 3];
    for (i, token) in tokens[n - 1..].iter().enumerate() {
        let position = end + i as u32;
        assert!(targets[..2].iter().all(|target| target.can_continue(0, position as usize)));
        let expected = source.compute(0, position, &[*token]);
        for (sum, target) in sums.iter_mut().zip(&mut targets) {
            *sum += divergence(&expected, &target.compute(0, position, &[*token]));
        }
    }
    let means = sums.map(|sum| sum / (tokens.len() - n + 1) as f64);
    println!("gpt-oss: mean KL {:?}; without the prompt {}", &means[..2], means[2]);
    assert!(means[0] <= 1e-2 && means[1] <= 1e-2 && means[2] > 1e-2, "{means:?}");
}

#[test]
fn a_window_that_has_moved_on_cannot_be_exported() {
    let (_file, rig) = tiny(Architecture::GptOss);
    let tokens = rig.noise(1_201);
    let mut source = rig.context(2_048);
    source.prefill(0, &tokens, 300);
    let late = source.kv.export(&mut source.ctx, 0, 0..300, 300);
    assert!(matches!(late, Err(TransferError::Forgotten { .. })), "{late:?}");
}

#[test]
fn a_window_is_never_left_with_a_gap() {
    let (_file, rig) = tiny(Architecture::GptOss);
    let tokens = rig.noise(901);
    let mut source = rig.context(1_024);
    let mut target = rig.context(1_024);
    let chunks = source.prefill(0, &tokens, 300);
    target.import(0, &chunks[..1]);
    assert!(target.can_continue(0, 300));
    target.import(0, &[without_window(&chunks[1])]);
    assert!(!target.can_continue(0, 600));
    target.import(0, &chunks[2..]);
    assert!(target.can_continue(0, 900));
    // The first chunk's windowed rows were dropped, since a gap follows them.
    assert_eq!(target.ctx.kv_cache_seq_pos_min(0), 900 - WINDOW as i32);
    assert!(target.export(0, 0, 900) == source.export(0, 0, 900));
}

#[test]
fn a_chunk_of_another_model_is_refused() {
    let (_file, moe) = tiny(Architecture::Qwen3Moe);
    let (_file, latent) = tiny(Architecture::DeepSeek2);
    let mut source = moe.context(256);
    let mut target = latent.context(256);
    let chunks = source.prefill(0, &moe.noise(33), 32);
    let blob = source.blob(&chunks[0]);
    assert_eq!(target.kv.import(&mut target.ctx, 0, 0, &blob), Err(TransferError::OtherLayout));
}

#[test]
fn a_seed_decides_every_weight() {
    let folder = tempfile::tempdir().unwrap();
    let hash = |seed, name: &str| {
        let path = folder.path().join(name);
        tiny_gguf::write(&path, Architecture::Qwen3Moe, seed);
        Gguf::open(&path).unwrap().weights_hash().unwrap()
    };
    assert_eq!(hash(1, "a"), hash(1, "b"));
    assert_ne!(hash(1, "a"), hash(2, "b"));
}
