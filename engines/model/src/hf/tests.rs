use std::fs;
use std::path::Path;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use super::family::Family;
use super::pre_tokenizer::O200K;
use super::*;
use crate::gguf::window::{self, SectionLayers, Window};
use crate::options::CacheTypes;

/// A tiny model's files, changed by `change`.
fn folder(change: impl Fn(&mut Json, &mut Json)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 6, "max_position_embeddings": 512, "rope_theta": 5e5,
        "rms_norm_eps": 1e-5, "eos_token_id": [4, 3],
    });
    let mut tokenizer = json!({
        "added_tokens": [
            { "id": 3, "content": "<|end|>", "special": false },
            { "id": 4, "content": "stop", "special": true },
            { "id": 2, "content": "\u{2581}hi", "special": false },
        ],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1 }, "merges": ["a b", ["b", "a"]] },
    });
    change(&mut config, &mut tokenizer);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    write_weights(folder.path(), "model.safetensors", "BF16", 1);
    folder
}

fn write_weights(folder: &Path, name: &str, dtype: &str, value: u8) {
    write_tensor(folder, name, "model.layers.0.self_attn.k_proj.weight", dtype, value);
}

/// A file with one tensor of 2 x 4 values of two bytes.
fn write_tensor(folder: &Path, name: &str, tensor: &str, dtype: &str, value: u8) {
    let header = json!({ tensor: { "dtype": dtype, "shape": [2, 4], "data_offsets": [0, 16] } });
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[value; 16]].concat();
    fs::write(folder.join(name), bytes).unwrap();
}

fn refusal(change: impl Fn(&mut Json, &mut Json)) -> String {
    let folder = folder(change);
    let error = ModelFolder::open(folder.path()).err().expect("it is refused").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn a_folder_is_described_as_a_file_would_be() {
    let folder = folder(|_, _| {});
    let model = ModelFolder::open(folder.path()).unwrap();
    let header = &model.header;
    assert_eq!((header.architecture(), header.context_length()), (Some("llama"), Some(512)));
    assert_eq!(header.kv_bytes_per_token(CacheTypes::default()), Some(2 * 2 * 4 * 2));
    assert_eq!(header.tensors[0].dims, [4, 2]);
    assert_eq!(model.spellings, ["a", "b", " hi", "<|end|>", "stop", "[PAD5]"]);
    assert_eq!(model.types, [1, 1, 4, 3, 3, 5]);
    let Merging::BytePairs { merges, pre } = &model.words else { panic!("its tokens are byte pairs") };
    assert_eq!((merges.as_slice(), *pre), (&["a b".to_owned(), "b a".to_owned()][..], "gpt-2"));
    assert_eq!(header.u64("tokenizer.ggml.eos_token_id"), Some(4));
    assert_eq!((model.pairing, model.quantization()), (RopePairing::Interleaved, "BF16".to_owned()));
}

/// As Transformers 5 writes them.
#[test]
fn nested_settings_of_rope_are_read() {
    let rope = |rope: Json| {
        let folder = folder(|config, _| {
            config.as_object_mut().unwrap().remove("rope_theta");
            config["rope_parameters"] = rope.clone();
        });
        ModelFolder::open(folder.path()).unwrap().rope().clone()
    };
    let plain = rope(json!({ "rope_theta": 1e6, "rope_type": "default" }));
    assert!(plain.base == 1e6 && plain.scaling.is_none());
    let scaled = rope(json!({ "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0 }));
    assert!(scaled.base == 5e5 && scaled.scaling.unwrap().text.get().contains("low_freq_factor"));
    assert_eq!(rope(json!({ "rope_type": "default" })).base, 1e4);
    let by_kind = rope(json!({
        "full_attention": { "rope_theta": 1e6, "rope_type": "linear", "factor": 8.0 },
        "sliding_attention": { "rope_theta": 2e4, "rope_type": "default" },
    }));
    assert_eq!((by_kind.base, by_kind.windowed_base), (1e6, 2e4));
    let scaling = by_kind.scaling.unwrap();
    assert!(scaling.text.get().starts_with('{') && scaling.text.get().contains(r#""factor":8.0"#));
    assert!(!scaling.text.get().contains("attention"), "mlx-lm reads it of all layers without a window");
}

#[test]
fn the_weights_decide_the_fingerprint_and_the_tokens_the_vocabulary() {
    let hash = |folder: &TempDir| ModelFolder::open(folder.path()).unwrap().fingerprint().unwrap();
    let plain = folder(|_, _| {});
    assert_eq!(hash(&plain), hash(&folder(|_, _| {})));
    let other = folder(|_, _| {});
    write_weights(other.path(), "model.safetensors", "BF16", 2);
    assert_eq!(hash(&plain).vocabulary, hash(&other).vocabulary);
    assert_ne!(hash(&plain).weights, hash(&other).weights);
    let scaled = folder(|config, _| config["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 8.0 }));
    assert_ne!(hash(&plain).weights, hash(&scaled).weights);
    let renamed = folder(|_, tokenizer| tokenizer["added_tokens"][1]["content"] = "halt".into());
    assert_ne!(hash(&plain).vocabulary, hash(&renamed).vocabulary);
    assert_eq!(hash(&plain).weights, hash(&renamed).weights);
}

/// Makes the model Gemma 3's: two of three layers have a window, and the tokens are SentencePiece's.
fn gemma(config: &mut Json, tokenizer: &mut Json) {
    config["model_type"] = "gemma3_text".into();
    config["num_hidden_layers"] = 4.into();
    config["sliding_window"] = 16.into();
    config["layer_types"] = json!(["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]);
    config["vocab_size"] = 12.into();
    *tokenizer = json!({
        "added_tokens": [
            { "id": 0, "content": "<unk>", "special": true },
            { "id": 1, "content": "\u{2581}\u{2581}", "special": false },
            // Beyond the embeddings.
            { "id": 12, "content": "<image_soft_token>", "special": true },
        ],
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        "pre_tokenizer": { "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious" },
        "model": {
            "type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
            "vocab": {
                "<unk>": 0, "\u{2581}\u{2581}": 1, "<0xC3>": 2, "<0xA9>": 3, "\u{2581}a": 4, "ab": 5, "aab": 6,
                "\u{2581}": 7, "a": 8, "b": 9, "<0x0A>": 10, "c": 11,
            },
            "merges": [["\u{2581}", "\u{2581}"], ["\u{2581}", "a"], ["a", "b"], ["a", "ab"]],
        },
    });
}

#[test]
fn gemmas_layers_with_a_window_and_its_pieces_are_described_as_in_a_file() {
    let folder = folder(gemma);
    let model = ModelFolder::open(folder.path()).unwrap();
    assert_eq!((model.header.architecture(), model.pairing), (Some("gemma3"), RopePairing::HalfSplit));
    let window = Window::of(&model.header).unwrap().unwrap();
    assert_eq!(window, Window { n_positions: 16, period: 3 });
    assert_eq!(window::sections(4, Some(window)), [vec![2], vec![0, 1, 3]]);
    assert_eq!((model.rope().base, model.rope().windowed_base), (5e5, 1e4));
    assert_eq!(model.types, [3, 4, 6, 6, 1, 1, 1, 1, 1, 1, 6, 1]);
    assert_eq!(model.spellings[1], "  ");
    let Merging::SentencePieces { scores } = &model.words else { panic!("its tokens are pieces") };
    assert_eq!(scores[..8], [-1000.0, -1000.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0]);
    assert_eq!(model.header.u64("tokenizer.ggml.unknown_token_id"), Some(0));
}

#[test]
fn mixtures_are_described_as_in_a_file() {
    assert!(Family::NAMES.into_iter().all(|name| Family::named(name).is_some()));
    let qwen = folder(|config, _| config["model_type"] = "qwen3_moe".into());
    let model = ModelFolder::open(qwen.path()).unwrap();
    assert_eq!((model.header.architecture(), model.pairing), (Some("qwen3moe"), RopePairing::HalfSplit));
    assert_eq!(Window::of(&model.header).unwrap(), None);
    let of_gpt_oss = |config: &mut Json, tokenizer: &mut Json| {
        config["model_type"] = "gpt_oss".into();
        config["sliding_window"] = 128.into();
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        config["rope_scaling"] = json!({ "rope_type": "yarn", "factor": 32.0 });
        let o200k = json!({ "type": "Split", "pattern": { "Regex": O200K }, "behavior": "Removed", "invert": true });
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false });
        tokenizer["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [o200k, bytes] });
    };
    let gpt_oss = folder(of_gpt_oss);
    let model = ModelFolder::open(gpt_oss.path()).unwrap();
    assert_eq!((model.header.architecture(), model.pairing), (Some("gpt-oss"), RopePairing::HalfSplit));
    let window = Window::of(&model.header).unwrap().unwrap();
    assert_eq!(window, Window { n_positions: 128, period: 2 });
    assert_eq!(window::sections(2, Some(window)), [vec![1], vec![0]]);
    assert_eq!((model.rope().base, model.rope().windowed_base), (5e5, 5e5), "all layers have one base");
    assert!(matches!(model.words, Merging::BytePairs { pre: "gpt-4o", .. }));
    let other_layers = refusal(|config, tokenizer| {
        of_gpt_oss(config, tokenizer);
        config["layer_types"] = json!(["full_attention", "sliding_attention"]);
    });
    assert!(other_layers.contains("layer_types"), "{other_layers}");
    let removed = refusal(|config, tokenizer| {
        of_gpt_oss(config, tokenizer);
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["invert"] = false.into();
    });
    assert!(removed.contains("pre_tokenizer"), "{removed}");
}

/// Makes the model one that also sees images, and whose text is read by three linear layers and one with attention.
fn hybrid(config: &mut Json, _: &mut Json) {
    let mut text = config.take();
    text["num_hidden_layers"] = 4.into();
    text["num_attention_heads"] = 1.into();
    text["rope_theta"].take();
    text["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25 });
    text["layer_types"] = json!(["linear_attention", "linear_attention", "linear_attention", "full_attention"]);
    for (key, n) in [
        ("linear_num_key_heads", 2),
        ("linear_num_value_heads", 4),
        ("linear_key_head_dim", 16),
        ("linear_value_head_dim", 16),
        ("linear_conv_kernel_dim", 4),
    ] {
        text[key] = n.into();
    }
    *config = json!({ "model_type": "qwen3_5", "text_config": text, "quantization": { "group_size": 64, "bits": 4 } });
}

#[test]
fn a_hybrids_text_part_is_described_as_in_a_file() {
    let folder = folder(hybrid);
    let model = ModelFolder::open(folder.path()).unwrap();
    assert_eq!((model.header.architecture(), model.quantization()), (Some("qwen35"), "4-bit".to_owned()));
    let number = |key: &str| model.header.u64(&format!("qwen35.{key}"));
    assert_eq!((number("rope.dimension_count"), number("full_attention_interval")), (Some(2), Some(4)));
    assert_eq!(
        (number("ssm.conv_kernel"), number("ssm.inner_size"), number("ssm.group_count")),
        (Some(4), Some(64), Some(2))
    );
    let linear = model.linear_layers().unwrap();
    assert_eq!((&linear.layers[..], linear.n_inputs), (&[0, 1, 2][..], 3));
    let sizes: Vec<_> = linear.shapes().iter().map(|state| state.values.n_values).collect();
    // The convolution's inputs of all heads of Q, K and V, then a square for each head of V.
    assert_eq!(sizes, [3 * 8 * 16, 4 * 16 * 16].repeat(3));
    // One layer of four keeps KV: 1 head, 8 elements of K and of V.
    assert_eq!(model.header.kv_bytes_per_token(CacheTypes::default()), Some(2 * 8 * 2));
}

#[test]
fn hybrids_that_llama_cpp_has_not_are_refused() {
    let check = |expected: &str, change: fn(&mut Json)| {
        let error = refusal(|config, tokenizer| {
            hybrid(config, tokenizer);
            change(&mut config["text_config"]);
        });
        assert!(error.contains(expected), "{error}");
    };
    check("layer_types", |text| text["layer_types"][0] = "full_attention".into());
    check("different sizes", |text| text["linear_value_head_dim"] = 8.into());
    check("it names no linear_num_key_heads", |text| drop(text["linear_num_key_heads"].take()));
    check("3 heads of V", |text| text["linear_num_value_heads"] = 3.into());
    check("linear_conv_kernel_dim is 0", |text| text["linear_conv_kernel_dim"] = 0.into());
    check("a kernel of 1", |text| text["linear_conv_kernel_dim"] = 1.into());
    check("partial_rotary_factor is 2", |text| text["rope_parameters"]["partial_rotary_factor"] = 2.into());
}

/// Makes the model one as Gemma 4's small ones: its last two layers use the KV of others.
fn gemma4(config: &mut Json, _: &mut Json) {
    let mut text = config.take();
    text.as_object_mut().unwrap().remove("rope_theta");
    for (key, value) in [
        ("num_hidden_layers", json!(5)),
        ("head_dim", json!(4)),
        ("global_head_dim", json!(8)),
        ("num_global_key_value_heads", Json::Null),
        ("num_kv_shared_layers", json!(2)),
        ("sliding_window", json!(16)),
        ("final_logit_softcapping", json!(30.0)),
        ("use_bidirectional_attention", json!("vision")),
        ("attention_k_eq_v", json!(false)),
    ] {
        text[key] = value;
    }
    let [windowed, full] = ["sliding_attention", "full_attention"];
    text["layer_types"] = json!([windowed, windowed, full, windowed, full]);
    text["rope_parameters"] = json!({
        full: { "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25 },
        windowed: { "rope_type": "default", "rope_theta": 1e4 },
    });
    *config = json!({ "model_type": "gemma4", "text_config": text, "vision_config": {}, "vocab_size": 6 });
}

#[test]
fn gemma_4s_two_kinds_of_layers_are_described_as_in_a_file() {
    let small = folder(gemma4);
    let model = ModelFolder::open(small.path()).unwrap();
    assert_eq!((model.header.architecture(), model.pairing), (Some("gemma4"), RopePairing::HalfSplit));
    let full = SectionLayers { window: None, n_kv_heads: 1, head_size: 8, layers: vec![2] };
    let windowed = SectionLayers { window: Some(16), n_kv_heads: 1, head_size: 4, layers: vec![0, 1] };
    assert_eq!(model.sections(), [full.clone(), windowed.clone()]);
    assert_eq!((model.window(), model.header.sliding_window()), (None, Some(16)));
    // Three layers of five keep KV.
    assert_eq!(model.header.kv_bytes_per_token(CacheTypes::default()), Some(2 * 2 * (8 + 4 + 4)));
    assert_eq!((model.rope().base, model.rope().windowed_base), (1e6, 1e4));

    // As the large ones: V is made of K where no window is, with fewer heads there, and all layers keep KV.
    let large = folder(|config, tokenizer| {
        gemma4(config, tokenizer);
        let text = &mut config["text_config"];
        text["num_key_value_heads"] = 2.into();
        text["num_global_key_value_heads"] = 1.into();
        text["attention_k_eq_v"] = true.into();
        text["num_kv_shared_layers"] = 0.into();
        *config = text.take();
        config["model_type"] = "gemma4_text".into();
    });
    let model = ModelFolder::open(large.path()).unwrap();
    let full = SectionLayers { layers: vec![2, 4], ..full };
    let windowed = SectionLayers { n_kv_heads: 2, layers: vec![0, 1, 3], ..windowed };
    assert_eq!(model.sections(), [full, windowed]);
    assert_eq!(model.header.kv_bytes_per_token(CacheTypes::default()), Some(2 * 2 * (2 * 8 + 3 * 2 * 4)));
    let weights = |change: &dyn Fn(&mut Json)| {
        let folder = folder(|config, tokenizer| {
            gemma4(config, tokenizer);
            change(&mut config["text_config"]);
        });
        ModelFolder::open(folder.path()).unwrap().fingerprint().unwrap().weights
    };
    let plain = weights(&|_| {});
    assert_ne!(plain, weights(&|text| text["final_logit_softcapping"] = 20.0.into()));
    assert_ne!(plain, weights(&|text| text["num_kv_shared_layers"] = 1.into()));
}

#[test]
fn a_gemma_4_that_would_be_computed_wrongly_is_refused() {
    let check = |expected: &str, change: &dyn Fn(&mut Json)| {
        let error = refusal(|config, tokenizer| {
            gemma4(config, tokenizer);
            change(&mut config["text_config"]);
        });
        assert!(error.contains(expected), "{error}");
    };
    check("names no layer_types", &|text| text["layer_types"] = Json::Null);
    check("lists 1 of 5 layers", &|text| text["layer_types"] = json!(["full_attention"]));
    check("of the type \"chunked_attention\"", &|text| text["layer_types"][0] = "chunked_attention".into());
    check("names no global_head_dim", &|text| text["global_head_dim"] = Json::Null);
    check("global_head_dim is 0", &|text| text["global_head_dim"] = 0.into());
    check("7 elements of a global head", &|text| text["global_head_dim"] = 7.into());
    check("3 global KV heads", &|text| {
        text["attention_k_eq_v"] = true.into();
        text["num_global_key_value_heads"] = 3.into();
    });
    check("names no num_kv_shared_layers", &|text| text["num_kv_shared_layers"] = Json::Null);
    check("5 of 5 layers use the KV", &|text| text["num_kv_shared_layers"] = 5.into());
    check("find none of their kind", &|text| text["num_kv_shared_layers"] = 3.into());
    check("num_kv_shared_layers", &|text| text["num_kv_shared_layers"] = u64::MAX.into());
    check("names no sliding_window", &|text| text["sliding_window"] = Json::Null);
    check("names no final_logit_softcapping", &|text| text["final_logit_softcapping"] = Json::Null);
    check("final_logit_softcapping is 0", &|text| text["final_logit_softcapping"] = 0.into());
    check("use_bidirectional_attention", &|text| text["use_bidirectional_attention"] = "all".into());
    check("rope_parameters", &|text| text["rope_parameters"] = json!({ "rope_type": "default" }));
    check("not proportional", &|text| text["rope_parameters"]["full_attention"]["rope_type"] = "default".into());
    check("has a factor", &|text| text["rope_parameters"]["full_attention"]["factor"] = 8.0.into());
    check("partial_rotary_factor is", &|text| {
        text["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 0.into();
    });
    check("a part of the heads", &|text| {
        text["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = 0.5.into();
    });
    check("name no rope_theta", &|text| text["rope_parameters"]["full_attention"]["rope_theta"] = Json::Null);
}

#[test]
fn a_text_becomes_gemmas_pieces() {
    use tokio_util::sync::CancellationToken;

    use crate::vocabulary::{FileTokenizer, FileVocabulary, TextTokenizer};

    let folder = folder(gemma);
    let vocabulary = FileVocabulary::of_folder(&ModelFolder::open(folder.path()).unwrap()).unwrap();
    assert_eq!(vocabulary.table().piece(4), b" a");
    assert_eq!(vocabulary.table().piece(2), [0xC3]);
    let tokenizer = FileTokenizer::new(vocabulary).unwrap();
    let tokens = |text: &str| tokenizer.tokenize(text, false, false, &CancellationToken::new()).unwrap();
    assert_eq!(tokens(" aab"), [4, 5], "a space and a are merged first");
    assert_eq!(tokens("aab  é"), [6, 1, 2, 3], "two spaces are a token, and é its bytes");
    assert_eq!(tokens("z"), [0]);
}

/// llama.cpp's converter gives these tokens other types than Gemma 3's.
#[test]
fn a_text_becomes_gemma_4s_pieces() {
    use tokio_util::sync::CancellationToken;

    use crate::vocabulary::{FileTokenizer, FileVocabulary, TextTokenizer};

    let folder = folder(|config, tokenizer| {
        gemma4(config, tokenizer);
        let mut of_gemma3 = json!({});
        gemma(&mut of_gemma3, tokenizer);
        config["text_config"]["vocab_size"] = 14.into();
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        *added.last_mut().unwrap() = json!({ "id": 12, "content": "<|channel>", "special": true });
        added.push(json!({ "id": 13, "content": "<bos>", "special": true }));
    });
    let model = ModelFolder::open(folder.path()).unwrap();
    assert_eq!(model.header.str("tokenizer.ggml.model"), Some("gemma4"));
    assert_eq!(model.types, [3, 1, 6, 6, 1, 1, 1, 1, 1, 1, 6, 1, 4, 3]);
    assert_eq!(model.spellings[1], "\u{2581}\u{2581}");
    let tokenizer = FileTokenizer::new(FileVocabulary::of_folder(&model).unwrap()).unwrap();
    let tokens = |text: &str| tokenizer.tokenize(text, false, false, &CancellationToken::new()).unwrap();
    assert_eq!(tokens(" aab"), [4, 5], "a space and a are merged first");
    assert_eq!(tokens("aab  \u{e9}"), [6, 1, 2, 3], "two spaces are a token, and \u{e9} its bytes");
    assert_eq!(tokens("a<|channel>\n"), [8, 12, 10]);
}

#[test]
fn a_gemma_that_would_be_computed_wrongly_is_refused() {
    let check = |part: &str, change: &dyn Fn(&mut Json, &mut Json)| {
        let error = refusal(|config, tokenizer| {
            gemma(config, tokenizer);
            change(config, tokenizer);
        });
        assert!(error.contains(part), "{error}");
    };
    check("names no sliding_window", &|config, _| config["sliding_window"] = Json::Null);
    check("layer_types", &|config, _| config["layer_types"][3] = "full_attention".into());
    check("layer_types", &|config, _| config["sliding_window_pattern"] = 4.into());
    check("sliding_window_pattern is 0", &|config, _| config["sliding_window_pattern"] = 0.into());
    check("sliding_window_pattern", &|config, _| config["sliding_window_pattern"] = 5.into());
    check("softcapping", &|config, _| config["final_logit_softcapping"] = 30.0.into());
    check("use_bidirectional_attention", &|config, _| config["use_bidirectional_attention"] = true.into());
    check("contradict", &|config, _| {
        config["rope_local_base_freq"] = 1e4.into();
        config["rope_parameters"] = json!({ "sliding_attention": { "rope_theta": 1e5 } });
    });
    check("scaled in layers with a window", &|config, _| {
        config["rope_parameters"] = json!({ "sliding_attention": { "rope_type": "linear", "factor": 8.0 } });
    });
    check("another order", &|_, tokenizer| tokenizer["model"]["merges"] = json!(["a ab", "a b"]));
    check("makes no token", &|_, tokenizer| tokenizer["model"]["merges"] = json!(["b b"]));
    check("are not Gemma's", &|_, tokenizer| tokenizer["normalizer"] = json!({ "type": "Prepend" }));
}

#[test]
fn what_would_be_computed_or_tokenized_wrongly_is_refused() {
    let check = |part: &str, change: &dyn Fn(&mut Json, &mut Json)| {
        let error = refusal(change);
        assert!(error.contains(part), "{error}");
    };
    check("its model_type is \"mamba\"", &|config, _| config["model_type"] = "mamba".into());
    check("model_file", &|config, _| config["model_file"] = "own.py".into());
    check("layer_types", &|config, _| config["layer_types"] = json!(["sliding_attention", "full_attention"]));
    check("a base of RoPE is -1", &|config, _| config["rope_theta"] = (-1).into());
    check("vocab_size is", &|config, _| config["vocab_size"] = (1 << 21).into());
    check("contradict", &|config, _| config["rope_parameters"] = json!({ "rope_theta": 1e6 }));
    check("rope_traditional", &|config, _| config["rope_traditional"] = true.into());
    check("num_hidden_layers is 9999999", &|config, _| config["num_hidden_layers"] = 9_999_999.into());
    check("KV heads", &|config, _| config["num_key_value_heads"] = 3.into());
    check("kind \"Unigram\"", &|_, tokenizer| tokenizer["model"]["type"] = "Unigram".into());
    check("are not Gemma's", &|_, tokenizer| tokenizer["model"]["byte_fallback"] = true.into());
    check("a prefix of subwords", &|_, tokenizer| tokenizer["model"]["continuing_subword_prefix"] = "##".into());
    check("pre_tokenizer", &|_, tokenizer| tokenizer["pre_tokenizer"] = Json::Null);
    check("pre_tokenizer", &|_, tokenizer| tokenizer["pre_tokenizer"]["add_prefix_space"] = true.into());
    check("changes texts", &|_, tokenizer| tokenizer["normalizer"] = json!({ "type": "Lowercase" }));
    check("is not one of 6", &|_, tokenizer| tokenizer["model"]["vocab"]["c"] = 6.into());
}

#[test]
fn damaged_and_missing_files_are_named() {
    let error = |change: &dyn Fn(&Path)| {
        let folder = folder(|_, _| {});
        change(folder.path());
        ModelFolder::open(folder.path()).err().expect("it is refused").to_string()
    };
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let error = error(&|folder| fs::remove_file(folder.join(name)).unwrap());
        assert!(error.contains("lacks") && error.contains(name), "{error}");
    }
    let weights =
        |bytes: &'static [u8]| move |folder: &Path| fs::write(folder.join("model.safetensors"), bytes).unwrap();
    for bytes in [&b"\xff\xff\xff\xff\xff\xff\xff\xff{}"[..], b"\x03\0\0\0\0\0\0\0{}"] {
        assert!(error(&weights(bytes)).contains("is damaged"));
    }
    assert!(error(&weights(b"\x02\0\0\0\0\0\0\0{")).contains("is damaged"));
    assert!(error(&weights(b"\x02\0\0\0\0\0\0\0{]")).contains("cannot be understood"));
    let twice = error(&|folder| write_weights(folder, "model-2.safetensors", "BF16", 1));
    assert!(twice.contains("is there twice"), "{twice}");
    let short = error(&|folder| write_weights(folder, "model.safetensors", "F32", 1));
    assert!(short.contains("0..16 for the shape [2, 4]"), "{short}");
    assert!(matches!(ModelFolder::open("/nowhere"), Err(FolderError::NoFolder { .. })));
}

#[test]
fn a_header_or_an_index_cannot_become_more_than_its_bytes() {
    let tensor = r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#;
    let refused = |name: &str, before: &str, repeated: &str, after: &str| {
        let folder = folder(|_, _| {});
        let n = (4 << 20) / repeated.len();
        let text = format!("{before}{}{after}", repeated.repeat(n));
        let length = (text.len() as u64).to_le_bytes();
        let length = if name == "model.safetensors" { &length[..] } else { &[] };
        fs::write(folder.path().join(name), [length, text.as_bytes(), &[0; 4]].concat()).unwrap();
        let error = ModelFolder::open(folder.path()).err().expect("it is refused").to_string();
        assert!(!error.contains('\n') && error.len() < 1_000, "{} bytes: {}", error.len(), &error[..100]);
        error
    };
    let metadata_then = format!(r#"[]],"a":{tensor},"a":{tensor}}}"#);
    let tensor_of_long_name = format!(r#"":{tensor}}}"#);
    for (before, repeated, after, reason) in [
        (r#"{"a":{"dtype":""#, "x", r#"","shape":[],"data_offsets":[0,4]}}"#, "unknown variant"),
        (r#"{"a":{"dtype":"F32","shape":["#, "1,", r#"1],"data_offsets":[0,4]}}"#, "more than 8 dimensions"),
        (r#"{"a":{"dtype":"F32","shape":[],"data_offsets":["#, "0,", "0]}}", "cannot be understood"),
        (r#"{""#, "\u{1b}[2J", r#"":1}"#, "control character"),
        (r#"{""#, "x", &tensor_of_long_name, "a name of 4194304 bytes"),
        (r#"{"a":["#, "[],", "[]]}", "cannot be understood"),
        (r#"{"__metadata__":["#, "[],", &metadata_then, "is there twice"),
    ] {
        let error = refused("model.safetensors", before, repeated, after);
        assert!(error.contains(reason), "{reason:?} in {error}");
    }
    let error = refused("model.safetensors.index.json", r#"{"weight_map":{"a":""#, "x", r#""}}"#);
    assert!(error.contains("a name of 4194304 bytes"), "{error}");
}

#[test]
fn a_tree_of_values_has_a_limit() {
    let folder = folder(|_, _| {});
    fs::write(folder.path().join("tokenizer.json"), format!("{{\"normalizer\":[{}0]}}", "0,".repeat(6 << 20))).unwrap();
    let error = ModelFolder::open(folder.path()).err().expect("it is refused").to_string();
    assert!(error.contains("more than 6291456 values"), "{error}");
}

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// A model in two files with an index.
fn sharded() -> TempDir {
    let folder = folder(|_, _| {});
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    SHARDS.iter().zip(["a", "b"]).for_each(|(shard, tensor)| write_tensor(folder.path(), shard, tensor, "BF16", 1));
    let index = json!({ "metadata": { "total_size": 32 }, "weight_map": { "a": SHARDS[0], "b": SHARDS[1] } });
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

#[test]
fn a_folder_is_all_of_its_files_and_their_index() {
    let whole = sharded();
    let model = ModelFolder::open(whole.path()).unwrap();
    let sizes = SHARDS.map(|shard| fs::metadata(whole.path().join(shard)).unwrap().len());
    assert_eq!(model.header.files.n_bytes(), sizes.iter().sum::<u64>());
    let weights = model.fingerprint().unwrap().weights;

    let check = |damage: &dyn Fn(&Path), expected: &str| {
        let folder = sharded();
        damage(folder.path());
        let error = ModelFolder::open(folder.path()).err().expect("it is refused").to_string();
        assert!(error.contains(SHARDS[1]) && error.contains(expected) && !error.contains('\n'), "{error}");
    };
    check(&|folder| fs::remove_file(folder.join(SHARDS[1])).unwrap(), "the model folder lacks");
    check(&|folder| write_tensor(folder, SHARDS[1], "c", "BF16", 1), "it lacks the tensor \"b\"");
    let resized = |folder: &Path, more: i64| {
        let mut bytes = fs::read(folder.join(SHARDS[1])).unwrap();
        bytes.resize((bytes.len() as i64 + more) as usize, 1);
        fs::write(folder.join(SHARDS[1]), bytes).unwrap();
    };
    check(&|folder| resized(folder, -1), "bytes, and its header describes");
    check(&|folder| resized(folder, 1), "bytes, and its header describes");
    // Without an index, the names say how many files there are.
    let without_index = |folder: &Path| fs::remove_file(folder.join("model.safetensors.index.json")).unwrap();
    check(
        &|folder| {
            without_index(folder);
            fs::remove_file(folder.join(SHARDS[1])).unwrap();
        },
        "the model folder lacks",
    );

    let other = sharded();
    let path = other.path().join(SHARDS[1]);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() = 2;
    fs::write(path, bytes).unwrap();
    assert_ne!(ModelFolder::open(other.path()).unwrap().fingerprint().unwrap().weights, weights);
}

#[test]
fn an_index_of_other_files_is_ignored_beside_a_model_in_one_file() {
    let folder = folder(|_, _| {});
    let index = json!({ "weight_map": { "a": SHARDS[0], "b": SHARDS[1] } });
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    ModelFolder::open(folder.path()).unwrap();
    let index = json!({ "weight_map": { "gone": "model.safetensors" } });
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(ModelFolder::open(folder.path()).err().unwrap().to_string().contains("it lacks the tensor \"gone\""));
}
