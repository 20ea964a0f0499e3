//! KV that is exported from one context and imported into another, chunk by chunk, gives the same bytes and logits.

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
        let mut source = rig.context(2_048);
        let mut target = rig.context(2_048);
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
fn exporting_does_not_change_the_context() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let tokens = rig.prose(301);
    let mut exported = rig.context(512);
    let mut plain = rig.context(512);
    exported.prefill(0, &tokens, 100);
    for (i, chunk) in tokens[..300].chunks(100).enumerate() {
        plain.compute(0, i as u32 * 100, chunk);
    }
    assert_eq!(exported.compute(0, 300, &tokens[300..]), plain.compute(0, 300, &tokens[300..]));
}

/// Other sequences came first, left gaps, and continue in between, so that the cells are scattered and out of order.
#[test]
fn a_busy_cache_gives_and_takes_the_same_rows() {
    let Some(model) = models::smollm2() else { return };
    let rig = Rig::load(&model);
    let tokens = rig.prose(301);
    let other = rig.noise(190);
    let mut plain = rig.context(512);
    let expected = plain.prefill(0, &tokens, 100);
    let mut busy = rig.context(512);
    // Cells 0..90 are free and 90..190 are taken, so a chunk is stored in two pieces.
    busy.compute(0, 0, &other[..90]);
    busy.compute(1, 0, &other[90..]);
    busy.ctx.clear_kv_cache_seq(Some(0), None, None).unwrap();
    let neighbour = busy.export(1, 0, 100);
    busy.import(0, &expected);
    assert_eq!(busy.export(1, 0, 100), neighbour);
    assert_eq!(busy.export(0, 0, 300), plain.export(0, 0, 300));
}

#[test]
fn a_sliding_window_is_handed_over() {
    let Some(model) = models::gemma3() else { return };
    let rig = Rig::load(&model);
    // More than the windowed cache's 2,048 cells: it wraps within a chunk, whose cells are then out of order.
    let n = 2_400;
    let tokens = rig.prose(n + 24);
    let mut source = rig.context(2_560);
    let mut whole = rig.context(2_560);
    let mut trimmed = rig.context(2_560);
    let layout = source.kv.layout().clone();
    assert_eq!(layout.rope, RopePairing::HalfSplit);
    assert_eq!(layout.sections.iter().map(|s| s.window).collect::<Vec<_>>(), [None, Some(512)]);
    let chunks = source.prefill(0, &tokens[..n], 300);
    let end = n as u32 - 1;
    let expected = source.export(0, 0, end);
    chunks.iter().for_each(|chunk| assert_part_of(chunk, &expected));

    whole.import(0, &chunks);
    assert_eq!(whole.export(0, 0, end), expected);
    // Chunks that the last position does not attend to need no windowed rows.
    let trim = |c: &Chunk| if c.p1 <= end - 512 { without_window(c) } else { c.clone() };
    let fewer: Vec<_> = chunks.iter().map(trim).collect();
    let bytes = |chunks: &[Chunk]| chunks.iter().map(|c| c.n_bytes()).sum::<usize>();
    assert!(bytes(&fewer) < bytes(&chunks));
    trimmed.import(0, &fewer);
    assert_eq!(trimmed.export(0, 0, end), expected);

    let mut sums = [0.0; 2];
    let n_steps = tokens.len() - n + 1;
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

    // Of 256 cells, another slot has 120 and this one 128.
    let mut target = rig.context(256);
    target.compute(1, 0, &tokens[..120]);
    target.import(0, &chunks[..2]);
    let before = [target.export(0, 0, 128), target.export(1, 0, 120)];
    let mut refuse = |slot, n_present, blob| target.kv.import(&mut target.ctx, slot, n_present, blob).unwrap_err();
    let not_an_extension = |e| matches!(e, TransferError::NotAnExtension { .. });
    assert!(not_an_extension(refuse(0, 128, &blobs[1])), "repeated");
    assert!(not_an_extension(refuse(0, 64, &blobs[1])), "repeated, with a wrong number of present positions");
    assert!(not_an_extension(refuse(0, 128, &blobs[3])), "a gap");
    assert!(not_an_extension(refuse(0, 192, &blobs[3])), "a gap, with a wrong number of present positions");
    assert_eq!(refuse(N_SLOTS, 0, &blobs[0]), TransferError::NoSuchSlot { slot: N_SLOTS, n_slots: N_SLOTS });
    assert_eq!(refuse(0, 128, &blobs[2]), TransferError::State(StateError::Import), "no cells");
    assert_eq!([target.export(0, 0, 128), target.export(1, 0, 120)], before);
    assert_eq!(target.ctx.kv_cache_seq_pos_max(SCRATCH), -1);
    // Once there is room, the same blob is imported.
    target.ctx.clear_kv_cache_seq(Some(1), None, None).unwrap();
    target.import(0, &chunks[2..3]);
    assert_part_of(&chunks[2], &target.export(0, 0, 192));
}

#[test]
fn positions_that_a_slot_does_not_hold_are_not_exported() {
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
