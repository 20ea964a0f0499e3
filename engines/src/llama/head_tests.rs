//! The heads of tiny models: which are computed, and that a batch gives the hidden rows of its own tokens.

use baton_model::gguf::{Gguf, UnusedHead};
use baton_model::options::Speculation;
use tiny_gguf::Architecture;
use tiny_gguf::file::Value;

use super::*;
use crate::llama::placed::Placed;

/// Every architecture whose head is computed, and blocks of its head.
const WITH_HEAD: [(Architecture, u32); 12] = [
    (Architecture::BailingMoe3, 1),
    (Architecture::Cohere2Moe, 1),
    (Architecture::DeepSeek2, 1),
    (Architecture::DeepSeek32, 1),
    (Architecture::Glm4Moe, 1),
    (Architecture::GlmDsa, 1),
    (Architecture::HyV3, 2),
    (Architecture::Mimo2, 2),
    (Architecture::NemotronHMoe, 1),
    (Architecture::Qwen35, 1),
    (Architecture::Qwen35Moe, 1),
    (Architecture::Step35, 2),
];

/// Rows of a sequence.
const N_ROWS: usize = 4;

/// The header, and options with which its head guesses. The folder holds the file.
fn with_heads(architecture: Architecture, n_heads: u32) -> (tempfile::TempDir, Gguf, EngineOptions) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("head.gguf");
    tiny_gguf::write_with_heads(&file, architecture, 1, n_heads);
    let options =
        EngineOptions { n_threads: Some(1), speculation: Some(Speculation::Auto), ..EngineOptions::of(&file) };
    (folder, Gguf::open(&file).unwrap(), options)
}

#[test]
fn a_head_that_cannot_guess_is_not_loaded_for_a_reason() {
    let check = |architecture, n_heads, change: fn(&mut tiny_gguf::file::Gguf), why| {
        let (_folder, _, options) = with_heads(architecture, n_heads);
        let path = options.path().unwrap();
        let mut file = tiny_gguf::file::Gguf::read(path);
        change(&mut file);
        file.write(path);
        let gguf = Gguf::open(path).unwrap();
        assert_eq!(load::unused_head(&options, &gguf), Some(why), "{architecture:?}");
        assert!(load::head(&options, &gguf).is_none(), "{architecture:?}");
        // llama.cpp leaves its weights out.
        load::model(&options, &gguf, &Placed::alone()).unwrap();
        let off = EngineOptions { speculation: Some(Speculation::Off), ..options };
        assert_eq!(load::unused_head(&off, &gguf), None, "nobody wants guesses of {architecture:?}");
    };
    check(Architecture::Qwen3Next, 1, |_| {}, UnusedHead::NotTakenBack);
    check(Architecture::Glm5Next, 1, |_| {}, UnusedHead::NotTakenBack);
    check(Architecture::Glm4Moe, 2, |_| {}, UnusedHead::Several);
    let without_gate = |file: &mut tiny_gguf::file::Gguf| {
        file.tensors.retain(|(name, _)| name != "blk.4.ffn_gate.weight");
    };
    check(Architecture::Mimo2, 1, without_gate, UnusedHead::Incomplete("ffn_gate"));
    let sharpened = |file: &mut tiny_gguf::file::Gguf| {
        file.metadata.push(("deepseek2.attention.temperature_scale".into(), Value::F32(0.1)));
    };
    check(Architecture::DeepSeek2, 1, sharpened, UnusedHead::NotComputed);
    // A batch of two tokens has no room for a guess.
    let (_folder, gguf, options) = with_heads(Architecture::Qwen35, 1);
    let narrow = EngineOptions { n_ubatch: Some(2), ..options };
    assert_eq!(load::unused_head(&narrow, &gguf), Some(UnusedHead::NotTakenBack));
    for architecture in [Architecture::Qwen35, Architecture::Glm4Moe] {
        let (_folder, gguf, options) = with_heads(architecture, 1);
        assert_eq!(load::unused_head(&options, &gguf), None, "it guesses");
        let by_default = EngineOptions { speculation: None, ..options };
        assert_eq!(load::unused_head(&by_default, &gguf), Some(UnusedHead::NotAskedFor), "{architecture:?}");
    }
}

/// Made-up hidden rows of a sequence's tokens.
fn hidden(n_values: usize, slot: usize) -> Vec<f32> {
    (0..N_ROWS * n_values).map(|i| ((i * 37 + slot * 11) % 101) as f32 / 50.0 - 1.0).collect()
}

/// The last row of `slot`: its logits and its hidden row.
type LastRow = (Vec<f32>, Vec<f32>);

fn row(slot: usize, position: usize, wants_logits: bool) -> BatchToken {
    let token = (slot * 13 + position * 7 + 1) as u32;
    BatchToken { token, position: position as u32, slot: slot as u32, wants_logits }
}

fn one_by_one(head: &mut LlamaHead<'_>, slot: usize) -> LastRow {
    let n_values = head.n_values();
    for (position, hidden) in hidden(n_values, slot).chunks_exact(n_values).enumerate() {
        head.compute(&[row(slot, position, true)], hidden).unwrap();
    }
    (head.logits(0).to_vec(), head.hidden(0).to_vec())
}

fn together(head: &mut LlamaHead<'_>, slots: [usize; 2]) -> [LastRow; 2] {
    let n_values = head.n_values();
    let rows: Vec<BatchToken> = slots
        .into_iter()
        .flat_map(|slot| (0..N_ROWS).map(move |position| row(slot, position, position + 1 == N_ROWS)))
        .collect();
    head.compute(&rows, &slots.map(|slot| hidden(n_values, slot)).concat()).unwrap();
    [N_ROWS - 1, 2 * N_ROWS - 1].map(|index| (head.logits(index).to_vec(), head.hidden(index).to_vec()))
}

#[test]
fn a_batch_of_several_rows_shows_the_hidden_row_of_each_sequences_last_token() {
    for (architecture, n_heads) in WITH_HEAD {
        let (_folder, gguf, options) = with_heads(architecture, n_heads);
        let found = load::head(&options, &gguf).unwrap_or_else(|| panic!("{architecture:?}"));
        let model = load::model(&options, &gguf, &Placed::alone()).unwrap();
        let mut head = LlamaHead::create(&model, &options, 256, found).unwrap().unwrap();
        let slots = [1, 2];
        let expected = slots.map(|slot| one_by_one(&mut head, slot));
        slots.iter().for_each(|slot| head.cut(*slot, 0));
        for (expected, found) in expected.iter().zip(together(&mut head, slots)) {
            for (what, expected, found) in [("logits", &expected.0, &found.0), ("hidden", &expected.1, &found.1)] {
                let size = expected.iter().fold(0.0, |size: f32, value| size.max(value.abs()));
                let apart = expected.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(size > 0.0 && expected.len() == found.len(), "{architecture:?}: {what}");
                assert!(apart < 0.02 * size, "{architecture:?}: {what} are {apart} apart, of {size}");
            }
        }
    }
}
