use std::fs;
use std::path::Path;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use super::*;
use crate::gguf::window::{self, Window};
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
