//! Images whose tokens share a position (M-RoPE), of each family's projector with random weights: their logits equal those of
//! llama.cpp's own run of the prompt, which counts positions itself.

use std::io::Cursor;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_model::gguf::Gguf;
use baton_schemas::Token;
use baton_schemas::image::{Image, ImageShape};
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use tiny_gguf::Architecture;
use tiny_gguf::projector::{self, TinyProjector};

use super::context::LlamaSlots;
use super::load::{self, ContextSizes};
use super::placed::Placed;
use super::probe;
use super::projector::Projector;
use crate::engine_options::EngineOptions;
use crate::serving::context::{BatchToken, ExportTo, ModelContext};
use crate::serving::images::{ImageEncoder, ImageRun, Preparation};

const SIZES: ContextSizes = ContextSizes { n_cells: 1_024, n_batch: 512, n_rollback: 0 };

const N_SLOTS: u32 = 3;

/// A model for each family's projector.
const FAMILIES: [(Architecture, TinyProjector); 5] = [
    (Architecture::Qwen2Vl, TinyProjector::Qwen2Vl),
    (Architecture::Qwen2Vl, TinyProjector::Qwen25Vl),
    (Architecture::Qwen3Vl, TinyProjector::Qwen3Vl),
    (Architecture::Qwen35, TinyProjector::Qwen35),
    (Architecture::Qwen3VlMoe, TinyProjector::Qwen3Vl),
];

/// A tiny model that sees, computed by one thread.
struct Seeing {
    model: Arc<LlamaModel>,
    projector: Arc<Projector>,
    gguf: Gguf,
    options: EngineOptions,
    _folder: tempfile::TempDir,
}

/// A prompt with an image, and what is fed after it.
struct Prompt {
    tokens: Vec<Token>,
    run: ImageRun,
}

impl Seeing {
    fn new(architecture: Architecture, kind: TinyProjector) -> Seeing {
        let folder = tempfile::tempdir().unwrap();
        let [path, eyes] = ["tiny.gguf", "mmproj.gguf"].map(|name| folder.path().join(name));
        let deepstack = [("n_deepstack_layers", 1)];
        let numbers = if kind == TinyProjector::Qwen3Vl { &deepstack[..] } else { &[] };
        tiny_gguf::write_with(&path, architecture, 1, numbers);
        projector::write(&eyes, kind, 64, 1);
        let options = EngineOptions {
            n_slots: Some(N_SLOTS),
            n_threads: Some(1),
            n_gpu_layers: Some(0),
            projector: Some(eyes),
            ..EngineOptions::of(path.clone())
        };
        let gguf = Gguf::open(&path).unwrap();
        let model = Arc::new(load::model(&options, &gguf, &Placed::alone()).unwrap());
        let projector = Projector::load(&options, &model).unwrap().unwrap();
        Seeing { model, projector, gguf, options, _folder: folder }
    }

    fn slots(&self) -> LlamaSlots<'_> {
        let mut context = load::context(&self.model, &self.options, None, SIZES).unwrap();
        let transfer = probe::probe(&mut context, &self.model, &self.gguf, N_SLOTS, None).unwrap();
        LlamaSlots::new(context, 512)
            .with_states(load::has_states(&self.model), None)
            .with_transfer(Some(transfer), N_SLOTS)
            .with_projector(Some(Arc::clone(&self.projector)))
    }

    /// Text, an image of this size, and text.
    fn prompt(&self, width: u32, height: u32) -> Prompt {
        let picture = image::RgbImage::from_fn(width, height, |x, y| image::Rgb([(x * 3) as u8, (y * 4) as u8, 77]));
        let mut bytes = Cursor::new(Vec::new());
        picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        let image = Image::new(bytes.into_inner(), "image");
        let shape = self.projector.shape(&image).unwrap();
        let text = |seed: u32, n: u32| (0..n).map(move |i| (seed + i * 7) % 250);
        let run = image.placeholders(&shape);
        let at = 20..20 + run.len();
        let tokens = text(3, 20).chain(run).chain(text(11, 30)).collect();
        Prompt { tokens, run: ImageRun { at, shape, image } }
    }

    /// The logits after each of the last tokens, as llama.cpp computes them. It counts the image's positions.
    fn reference(&self, prompt: &Prompt, replied: &Range<usize>) -> Vec<Vec<f32>> {
        let mut context = load::context(&self.model, &self.options, None, SIZES).unwrap();
        let mut n_past = 0;
        let decode = |context: &mut llama_cpp_2::context::LlamaContext<'_>, n_past: &mut i32, tokens: &[Token]| {
            let mut batch = LlamaBatch::new(tokens.len(), 1);
            for (i, token) in tokens.iter().enumerate() {
                batch.add(LlamaToken(token.cast_signed()), *n_past, &[0], i + 1 == tokens.len()).unwrap();
                *n_past += 1;
            }
            context.decode(&mut batch).unwrap();
            context.get_logits_ith(tokens.len() as i32 - 1).to_vec()
        };
        let Prompt { tokens, run } = prompt;
        decode(&mut context, &mut n_past, &tokens[..run.at.start]);
        let chunks = self.projector.chunks(&run.image).unwrap();
        n_past = chunks.eval_chunks(&mut self.projector.lock(), &mut context, n_past, 0, 512, false).unwrap();
        decode(&mut context, &mut n_past, &tokens[run.at.end..replied.start]);
        tokens[replied.clone()].iter().map(|token| decode(&mut context, &mut n_past, &[*token])).collect()
    }
}

impl Prompt {
    /// The tokens that are fed one by one, after the rest in one batch.
    fn replied(&self) -> Range<usize> {
        self.tokens.len() - 10..self.tokens.len()
    }

    fn compute(&self, slots: &mut LlamaSlots<'_>, slot: usize, tokens: Range<usize>) -> Vec<f32> {
        let n = tokens.len();
        let token = |i: usize| BatchToken {
            token: self.tokens[i],
            position: i as u32,
            slot: slot as u32,
            wants_logits: i + 1 == tokens.end,
        };
        slots.compute(&tokens.clone().map(token).collect::<Vec<_>>()).unwrap();
        slots.logits(n - 1).to_vec()
    }

    fn see(&self, eyes: &Projector, slots: &mut LlamaSlots<'_>, slot: usize) {
        let preparation = eyes.prepare(&self.run).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while preparation.outcome().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(slots.decode_image(slot, &self.run, &preparation).is_ok());
    }

    /// Computes all that comes before what is fed one by one.
    fn prefill(&self, eyes: &Projector, slots: &mut LlamaSlots<'_>, slot: usize) {
        slots.set_tokens(slot, &self.tokens);
        self.compute(slots, slot, 0..self.run.at.start);
        self.see(eyes, slots, slot);
        self.compute(slots, slot, self.run.at.end..self.replied().start);
    }

    fn reply(&self, slots: &mut LlamaSlots<'_>, slot: usize) -> Vec<Vec<f32>> {
        self.replied().map(|i| self.compute(slots, slot, i..i + 1)).collect()
    }
}

/// The largest difference.
fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_after_an_image_equal_llama_cpps_own() {
    for (architecture, kind) in FAMILIES {
        let seeing = Seeing::new(architecture, kind);
        for (width, height) in [(120, 90), (300, 60), (60, 200)] {
            let prompt = seeing.prompt(width, height);
            let ImageShape { n_tokens, shared } = &prompt.run.shape;
            let shared = shared.as_ref().unwrap();
            assert!(shared.n_positions < shared.tokens.len(), "{kind:?}: {n_tokens} {shared:?}");
            let mut slots = seeing.slots();
            prompt.prefill(&seeing.projector, &mut slots, 0);
            let said = prompt.reply(&mut slots, 0);
            assert!(said == seeing.reference(&prompt, &prompt.replied()), "{kind:?} {width}×{height}");
        }
    }
}

#[test]
fn an_image_that_is_exported_in_any_pieces_continues_alike() {
    for (architecture, kind) in FAMILIES {
        let seeing = Seeing::new(architecture, kind);
        let prompt = seeing.prompt(120, 90);
        let end = prompt.replied().start as u32;
        let mut source = seeing.slots();
        prompt.prefill(&seeing.projector, &mut source, 0);
        let mut chunks = Vec::new();
        // Pieces of seven tokens cut the image.
        for p0 in (0..end).step_by(7) {
            chunks.push(source.export(0, p0..end.min(p0 + 7), end, ExportTo::Host).unwrap());
        }
        let has_states = load::has_states(&seeing.model);
        let states = has_states.then(|| source.export_state(0, end).unwrap());
        let expected = prompt.reply(&mut source, 0);
        assert!(expected == seeing.reference(&prompt, &prompt.replied()), "{kind:?}: the export disturbs");

        let mut target = seeing.slots();
        target.set_tokens(1, &prompt.tokens);
        chunks.iter().for_each(|chunk| target.restore(1, chunk).unwrap());
        if let Some(states) = &states {
            assert!(!target.can_continue(1, end as usize), "{kind:?}: without states");
            target.restore_state(1, states).unwrap();
        }
        assert!(target.can_continue(1, end as usize), "{kind:?}");
        // What was imported is exported alike, so a third node would get the same.
        let whole = prompt.run.at.start as u32 - 3..prompt.run.at.end as u32 + 3;
        let again = target.export(1, whole.clone(), end, ExportTo::Host).unwrap();
        assert!(prompt.reply(&mut target, 1) == expected, "{kind:?}");
        let mut third = seeing.slots();
        prompt.prefill(&seeing.projector, &mut third, 0);
        assert!(third.export(0, whole, end, ExportTo::Host).unwrap() == again, "{kind:?}");
    }
}

#[test]
fn a_slot_returns_to_the_ends_of_an_image() {
    for (architecture, kind) in FAMILIES {
        let seeing = Seeing::new(architecture, kind);
        let prompt = seeing.prompt(200, 90);
        let mut slots = seeing.slots();
        let Range { start, end } = prompt.run.at;
        let expected = seeing.reference(&prompt, &prompt.replied());
        slots.set_tokens(0, &prompt.tokens);
        prompt.compute(&mut slots, 0, 0..start);
        let has_states = load::has_states(&seeing.model);
        let before = has_states.then(|| slots.checkpoint(0).unwrap());
        prompt.see(&seeing.projector, &mut slots, 0);
        let after = has_states.then(|| slots.checkpoint(0).unwrap());
        prompt.compute(&mut slots, 0, end..prompt.replied().start);
        assert!(prompt.reply(&mut slots, 0) == expected, "{kind:?}");
        let back = |slots: &mut LlamaSlots<'_>, n: usize, checkpoint: &Option<bytes::Bytes>| match checkpoint {
            Some(checkpoint) => slots.return_to(0, n, checkpoint).unwrap(),
            None => slots.cut(0, n).unwrap(),
        };
        back(&mut slots, end, &after);
        prompt.compute(&mut slots, 0, end..prompt.replied().start);
        assert!(prompt.reply(&mut slots, 0) == expected, "{kind:?}: from behind the image");
        back(&mut slots, start, &before);
        prompt.see(&seeing.projector, &mut slots, 0);
        prompt.compute(&mut slots, 0, end..prompt.replied().start);
        assert!(prompt.reply(&mut slots, 0) == expected, "{kind:?}: from before the image");
        if !has_states {
            assert!(slots.fork(0, 2, end), "{kind:?}");
            slots.set_tokens(2, &prompt.tokens);
            prompt.compute(&mut slots, 2, end..prompt.replied().start);
            assert!(distance(&prompt.reply(&mut slots, 2), &expected) < 1e-4, "{kind:?}: of a fork");
        }
    }
}

#[test]
fn cells_between_others_come_out_in_the_order_of_an_images_lines() {
    for (architecture, kind) in FAMILIES {
        let seeing = Seeing::new(architecture, kind);
        let prompt = seeing.prompt(120, 90);
        let end = prompt.replied().start as u32;
        let mut plain = seeing.slots();
        prompt.prefill(&seeing.projector, &mut plain, 0);
        let expected = plain.export(0, 0..end, end, ExportTo::Host).unwrap();
        // Two others take turns with cells, and one of them leaves.
        let mut crowded = seeing.slots();
        for i in 0..8 {
            prompt.compute(&mut crowded, 1, i..i + 1);
            prompt.compute(&mut crowded, 2, i..i + 1);
        }
        crowded.cut(1, 0).unwrap();
        prompt.prefill(&seeing.projector, &mut crowded, 0);
        let found = crowded.export(0, 0..end, end, ExportTo::Host).unwrap();
        let rows = |chunk: &baton_schemas::kv::Chunk| chunk.tensors().map(|rows| rows.to_vec()).collect::<Vec<_>>();
        let (found, expected) = (rows(&found), rows(&expected));
        assert!(found.iter().zip(&expected).all(|(a, b)| a.len() == b.len()), "{kind:?}");
        // The first layer's keys depend on nothing but the token and its position.
        assert!(found[0] == expected[0], "{kind:?}");
    }
}
