//! Tiny models of the architectures that llama.cpp names the tensors of: it computes them, every weight matters, and their
//! caches have the sizes that the header says.

use baton_engines::llama::reference::Reference;
use baton_engines::registry::EngineOptions;
use baton_model::gguf::{Gguf, Sequences};
use baton_model::options::CacheTypes;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::session::LlamaStateSeqFlags;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use tiny_gguf::Architecture;

use crate::models;

/// A tiny model, and the folder that holds its file until it is dropped.
fn tiny(architecture: Architecture, seed: u64) -> (tempfile::TempDir, Gguf, Reference) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, architecture, seed);
    let gguf = Gguf::open(&path).unwrap();
    let options = EngineOptions { n_slots: Some(1), n_threads: Some(1), ..models::of_llama(path) };
    (folder, gguf, Reference::load(options).unwrap())
}

/// Computes two tokens in turn at these positions, and returns the last one's logits.
fn compute(context: &mut LlamaContext<'_>, positions: std::ops::Range<usize>) -> Vec<f32> {
    let mut batch = LlamaBatch::new(positions.len(), 1);
    for i in positions.clone() {
        batch.add(LlamaToken(7 * (i % 2) as i32 + 1), i as i32, &[0], i + 1 == positions.end).unwrap();
    }
    context.decode(&mut batch).unwrap();
    context.get_logits_ith(positions.len() as i32 - 1).to_vec()
}

#[test]
fn every_described_architecture_computes_finite_logits_of_its_seed() {
    for architecture in Architecture::DESCRIBED {
        let logits = |seed| -> Vec<Vec<f32>> {
            let (_folder, _, reference) = tiny(architecture, seed);
            assert!(reference.tokenize("the").len() == 2, "{architecture:?} has the tokenizer of all tiny models");
            let mut context = reference.context(256).unwrap();
            (0..8).map(|i| compute(&mut context, i..i + 1)).collect()
        };
        let [first, second] = [1, 2].map(logits);
        assert!(first.iter().chain(&second).flatten().all(|value| value.is_finite()), "{architecture:?}");
        assert!(first.iter().zip(&second).all(|(a, b)| a != b), "{architecture:?} ignores its seed");
        // The same token after another history: the cache is used.
        assert!(first.iter().zip(&first[2..]).all(|(a, b)| a != b), "{architecture:?} forgets what came before");
    }
}

/// A number that marks the state of a sequence, and the sequence's own.
const HEAD: u64 = 8;

/// Position, number of sequences, sequence.
const CELL: u64 = 12;

/// The same with two more positions and the token, for M-RoPE.
const CELL_OF_AXES: u64 = 24;

/// The sections of a sequence's state: caches with rows, bytes of each of their cells beside the rows, recurrent layers.
fn sections(architecture: Architecture) -> (u64, u64, u64) {
    match architecture {
        Architecture::Llama | Architecture::Qwen2 | Architecture::Qwen3 => (1, CELL, 0),
        Architecture::Qwen3Moe | Architecture::Glm4Moe | Architecture::MiniMaxM2 => (1, CELL, 0),
        Architecture::DeepSeek2 | Architecture::HyV3 => (1, CELL, 0),
        Architecture::Step35 | Architecture::Mimo2 | Architecture::Cohere2Moe => (2, CELL, 0),
        Architecture::BailingMoe3 => (1, CELL, 3),
        Architecture::Gemma3 | Architecture::GptOss | Architecture::Llama4 => (2, CELL, 0),
        Architecture::Gemma4 | Architecture::Gemma4Moe => (2, CELL, 0),
        Architecture::Qwen2Vl | Architecture::Qwen3Vl | Architecture::Qwen3VlMoe => (1, CELL_OF_AXES, 0),
        Architecture::Qwen35 | Architecture::Qwen35Moe => (1, CELL_OF_AXES, 6),
        Architecture::Qwen36Of27B => (1, CELL_OF_AXES, 48),
        Architecture::Qwen36Of35B => (1, CELL_OF_AXES, 30),
        Architecture::Qwen3Next => (1, CELL, 6),
        Architecture::NemotronH | Architecture::NemotronHMoe => (1, CELL, 2),
        Architecture::Jamba | Architecture::MiniMax01 => (1, CELL, 2),
        Architecture::FalconH1 => (1, CELL, 4),
        Architecture::GraniteHybrid | Architecture::KimiLinear => (1, CELL, 3),
        Architecture::Lfm2 | Architecture::Lfm2Moe => (1, CELL, 4),
        Architecture::Lfm2Windowed => (2, CELL, 4),
        Architecture::DeepSeek32 | Architecture::GlmDsa | Architecture::MiniMaxM3 => (2, CELL, 0),
        Architecture::Glm5Next => (2, CELL, 2),
        Architecture::Mamba | Architecture::Mamba2 | Architecture::Rwkv7 => (0, CELL, 4),
        Architecture::DeepSeek4 | Architecture::Bert => unreachable!("not compared in this way"),
    }
}

/// The size of the state of a sequence with `n` tokens.
fn state_bytes(reference: &Reference, n: usize) -> u64 {
    let mut context = reference.context(1_024).unwrap();
    compute(&mut context, 0..n);
    context.state_seq_get_size_ext(0, LlamaStateSeqFlags::empty()) as u64
}

#[test]
fn a_header_says_to_the_byte_what_llama_cpp_keeps_of_a_sequence() {
    let listed = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3];
    let described = Architecture::DESCRIBED.into_iter().filter(|&other| other != Architecture::DeepSeek4);
    for architecture in listed.into_iter().chain(described) {
        let (_folder, gguf, reference) = tiny(architecture, 1);
        let shape = gguf.kv_shape().unwrap();
        let (n_sections, of_cell, n_recurrent) = sections(architecture);
        for n in [4, 12] {
            // Number of streams and of cells, order of V, layers, two rotations; then type and row size of each layer's K and V.
            let of_rows = shape.rows.iter().map(|row| {
                let n_tensors = if row.v > 0 { 2 } else { 1 };
                n_tensors * 12 + n * row.n_bytes(CacheTypes::default())
            });
            let of_sections = n_sections * (8 + n * of_cell + 16);
            // Number of cells, the cell, order of the states, layers; then the same of each layer's two states.
            let of_states = if n_recurrent > 0 { 4 + 8 + 8 + n_recurrent * 2 * 12 + shape.state_bytes } else { 0 };
            let expected = HEAD + of_rows.sum::<u64>() + of_sections + of_states;
            assert_eq!(state_bytes(&reference, n as usize), expected, "{architecture:?} with {n} tokens");
        }
        assert_eq!(gguf.has_states(), n_recurrent > 0, "{architecture:?}");
    }
}

#[test]
fn compressed_rows_and_their_states_have_the_sizes_that_the_header_says() {
    let (_folder, gguf, reference) = tiny(Architecture::DeepSeek4, 1);
    let mut shape = gguf.kv_shape().unwrap();
    // llama.cpp's log: 7.5 MiB of windows, 20 + 10 + 0.625 of compressed rows, 1.71875 of states.
    let sequences = Sequences { n: 5, n_ubatch: Some(512), n_rollback: 0 };
    let whole = shape.n_bytes(CacheTypes::default(), 16_384, sequences);
    assert_eq!(whole as f64 / f64::from(1 << 20), 39.843_75);
    let [short, long] = [256, 512].map(|n| state_bytes(&reference, n));
    let of_window: u64 =
        shape.rows.iter().map(|row| row.window.unwrap_or(0) * row.n_bytes(CacheTypes::default())).sum();
    shape.rows.retain(|row| row.window.is_none());
    let per_token = shape.bytes_per_token(CacheTypes::default());
    assert_eq!(long - short, 256 * (per_token + CELL));
    // The rest are some kilobytes of sizes and cells.
    let beside = short - 256 * (per_token + CELL) - shape.state_bytes - of_window;
    assert!(beside < 4 << 10, "{beside}");
}

#[tokio::test]
async fn an_engine_reports_the_cache_and_the_states_of_all_its_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, Architecture::Qwen36Of27B, 1);
    let options = EngineOptions { n_slots: Some(1), n_ctx: Some(256), n_cells: Some(256), ..models::of_llama(path) };
    let info = models::start(options, None).await.info().await.unwrap();
    // One slot and two scratch sequences.
    assert_eq!(info.memory.kv, 256 * 65_536 + 3 * 156_893_184);
}
