//! Published models, from the numbers of their configurations. Tiny models of these architectures are compared with llama.cpp
//! itself in the engines' tests (`tiny_models`).

use super::super::writer::{GgufPlan, WrittenValue as Written};
use super::super::{CompanionMemory, ModelSizes, Sequences, SizeOptions};
use super::*;
use crate::options::CacheTypes;

/// A header with numbers, and with lists that have an entry for each layer.
fn header(architecture: &str, numbers: &[(&str, u32)], lists: &[(&str, Vec<u32>)]) -> Gguf {
    let mut metadata = vec![("general.architecture".to_owned(), Written::String(architecture.to_owned()))];
    let mut set = |key: &str, value| metadata.push((format!("{architecture}.{key}"), value));
    numbers.iter().for_each(|(key, number)| set(key, Written::U32(*number)));
    for (key, list) in lists {
        set(key, Written::Array(list.iter().map(|number| Written::U32(*number)).collect()));
    }
    let mut bytes = Vec::new();
    GgufPlan { metadata, tensors: Vec::new() }.write(&mut bytes, |_, _| Ok(())).unwrap();
    Gguf::parse(&bytes).unwrap()
}

/// `n_layer` entries: `value` where `is_one` is true, else 0.
fn where_true(n_layer: u32, value: u32, is_one: impl Fn(u32) -> bool) -> Vec<u32> {
    (0..n_layer).map(|layer| if is_one(layer) { value } else { 0 }).collect()
}

/// Linear attention in three of four layers: blocks, KV heads, linear heads. All have the heads of Qwen3-Next.
fn gated_delta_net(architecture: &str, n_layer: u32, n_head_kv: u32, n_linear: u32) -> Gguf {
    let heads = [("attention.head_count", 16), ("attention.head_count_kv", n_head_kv), ("attention.key_length", 256)];
    let of_state = [("ssm.conv_kernel", 4), ("ssm.inner_size", 128 * n_linear), ("ssm.state_size", 128)];
    let others = [("block_count", n_layer), ("attention.value_length", 256), ("ssm.group_count", 16)];
    header(architecture, &[&heads[..], &of_state, &others].concat(), &[])
}

/// Layers of Mamba 2, whose heads have 64 values and whose states 128; layers of attention, whose heads have 128.
fn mamba2_hybrid(architecture: &str, n_inner: u32, n_group: u32, lists: &[(&str, Vec<u32>)]) -> Gguf {
    let heads = [("attention.head_count", 32), ("attention.key_length", 128), ("attention.value_length", 128)];
    let of_state =
        [("ssm.conv_kernel", 4), ("ssm.inner_size", n_inner), ("ssm.state_size", 128), ("ssm.group_count", n_group)];
    let n_layer = [("block_count", lists[0].1.len() as u32)];
    header(architecture, &[&heads[..], &of_state, &n_layer].concat(), lists)
}

/// Layers of Nemotron-H: attention, feed forward, and Mamba for all others.
fn nemotron(n_layer: u32, n_head_kv: u32, [n_attention, n_feed_forward]: [u32; 2], n_inner: u32) -> Gguf {
    let heads = where_true(n_layer, n_head_kv, |layer| layer < n_attention);
    let lengths = where_true(n_layer, 1856, |layer| (n_attention..n_attention + n_feed_forward).contains(&layer));
    let lists = [("attention.head_count_kv", heads), ("feed_forward_length", lengths)];
    mamba2_hybrid("nemotron_h_moe", n_inner, 8, &lists)
}

fn check(name: &str, gguf: &Gguf, bytes_per_token: u64, state_bytes: u64) {
    let mut shape = gguf.kv_shape().unwrap();
    assert_eq!(shape.state_bytes, state_bytes, "{name}");
    // What grows with the context.
    shape.rows.retain(|row| row.window.is_none());
    assert_eq!(shape.bytes_per_token(CacheTypes::default()), bytes_per_token, "{name}");
    assert_eq!(gguf.has_states(), state_bytes > 0, "{name}");
}

#[test]
fn linear_attention_has_states_instead_of_rows() {
    let of_27b = gated_delta_net("qwen35", 64, 4, 48);
    check("Qwen3.6-27B", &of_27b, 65_536, 156_893_184);
    check("Qwen3.6-35B-A3B", &gated_delta_net("qwen35moe", 40, 2, 32), 20_480, 65_863_680);
    check("Qwen3-Next-80B", &gated_delta_net("qwen3next", 48, 2, 32), 24_576, 79_036_416);
    let kimi = [
        ("block_count", 27),
        ("attention.head_count", 32),
        ("attention.key_length", 576),
        ("attention.value_length", 512),
        ("attention.key_length_mla", 192),
        ("attention.value_length_mla", 128),
        ("ssm.conv_kernel", 4),
        ("kda.head_dim", 128),
    ];
    let heads = where_true(27, 1, |layer| layer % 4 == 3 || layer == 26);
    check("Kimi-Linear-48B", &header("kimi-linear", &kimi, &[("attention.head_count_kv", heads)]), 8_064, 44_892_160);
}

#[test]
fn mamba_and_short_convolutions_have_states_and_feed_forward_has_nothing() {
    check("Nemotron 3 Nano 30B", &nemotron(52, 2, [6, 23], 4_096), 6_144, 49_930_240);
    check("Nemotron-H 8B", &nemotron(52, 8, [4, 24], 8_192), 16_384, 103_612_416);
    let heads = where_true(40, 8, |layer| layer % 10 == 5);
    let granite = mamba2_hybrid("granitehybrid", 8_192, 1, &[("attention.head_count_kv", heads)]);
    check("Granite 4 H Small", &granite, 16_384, 154_644_480);
    let lfm2 =
        [("block_count", 24), ("embedding_length", 2_048), ("attention.head_count", 32), ("shortconv.l_cache", 3)];
    let heads = where_true(24, 8, |layer| layer % 4 == 2);
    check("LFM2-8B-A1B", &header("lfm2moe", &lfm2, &[("attention.head_count_kv", heads)]), 12_288, 294_912);
    let falcon = [
        ("block_count", 36),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("ssm.conv_kernel", 4),
        ("ssm.inner_size", 1_536),
        ("ssm.state_size", 128),
        ("ssm.group_count", 1),
    ];
    let of_layer = 4 * (3 * (1_536 + 2 * 128) + 128 * 1_536);
    check("Falcon-H1 0.5B", &header("falcon-h1", &falcon, &[]), 36 * 2 * 128 * 2, 36 * of_layer);
}

#[test]
fn indexers_and_compressed_rows_are_counted() {
    let latent = [
        ("block_count", 62),
        // It predicts a further token, and is not computed.
        ("nextn_predict_layers", 1),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 576),
        ("attention.value_length", 512),
        ("attention.key_length_mla", 192),
        ("attention.value_length_mla", 128),
        ("attention.indexer.key_length", 128),
        ("attention.indexer.top_k", 2_048),
    ];
    check("DeepSeek V3.2", &header("deepseek32", &latent, &[]), 85_888, 0);
    let v4 = [
        ("block_count", 43),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 512),
        ("attention.value_length", 512),
        ("attention.sliding_window", 128),
        ("attention.indexer.key_length", 128),
        ("attention.indexer.top_k", 512),
    ];
    let ratios = (0..43).map(|layer| if layer < 2 { 0 } else { [4, 128][layer % 2] }).collect();
    let v4 = header("deepseek4", &v4, &[("attention.compress_ratios", ratios)]);
    check("DeepSeek V4 Flash", &v4, 6_880, 12_206_080);
    // What does not grow with the context: states, and the rows of windows.
    let windows = v4.kv_shape().unwrap().rows.into_iter().filter(|row| row.window == Some(128));
    let of_windows: u64 = windows.map(|row| 128 * row.n_bytes(CacheTypes::default())).sum();
    assert_eq!(12_206_080 + of_windows, 17_842_176);
}

#[test]
fn windowed_layers_stop_growing_and_those_that_share_have_no_kv() {
    let sequences = Sequences { n: 5, n_ubatch: Some(512), n_rollback: 0 };
    let gemma = [
        ("block_count", 62),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 16),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("attention.sliding_window", 1_024),
    ];
    let of_27b = header("gemma3", &gemma, &[]).kv_shape().unwrap();
    let row = 16 * 128 * 2 * 2;
    assert_eq!(of_27b.bytes_per_token(CacheTypes::default()), 62 * row);
    let check = |n_cells: u32, sequences, of_window: u64| {
        let expected = (10 * u64::from(n_cells) + 52 * of_window) * row;
        assert_eq!(of_27b.n_bytes(CacheTypes::default(), n_cells, sequences), expected, "{n_cells}");
    };
    check(131_072, sequences, 5 * 1_024 + 512);
    check(4_096, sequences, 4_096);
    // Another engine keeps all.
    check(131_072, Sequences { n_ubatch: None, ..sequences }, 131_072);
    // Gemma 3 270M, as llama.cpp's log says: 48 MiB of 16,384 cells, and 45 MiB of 3,072 in the windowed layers.
    let of_270m = [
        ("block_count", 18),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 256),
        ("attention.value_length", 256),
        ("attention.sliding_window", 512),
    ];
    let of_270m = header("gemma3", &of_270m, &[]).kv_shape().unwrap();
    assert_eq!(of_270m.n_bytes(CacheTypes::default(), 16_384, sequences), (48 + 45) << 20);
    // The last layers of Gemma 4 use the KV of others.
    let gemma4 =
        [("attention.shared_kv_layers", 2), ("attention.key_length_swa", 64), ("attention.value_length_swa", 64)];
    let pattern = vec![("attention.sliding_window_pattern", where_true(6, 1, |layer| layer != 3))];
    let shared = header("gemma4", &[&gemma[1..], &gemma4, &[("block_count", 6)]].concat(), &pattern);
    let rows = shared.kv_shape().unwrap().rows;
    let windowed = CacheRow { k: 16 * 64, v: 16 * 64, n_tokens: 1, window: Some(1_024) };
    let full = CacheRow { k: 16 * 128, v: 16 * 128, n_tokens: 1, window: None };
    assert_eq!(rows, [windowed, windowed, windowed, full]);
    // A pattern that is not known counts whole layers.
    assert!(header("unheard-of", &gemma, &[]).kv_shape().unwrap().rows.iter().all(|row| row.window.is_none()));
}

#[test]
fn the_default_context_of_a_hybrid_model_is_as_long_as_its_memory_allows() {
    let of_27b = gated_delta_net("qwen35", 64, 4, 48);
    let options = SizeOptions {
        n_ctx: None,
        n_cells: None,
        n_slots: 4,
        sequences: Sequences { n: 6, n_ubatch: Some(512), n_rollback: 0 },
        cache_types: CacheTypes::default(),
        companions: CompanionMemory::NONE,
    };
    let sizes = |options, available_gib: u64| ModelSizes::choose(&of_27b, options, available_gib << 30).unwrap();
    let long = SizeOptions { n_ctx: Some(131_072), ..options };
    // 8 GiB of KV, and the states of six sequences: 0.9 GiB.
    assert_eq!(sizes(long, 40).cache_bytes, 131_072 * 65_536 + 6 * 156_893_184);
    // The file names no context: 16,384 tokens.
    assert_eq!(sizes(options, 40).n_ctx, 16_384);
    let of_long_context = [("context_length", 262_144), ("block_count", 64), ("full_attention_interval", 4)];
    let heads = [("attention.head_count_kv", 4), ("attention.key_length", 256), ("attention.value_length", 256)];
    let of_state =
        [("ssm.inner_size", 6_144), ("ssm.state_size", 128), ("ssm.group_count", 16), ("ssm.conv_kernel", 4)];
    let gguf = header("qwen35", &[&of_long_context[..], &heads, &of_state].concat(), &[]);
    let n_ctx = |available_gib: u64| ModelSizes::choose(&gguf, options, available_gib << 30).unwrap().n_ctx;
    // With KV in all layers, 131,072 tokens would take 32 GiB: 32,768 were the default.
    assert_eq!(n_ctx(40), 131_072);
    // The states of many slots are paid for.
    let many = SizeOptions { sequences: Sequences { n: 66, ..options.sequences }, ..options };
    assert_eq!(ModelSizes::choose(&gguf, many, 20 << 30).unwrap().n_ctx, 32_768);
    assert_eq!(n_ctx(20), 65_536);
}

#[test]
fn states_are_kept_for_as_many_tokens_as_their_bytes_allow() {
    let of_27b = gated_delta_net("qwen35", 64, 4, 48);
    // 512 MiB, since the header alone is no quarter of anything; 156.9 MB for each sequence.
    assert_eq!([1, 2, 6].map(|n| of_27b.n_rollback(n, 512)), [3, 1, 0]);
    let small = gated_delta_net("qwen35moe", 4, 2, 16);
    assert_eq!([512, 6, 2, 1].map(|n_ubatch| small.n_rollback(6, n_ubatch)), [8, 4, 0, 0]);
    let sequences = Sequences { n: 6, n_ubatch: Some(512), n_rollback: 8 };
    let shape = small.kv_shape().unwrap();
    assert_eq!(shape.n_bytes(CacheTypes::default(), 0, sequences), 6 * 9 * shape.state_bytes);
    // llama.cpp takes nothing back from these.
    let fixed = gated_delta_net("qwen3next", 4, 2, 16);
    assert!(fixed.has_states() && !fixed.takes_back());
    assert_eq!(fixed.n_rollback(6, 512), 0);
    // Rows are taken back without copies.
    let dense =
        header("llama", &[("block_count", 1), ("attention.head_count_kv", 1), ("attention.key_length", 64)], &[]);
    assert!(dense.takes_back());
    assert_eq!(dense.n_rollback(6, 512), 0);
}

#[test]
fn a_layout_s_tensors_are_named_by_the_model_s_layers() {
    use baton_schemas::kv::{
        Dtype, KvLayout, LayerNumbers, LayerShape, RopePairing, Rows, Section, StateKind, StateShape,
    };
    let rows = Rows { dtype: Dtype::F16, n_values: 64 };
    let section = |window, n_layers| {
        let layers = vec![LayerShape { k: rows, v: Some(rows) }; n_layers];
        Section { window, n_rot: [0; 2], tokens_per_row: 1, layers }
    };
    let layout = |sections, states: &[StateKind]| KvLayout {
        rope: RopePairing::HalfSplit,
        sections,
        states: states.iter().map(|kind| StateShape { kind: *kind, values: rows }).collect(),
    };
    let both = [StateKind::Convolution, StateKind::Recurrence];
    let qwen = gated_delta_net("qwen35", 8, 4, 48);
    let named = qwen.layer_numbers(&layout(vec![section(None, 2)], &both.repeat(6)));
    assert_eq!((&named.sections[..], &named.states[..4]), (&[vec![3, 7]][..], &[0, 0, 1, 1][..]));
    assert_eq!((named.of_rows(0, 1), named.of_state(7), named.of_state(12)), (Some(7), Some(4), None));
    // Short convolutions alone.
    let lfm2 = [("embedding_length", 64), ("attention.head_count", 4), ("shortconv.l_cache", 3), ("block_count", 4)];
    let lfm2 = header("lfm2moe", &lfm2, &[("attention.head_count_kv", vec![0, 2, 0, 0])]);
    let named = lfm2.layer_numbers(&layout(vec![section(None, 1)], &[StateKind::Convolution; 3]));
    assert_eq!((named.sections, named.states), (vec![vec![1]], vec![0, 2, 3]));
    // A layout that is not the header's has no names.
    let other = qwen.layer_numbers(&layout(vec![section(None, 3)], &both.repeat(5)));
    assert_eq!((other.sections, other.states), (vec![vec![]], vec![]));
    let gemma = [("block_count", 12), ("attention.head_count", 4), ("attention.key_length", 64)];
    let others = [("attention.value_length", 64), ("attention.sliding_window", 512)];
    let gemma = header("gemma3", &[&gemma[..], &others].concat(), &[]);
    let named = gemma.layer_numbers(&layout(vec![section(None, 2), section(Some(512), 10)], &[]));
    assert_eq!(
        named,
        LayerNumbers { sections: vec![vec![5, 11], vec![0, 1, 2, 3, 4, 6, 7, 8, 9, 10]], states: vec![] }
    );
}
