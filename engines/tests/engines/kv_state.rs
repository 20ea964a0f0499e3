//! KV that leaves one context and enters another, chunk by chunk: the same bytes, the same logits.

use std::time::Instant;

use baton_engines::llama::transfer::TransferError;
use baton_engines::llama::{StateError, blob::BlobError};
use baton_schemas::kv::{Chunk, RopePairing};

use crate::kv_rig::{N_SLOTS, Rig, SCRATCH, assert_part_of, divergence, without_window};
use crate::models;

#[test]
fn a_context_filled_with_chunks_continues_bit_for_bit() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    for (n_chunk, n) in [(512, 2), (512, 514), (512, 2_000), (100, 1_000), (64, 66), (64, 700)] {
        let tokens = rig.prose(n);
        let (mut source, mut target) = (rig.context(2_048), rig.context(2_048));
        let chunks = source.prefill(0, &tokens, n_chunk);
        target.import(0, &chunks);
        let end = n as u32 - 1;
        assert!(target.can_continue(0, n - 1));
        let whole = source.export(0, 0, end);
        assert_eq!(target.export(0, 0, end), whole, "{n} tokens in chunks of {n_chunk}");
        chunks.iter().for_each(|chunk| assert_part_of(chunk, &whole));
        let last = &tokens[n - 1..];
        assert_eq!(target.compute(0, end, last), source.compute(0, end, last), "{n} tokens in chunks of {n_chunk}");
    }
}

#[test]
fn exporting_disturbs_nothing() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let tokens = rig.prose(301);
    let (mut exported, mut plain) = (rig.context(512), rig.context(512));
    exported.prefill(0, &tokens, 100);
    for (i, chunk) in tokens[..300].chunks(100).enumerate() {
        plain.compute(0, i as u32 * 100, chunk);
    }
    assert_eq!(exported.compute(0, 300, &tokens[300..]), plain.compute(0, 300, &tokens[300..]));
}

/// Other sequences came first, left holes, and go on in between: the cells are anywhere, and out of order.
#[test]
fn a_busy_cache_gives_and_takes_the_same_rows() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let (tokens, other) = (rig.prose(301), rig.noise(190));
    let mut plain = rig.context(512);
    let expected = plain.prefill(0, &tokens, 100);
    let mut busy = rig.context(512);
    // Cells 0..90 free, 90..190 taken: chunks find their place in two pieces.
    busy.compute(0, 0, &other[..90]);
    busy.compute(1, 0, &other[90..]);
    busy.ctx.clear_kv_cache_seq(Some(0), None, None).unwrap();
    let neighbour = busy.export(1, 0, 100);
    busy.import(0, &expected);
    assert_eq!(busy.export(1, 0, 100), neighbour);
    assert_eq!(busy.export(0, 0, 300), plain.export(0, 0, 300));
}

#[test]
fn a_sliding_window_comes_along() {
    let Some(model) = models::gemma3() else { return };
    let rig = Rig::load(&model);
    // More than the windowed cache's 2,048 cells: it wraps within a chunk, whose cells are then out of order.
    let n = 2_400;
    let tokens = rig.prose(n + 24);
    let (mut source, mut whole, mut trimmed) = (rig.context(2_560), rig.context(2_560), rig.context(2_560));
    let layout = source.kv.layout().clone();
    assert_eq!(layout.rope, RopePairing::HalfSplit);
    assert_eq!(layout.sections.iter().map(|s| s.window).collect::<Vec<_>>(), [None, Some(512)]);
    let chunks = source.prefill(0, &tokens[..n], 300);
    let end = n as u32 - 1;
    let expected = source.export(0, 0, end);
    chunks.iter().for_each(|chunk| assert_part_of(chunk, &expected));

    whole.import(0, &chunks);
    assert_eq!(whole.export(0, 0, end), expected);
    // Chunks that the last position does not look back at need no windowed rows.
    let trim = |c: &Chunk| if c.p1 <= end - 512 { without_window(c) } else { c.clone() };
    let fewer: Vec<_> = chunks.iter().map(trim).collect();
    let bytes = |chunks: &[Chunk]| chunks.iter().map(|c| c.n_bytes()).sum::<usize>();
    assert!(bytes(&fewer) < bytes(&chunks));
    trimmed.import(0, &fewer);
    assert_eq!(trimmed.export(0, 0, end), expected);

    let (mut sums, n_steps) = ([0.0; 2], tokens.len() - n + 1);
    for (i, token) in tokens[n - 1..].iter().enumerate() {
        let position = end + i as u32;
        assert!(whole.can_continue(0, position as usize) && trimmed.can_continue(0, position as usize));
        let expected = source.compute(0, position, &[*token]);
        for (sum, target) in sums.iter_mut().zip([&mut whole, &mut trimmed]) {
            *sum += divergence(&expected, &target.compute(0, position, &[*token]));
        }
    }
    let means = sums.map(|sum| sum / n_steps as f64);
    println!("Gemma: mean KL {means:?} over {n_steps} tokens");
    assert!(means.iter().all(|mean| *mean <= 1e-2), "{means:?}");
}

#[test]
fn a_refused_import_leaves_the_cache_as_it_was() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let tokens = rig.prose(321);
    let mut source = rig.context(512);
    let chunks = source.prefill(0, &tokens, 64);
    let blobs: Vec<_> = chunks.iter().map(|chunk| source.blob(chunk)).collect();

    // 256 cells: 120 are a neighbour's, 128 the slot's.
    let mut target = rig.context(256);
    target.compute(1, 0, &tokens[..120]);
    target.import(0, &chunks[..2]);
    let before = [target.export(0, 0, 128), target.export(1, 0, 120)];
    let mut refuse = |slot, n_present, blob| target.kv.import(&mut target.ctx, slot, n_present, blob).unwrap_err();
    let not_an_extension = |e| matches!(e, TransferError::NotAnExtension { .. });
    assert!(not_an_extension(refuse(0, 128, &blobs[1])), "repeated");
    assert!(not_an_extension(refuse(0, 64, &blobs[1])), "repeated, and wrongly said to be new");
    assert!(not_an_extension(refuse(0, 128, &blobs[3])), "a gap");
    assert!(not_an_extension(refuse(0, 192, &blobs[3])), "a gap, wrongly said not to be one");
    assert_eq!(refuse(N_SLOTS, 0, &blobs[0]), TransferError::NoSuchSlot { slot: N_SLOTS, n_slots: N_SLOTS });
    assert_eq!(refuse(0, 128, &blobs[2]), TransferError::State(StateError::Import), "no cells");
    assert_eq!([target.export(0, 0, 128), target.export(1, 0, 120)], before);
    assert_eq!(target.ctx.kv_cache_seq_pos_max(SCRATCH), -1);
    // With room again, the same blob is taken.
    target.ctx.clear_kv_cache_seq(Some(1), None, None).unwrap();
    target.import(0, &chunks[2..3]);
    assert_part_of(&chunks[2], &target.export(0, 0, 192));
}

#[test]
fn what_a_slot_does_not_hold_is_not_exported() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let mut source = rig.context(256);
    source.compute(0, 0, &rig.prose(100));
    let mut export = |slot, positions: std::ops::Range<u32>| {
        let end = positions.end;
        source.kv.export(&mut source.ctx, slot, positions, end).unwrap_err()
    };
    assert!(matches!(export(0, 50..101), TransferError::Blob(BlobError::Positions(_))));
    assert!(matches!(export(0, 50..50), TransferError::Blob(BlobError::Positions(_))));
    assert!(matches!(export(0, 0..u32::MAX), TransferError::Blob(BlobError::Positions(_))));
    assert!(matches!(export(1, 0..10), TransferError::State(_) | TransferError::Blob(_)));
    assert!(matches!(export(N_SLOTS, 0..10), TransferError::NoSuchSlot { .. }));
}

/// Otherwise a handoff would cost more than it saves. Usual is a thousandth; without flash attention a GPU's export takes
/// longer than the prefill.
#[test]
fn moving_a_chunk_costs_a_fraction_of_computing_it() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let (mut source, mut target) = (rig.context(1_024), rig.context(1_024));
    let tokens = rig.prose(512);
    let began = Instant::now();
    source.compute(0, 0, &tokens);
    let computed = began.elapsed();
    let moved = (0..5).map(|_| {
        let began = Instant::now();
        let chunk = source.kv.export(&mut source.ctx, 0, 0..512, 512).unwrap();
        let blob = target.blob(&chunk);
        target.kv.import(&mut target.ctx, 0, 0, &blob).unwrap();
        let moved = began.elapsed();
        target.ctx.clear_kv_cache_seq(Some(0), None, None).unwrap();
        moved
    });
    let moved = moved.min().unwrap();
    println!("512 tokens: {computed:?} to compute, {moved:?} to export, build and import");
    assert!(moved < computed / 10, "{computed:?} to compute, {moved:?} to move");
}
