//! What the scheduler may ask of a context whose model has states, on tiny models with random weights.

use std::ops::Range;

use baton_model::gguf::Gguf;
use baton_schemas::kv::{
    Codec, Fingerprint, Handoff, HandoffId, HandoffReader, HandoffRecord, HandoffWriter, KvLayout, Mac, Offer, Span,
};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use tiny_gguf::Architecture;

use super::context::LlamaSlots;
use super::load::{self, ContextSizes};
use super::placed::Placed;
use super::probe;
use crate::engine_options::EngineOptions;
use crate::serving::context::{BatchToken, ComputeError, ExportTo, ModelContext};

const N_SLOTS: u32 = 3;

/// A class of caches each: with states, with a window beside them, with states alone, with compressed rows.
const COPIED: [Architecture; 4] =
    [Architecture::Qwen35, Architecture::Lfm2Windowed, Architecture::Mamba2, Architecture::DeepSeek4];

/// A tiny model, computed by one thread.
pub(super) struct Tiny {
    model: LlamaModel,
    gguf: Gguf,
    options: EngineOptions,
    _folder: tempfile::TempDir,
}

impl Tiny {
    pub(super) fn new(architecture: Architecture) -> Tiny {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_gguf::write(&path, architecture, 1);
        let options = EngineOptions {
            n_slots: Some(N_SLOTS),
            n_threads: Some(1),
            n_gpu_layers: Some(0),
            ..EngineOptions::of(path.clone())
        };
        let gguf = Gguf::open(&path).unwrap();
        let model = load::model(&options, &gguf, &Placed::alone()).unwrap();
        Tiny { model, gguf, options, _folder: folder }
    }

    /// A bare context, which can take back so many tokens of its states.
    pub(super) fn context(&self, n_rollback: u32) -> LlamaContext<'_> {
        let sizes = ContextSizes { n_cells: 1_024, n_batch: 512, n_rollback };
        load::context(&self.model, &self.options, None, sizes).unwrap()
    }

    pub(super) fn n_vocab(&self) -> u32 {
        self.model.n_vocab().cast_unsigned()
    }

    /// An empty context, which shows states when they are computed if it `is_watched`.
    pub(super) fn slots(&self, is_watched: bool) -> LlamaSlots<'_> {
        self.slots_with_rollback(is_watched, 0)
    }

    /// The same, which can take back so many tokens of its states.
    pub(super) fn slots_with_rollback(&self, is_watched: bool, n_rollback: u32) -> LlamaSlots<'_> {
        let Tiny { model, gguf, options, .. } = self;
        let sizes = ContextSizes { n_cells: 1_024, n_batch: 512, n_rollback };
        let (mut context, states) = match is_watched {
            true => load::watched_context(model, options, None, sizes).unwrap(),
            false => (load::context(model, options, None, sizes).unwrap(), None),
        };
        let transfer = probe::probe(&mut context, model, gguf, N_SLOTS, None).ok();
        LlamaSlots::new(context, 512)
            .with_states(load::has_states(model), states)
            .with_rollback(n_rollback)
            .with_transfer(transfer, N_SLOTS)
    }
}

/// The tokens of a slot at these positions, the same in each slot; the last one wants logits.
pub(super) fn batch(slot: u32, positions: Range<u32>) -> Vec<BatchToken> {
    let token = |position| BatchToken {
        token: position * 7 % 250,
        position,
        slot,
        wants_logits: position + 1 == positions.end,
    };
    positions.clone().map(token).collect()
}

pub(super) fn logits(slots: &mut LlamaSlots<'_>, slot: u32, position: u32) -> Vec<f32> {
    slots.compute(&batch(slot, position..position + 1)).unwrap();
    slots.logits(0).to_vec()
}

/// The largest difference.
pub(super) fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// llama.cpp copies a whole sequence before the next batch, and not at once: what changes in between would be copied.
#[test]
fn a_fork_of_a_separate_cache_is_made_at_once() {
    let tiny = Tiny::new(Architecture::DeepSeek4);
    let mut slots = tiny.slots(true);
    slots.compute(&batch(0, 0..200)).unwrap();
    let checkpoint = slots.checkpoint(0).unwrap();
    let early = logits(&mut slots, 0, 200);
    slots.compute(&batch(0, 201..300)).unwrap();
    assert!(slots.fork(0, 1, 300) && slots.fork(0, 2, 200));
    slots.return_to(2, 200, &checkpoint).unwrap();
    let late = logits(&mut slots, 0, 300);
    slots.cut(0, 0).unwrap();
    assert!(logits(&mut slots, 1, 300) == late, "a fork whose source has gone");
    assert!(logits(&mut slots, 2, 200) == early, "a fork that returned to a checkpoint");
    assert!(slots.cut(1, 200).is_err(), "not without its checkpoint");
    assert!(!slots.forks_share_cells());
}

#[test]
fn a_fork_of_a_range_returns_to_its_checkpoint_or_computes_nothing() {
    for architecture in COPIED {
        let tiny = Tiny::new(architecture);
        let mut slots = tiny.slots(true);
        slots.compute(&batch(0, 0..200)).unwrap();
        let checkpoint = slots.checkpoint(0).unwrap();
        let expected = logits(&mut slots, 0, 200);
        assert!(slots.fork(0, 1, 201));
        assert!(distance(&logits(&mut slots, 1, 201), &logits(&mut slots, 0, 201)) < 1e-3, "{architecture:?}: whole");
        for slot in [1, 2] {
            slots.cut(slot, 0).unwrap();
            assert!(slots.fork(0, slot, 200), "{architecture:?}");
            let refused = slots.compute(&batch(slot as u32, 200..201));
            assert!(matches!(refused, Err(ComputeError::Refused(_))), "{architecture:?} has the newest states");
            slots.return_to(slot, 200, &checkpoint).unwrap();
            assert!(slots.can_continue(slot, 200));
            assert!(distance(&logits(&mut slots, slot as u32, 200), &expected) < 1e-3, "{architecture:?}");
        }
    }
}

#[test]
fn rows_and_states_are_parked_and_restored() {
    for architecture in COPIED {
        let tiny = Tiny::new(architecture);
        let mut slots = tiny.slots(false);
        slots.compute(&batch(0, 0..150)).unwrap();
        let early = slots.checkpoint(0).unwrap();
        let chunks = [slots.export(0, 0..150, 150, ExportTo::Host).unwrap()];
        slots.compute(&batch(0, 150..200)).unwrap();
        let chunks = [&chunks[..], &[slots.export(0, 150..200, 200, ExportTo::Host).unwrap()]].concat();
        let late = slots.checkpoint(0).unwrap();
        let expected = logits(&mut slots, 0, 200);
        for (n, checkpoint) in [(200, &late), (150, &early)] {
            slots.cut(0, 0).unwrap();
            chunks.iter().for_each(|chunk| slots.restore(0, chunk).unwrap());
            let refused = slots.compute(&batch(0, 200..201));
            assert!(matches!(refused, Err(ComputeError::Refused(_))), "{architecture:?}: rows without states");
            slots.return_to(0, n, checkpoint).unwrap();
            if n < 200 {
                slots.compute(&batch(0, n as u32..200)).unwrap();
            }
            assert!(logits(&mut slots, 0, 200) == expected, "{architecture:?} from {n}");
        }
    }
}

/// The records of a prompt's KV: states come as they are computed, before the last chunk.
fn records(slots: &mut LlamaSlots<'_>, handoff: &Handoff, positions: &[Range<u32>]) -> Vec<u8> {
    let (mut writer, head) = HandoffWriter::begin(b"key", handoff.clone(), Codec::None, Mac::Blake3).unwrap();
    let mut bytes = head.concat();
    for positions in positions {
        let (end, batch) = (handoff.end(), batch(0, positions.clone()));
        if positions.end < end {
            slots.compute(&batch).unwrap();
        } else {
            let mut send = |part| bytes.extend(writer.state(&part).unwrap().concat());
            slots.compute_streaming_state(&batch, &mut send).unwrap();
        }
        let chunk = slots.export(0, positions.clone(), end, ExportTo::Node).unwrap();
        bytes.extend(writer.frame(&chunk).unwrap().concat());
    }
    bytes
}

/// Positions of a chunk: the whole prompt, a part, and a number that is no multiple of anything.
const CHUNKS: [usize; 3] = [300, 64, 17];

/// The logits of 49 given tokens after the first 300.
fn reply(slots: &mut LlamaSlots<'_>, slot: u32) -> Vec<Vec<f32>> {
    (300..349).map(|position| logits(slots, slot, position)).collect()
}

#[test]
fn kv_of_every_class_passes_the_wire_in_every_chunking() {
    for architecture in [
        Architecture::Qwen35,
        Architecture::Qwen35Moe,
        Architecture::Qwen3Next,
        Architecture::NemotronH,
        Architecture::GraniteHybrid,
        Architecture::Lfm2,
        Architecture::Lfm2Windowed,
        Architecture::KimiLinear,
        Architecture::Glm5Next,
        Architecture::DeepSeek32,
        Architecture::Qwen3Vl,
        Architecture::Mamba2,
        Architecture::Rwkv7,
        Architecture::DeepSeek4,
    ] {
        let tiny = Tiny::new(architecture);
        for n_chunk in CHUNKS {
            check_wire(&tiny, n_chunk, &format!("{architecture:?} in chunks of {n_chunk}"));
        }
    }
}

/// Hands over a prompt whose states stream while its last chunk is computed.
fn check_wire(tiny: &Tiny, n_chunk: usize, what: &str) {
    let parts: Vec<Range<u32>> = (0..300).step_by(n_chunk).map(|p0| p0..300.min(p0 + n_chunk as u32)).collect();
    let mut alone = tiny.slots(false);
    parts.iter().for_each(|part| alone.compute(&batch(0, part.clone())).unwrap());
    let expected = reply(&mut alone, 0);
    let (mut source, mut target) = (tiny.slots(true), tiny.slots(true));
    let form = source.form().unwrap();
    let handoff = Handoff {
        id: HandoffId([0; 16]),
        fingerprint: Fingerprint { vocabulary: [0; 32], weights: [0; 32] },
        layout: KvLayout::clone(&form.layout),
        start: 0,
        tokens: batch(0, 0..300).iter().map(|t| t.token).collect(),
    };
    let records = records(&mut source, &handoff, &parts);
    let offer = Offer { codecs: &[Codec::None], state_codecs: &[], macs: &[] };
    let placement = |span: &Span, layout: &KvLayout| (form.placement)(span, layout);
    let mut reader = HandoffReader::with_placement(b"key", handoff, offer, placement).unwrap();
    let (mut records, mut n_present, mut states) = (&records[..], 0, None);
    while let Some(record) = reader.read(&mut records).unwrap() {
        match record {
            HandoffRecord::Frame(kv) => {
                let end = kv.span().p1;
                reader.recycle(target.import(1, n_present, kv).unwrap());
                n_present = end;
            }
            HandoffRecord::State(state) => assert!(states.replace(state).is_none()),
            HandoffRecord::Head(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((n_present, states.is_some()), (300, !form.layout.states.is_empty()), "{what}");
    if let Some(states) = states {
        assert!(!target.can_continue(1, 300));
        target.import_state(1, states).unwrap();
    }
    assert!(target.can_continue(1, 300), "{what}");
    assert!(reply(&mut target, 1) == expected, "{what}");
    assert!(reply(&mut source, 0) == expected, "{what}: the export disturbs");
}
