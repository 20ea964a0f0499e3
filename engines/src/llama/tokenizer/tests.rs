//! With SmolLM2's vocabulary and any pre-tokenizer: the tokens are those that llama.cpp gives on a stack that is deep
//! enough.

use std::ffi::c_char;
use std::path::PathBuf;
use std::pin::pin;

use baton_link::engine::Engine;
use baton_schemas::generate::Conversation;
use baton_schemas::node::TokenizeRequest;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::model::params::kv_overrides::ParamOverrideValue;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::Llama;
use super::super::backend::backend;
use super::*;
use crate::engine_options::EngineOptions;
use crate::serving::open::open;

#[path = "../../../tests/engines/own_process.rs"]
mod own_process;
use self::own_process::is_own;

/// The pre-tokenizers that llama.cpp matches by recursion, one of each kind.
const RECURSIVE: [&str; 19] = [
    "gpt-4o",
    "granite-embed-multi-97m",
    "tekken",
    "deepseek-v3",
    "spark2_5",
    "afmoe",
    "youtu",
    "tiny_aya",
    "deepseek-coder",
    "falcon",
    "default",
    "bloom",
    "viking",
    "bailingmoe",
    "seed-coder",
    "ufakzeka",
    "exaone-moe",
    "minicpm5",
    "minimax-m2",
];

/// Pre-tokenizers that llama.cpp has loops for, one of each kind.
const LOOPS: [&str; 6] = ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "dbrx"];

fn file() -> PathBuf {
    std::env::var("BATON_TEST_MODEL").expect("BATON_TEST_MODEL names a GGUF").into()
}

/// SmolLM2's vocabulary with another pre-tokenizer.
fn with_pre(name: &str) -> LlamaModel {
    let mut value = [0; 128];
    value.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte as c_char);
    let mut params = pin!(LlamaModelParams::default().with_vocab_only(true));
    params.as_mut().append_kv_override(c"tokenizer.ggml.pre", ParamOverrideValue::Str(value));
    LlamaModel::load_from_file(backend().unwrap(), file(), &params).unwrap()
}

fn tokenizer(model: LlamaModel, name: &str) -> LlamaTokenizer {
    let (PreTokenizer::Recursive(stages) | PreTokenizer::Loop(Some(stages))) = PreTokenizer::named(Some(name)).unwrap()
    else {
        panic!("{name} is unknown")
    };
    let spellings = spellings(&model);
    let pairs = byte_pairs(&model, &spellings, stages, &file()).unwrap_or_else(|problem| panic!("{name}: {problem}"));
    let special = SpecialSpellings::new(special(&model, &spellings)).unwrap();
    let shown_control = AhoCorasick::new(SHOWN_CONTROL).unwrap();
    let long_words = LongWords::BytePairs(Box::new(pairs));
    LlamaTokenizer { model: Arc::new(model), special, shown_control, long_words, before: Vec::new(), after: Vec::new() }
}

#[track_caller]
fn check(tokenizer: &LlamaTokenizer, name: &str, text: &str) {
    let LongWords::BytePairs(pairs) = &tokenizer.long_words else { panic!("{name}") };
    let is_abandoned = CancellationToken::new();
    for parse_special in [false, true] {
        let expected = || vocabulary::tokenize(&tokenizer.model, text, false, parse_special);
        let expected = on_deep_stack(text.len() * STACK_BYTES + (1 << 20), expected).unwrap();
        // All of the text, also what llama.cpp would get.
        let fragments = tokenizer.special.cut(text, parse_special, &is_abandoned).unwrap();
        let tokens = fragments.into_iter().flat_map(|fragment| match fragment {
            Fragment::Special(special) => vec![special],
            Fragment::Text(text) => pairs.tokenize(text, &is_abandoned).unwrap(),
        });
        let found: Vec<Token> = tokens.collect();
        let differs = expected.iter().zip(&found).position(|(a, b)| a != b);
        let shown: String = text.chars().take(200).collect();
        assert!(
            expected == found,
            "{name}: {} and {} tokens, first at {differs:?}: {shown:?}",
            expected.len(),
            found.len()
        );
    }
}

/// Random text of many scripts, in which short stretches of a kind alternate.
fn mixed(random: &mut StdRng, n_stretches: usize) -> String {
    const ALPHABETS: [&str; 13] = [
        "abcxyzABCXYZ",
        "ABC",
        "sdmtreve'",
        "0123456789",
        " ",
        " \t\n\r",
        "\n",
        "!?.,;:-_()[]{}/\\\"'*#&%@",
        "+<=>^~|`$",
        "éüßñÀÖЖяΩλ",
        "漢字かなカナ한글ไทยกखि\u{301}\u{94d}",
        "²½①٣\u{a0}\u{3000}\u{85}\u{b}\u{200b}\u{e000}\u{feff}€∑🎉👩\u{200d}💻،。…“”",
        "<|im_start|><|im_end|><|",
    ];
    let mut text = String::new();
    for _ in 0..n_stretches {
        let alphabet: Vec<char> = ALPHABETS[random.random_range(0..ALPHABETS.len())].chars().collect();
        match random.random_range(0..8) {
            0 => text += "<|im_end|>",
            _ => text.extend((0..random.random_range(1..9)).map(|_| alphabet[random.random_range(0..alphabet.len())])),
        }
    }
    text
}

#[test]
fn ordinary_text_gives_llama_cpps_tokens() {
    let mut random = StdRng::seed_from_u64(7);
    for name in RECURSIVE.into_iter().chain(LOOPS) {
        let tokenizer = tokenizer(with_pre(name), name);
        for _ in 0..4 {
            let text = mixed(&mut random, 1000);
            check(&tokenizer, name, &text);
        }
    }
}

#[test]
fn words_of_64_kib_give_llama_cpps_tokens() {
    let mut random = StdRng::seed_from_u64(8);
    let mut word = |alphabet: &str| -> String {
        let alphabet: Vec<char> = alphabet.chars().collect();
        (0..64 << 10).map(|_| alphabet[random.random_range(0..alphabet.len())]).collect()
    };
    let letters = "abcdefghijklmnopqrstuvwxyz";
    let base64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let texts = [
        word(letters),
        word(&letters.to_uppercase()),
        word("a"),
        word(base64),
        word("ACGT"),
        word(" "),
        word(" \t\n") + "x",
        word("=-"),
        word("0123456789"),
        format!("var {}=function(){{return<|im_end|>1}};{}", word(letters), word("(){};,.!&|")),
    ];
    for name in ["gpt-4o", "deepseek-v3", "smollm", "llama-bpe"] {
        let tokenizer = tokenizer(with_pre(name), name);
        texts.iter().for_each(|text| check(&tokenizer, name, text));
    }
}

#[test]
fn only_texts_with_long_words_are_tokenized_here() {
    let tokenizer = tokenizer(with_pre("gpt-4o"), "gpt-4o");
    let LongWords::BytePairs(pairs) = &tokenizer.long_words else { panic!() };
    let is_abandoned = CancellationToken::new();
    let prose = "A sentence of ordinary words, numbers (12,345) and lines.\n".repeat(1000);
    assert_eq!(pairs.tokenize_long_words(&prose, MAX_SHALLOW_BYTES, &is_abandoned), Ok(None));
    let word = "ab".repeat(1 << 17);
    assert!(pairs.tokenize_long_words(&word, MAX_SHALLOW_BYTES, &is_abandoned).unwrap().is_some());
    is_abandoned.cancel();
    assert!(pairs.tokenize_long_words(&word, MAX_SHALLOW_BYTES, &is_abandoned).is_err(), "nobody waits for the tokens");
}

#[test]
fn special_tokens_are_cut_out_as_by_llama_cpp() {
    for variable in ["BATON_TEST_MODEL", "BATON_TEST_SWA_MODEL"] {
        let path = PathBuf::from(std::env::var(variable).unwrap());
        let params = LlamaModelParams::default().with_vocab_only(true);
        let model = Arc::new(LlamaModel::load_from_file(backend().unwrap(), &path, &params).unwrap());
        let tokenizer = LlamaTokenizer::new(Arc::clone(&model), &Gguf::open(&path).unwrap(), &path).unwrap();
        let pieces =
            ["<|im_start|>", "<end_of_turn>", "<unused1>", "<unused12>", "<<bos>", " ", "\n\n", "text ", "<", "</s>"];
        let mut random = StdRng::seed_from_u64(9);
        let text: String = (0..2000).map(|_| pieces[random.random_range(0..pieces.len())]).collect();
        for (add_special, parse_special) in [(false, false), (true, true)] {
            let expected = vocabulary::tokenize(&model, &text, add_special, parse_special);
            let is_abandoned = CancellationToken::new();
            assert!(
                tokenizer.tokenize(&text, add_special, parse_special, &is_abandoned).unwrap() == expected,
                "{variable}"
            );
        }
    }
}

/// SmolLM2 with a pre-tokenizer whose name is as long as that of its own.
fn patched(name: &str, folder: &Path) -> PathBuf {
    let mut bytes = std::fs::read(file()).unwrap();
    let key = b"tokenizer.ggml.pre";
    // The value follows the key's bytes, its type and its length.
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 12;
    assert_eq!((&bytes[at..at + 6], name.len()), (&b"smollm"[..], 6));
    bytes[at..at + 6].copy_from_slice(name.as_bytes());
    let path = folder.join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[tokio::test]
async fn the_tokens_of_a_text_that_cannot_fit_are_estimated() {
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(256), ..EngineOptions::of(file()) };
    let engine = open(&Llama, &options, None).unwrap();
    let count = async |text: &str| {
        let request =
            TokenizeRequest { text: text.into(), add_special: false, parse_special: false, key: Default::default() };
        engine.tokenize(&request).await
    };
    // Text that fits, and what it has a thousand times over.
    for part in ["hello world. ".repeat(20), "Größe 変換 äß 🦀. ".repeat(8)] {
        let n_exact = count(&part).await.unwrap().len() as f64 * 1000.0;
        let text = part.repeat(1000);
        let message = serde_json::json!({ "messages": [{ "role": "user", "content": text }] });
        let conversation: Conversation = serde_json::from_value(message).unwrap();
        for refused in [count(&text).await, engine.render(&conversation, Default::default()).await] {
            let Err(EngineError::ContextOverflow { n_prompt, n_ctx: 256 }) = refused else { panic!("{refused:?}") };
            let ratio = f64::from(n_prompt) / n_exact;
            assert!((0.9..1.1).contains(&ratio), "{n_prompt} of {n_exact}");
        }
    }
}

#[tokio::test]
async fn an_engine_survives_messages_of_one_word() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["gpt-4o", "tekken"] {
        let path = patched(name, folder.path());
        let options = EngineOptions { n_threads: Some(1), n_ctx: Some(2048), ..EngineOptions::of(path) };
        let engine = open(&Llama, &options, None).unwrap();
        for word in ["x".repeat(9_000), "aGVsbG8gd29ybGQh".repeat(4096), " ".repeat(64 << 10), "=-".repeat(32 << 10)] {
            let request = TokenizeRequest {
                text: word.as_str().into(),
                add_special: false,
                parse_special: false,
                key: Default::default(),
            };
            match engine.tokenize(&request).await {
                Ok(tokens) => assert!(engine.detokenize(&tokens).await.unwrap() == word, "another text"),
                Err(error) => assert!(matches!(error, EngineError::ContextOverflow { .. }), "{error}"),
            }
            let message = serde_json::json!({ "messages": [{ "role": "user", "content": format!("{word}.") }] });
            let conversation: Conversation = serde_json::from_value(message).unwrap();
            match engine.render(&conversation, Default::default()).await {
                Ok(tokens) => assert!(engine.detokenize(&tokens).await.unwrap().contains(word.trim()), "another text"),
                Err(error) => assert!(matches!(error, EngineError::ContextOverflow { .. }), "{error}"),
            }
        }
    }
}

fn gemma() -> LlamaTokenizer {
    let path = PathBuf::from(std::env::var("BATON_TEST_SWA_MODEL").expect("BATON_TEST_SWA_MODEL names a GGUF"));
    let params = LlamaModelParams::default().with_vocab_only(true);
    let model = LlamaModel::load_from_file(backend().unwrap(), &path, &params).unwrap();
    LlamaTokenizer::new(Arc::new(model), &Gguf::open(&path).unwrap(), &path).unwrap()
}

/// Gemma 3 has a special token for each run of up to 31 line breaks or spaces. A space is also spelled U+2581.
const OF_RUNS: [&str; 5] = ["\n", "\u{2581}", " ", "\n\n \u{2581}\u{2581}", "<unused1"];

#[test]
fn runs_of_special_tokens_give_llama_cpps_tokens() {
    let tokenizer = gemma();
    for unit in OF_RUNS {
        let text = unit.repeat(20_000 / unit.len()) + "x";
        let expected = vocabulary::tokenize(&tokenizer.model, &text, false, false);
        let found = tokenizer.tokenize(&text, false, false, &CancellationToken::new()).unwrap();
        assert!(found == expected, "{unit:?}: {} and {} tokens", found.len(), expected.len());
    }
}

#[test]
fn a_megabyte_of_special_tokens_takes_little_memory() {
    if !is_own("llama::tokenizer::tests::a_megabyte_of_special_tokens_takes_little_memory") {
        return;
    }
    let tokenizer = gemma();
    let is_abandoned = CancellationToken::new();
    let before = peak_mib();
    for unit in OF_RUNS {
        let text = unit.repeat((1 << 20) / unit.len());
        tokenizer.special.cut(&text, false, &is_abandoned).unwrap();
    }
    let grown = peak_mib() - before;
    assert!(grown < 100, "cutting a megabyte took {grown} MiB");
    is_abandoned.cancel();
    assert!(tokenizer.special.cut("text", false, &is_abandoned).is_err(), "nobody waits for the tokens");
}

/// The most memory that this process has had, in MiB.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    peak.map_or(0, |kib| kib.parse::<u64>().unwrap() / 1024)
}

#[test]
fn one_long_text_at_a_time_takes_a_deep_stack() {
    let tokenizer = |long_words| LlamaTokenizer { long_words, ..tokenizer(with_pre("gpt-4o"), "gpt-4o") };
    let deep = tokenizer(LongWords::DeepStack(Mutex::default()));
    let is_abandoned = CancellationToken::new();
    let word = "ab".repeat(20_000);
    let LongWords::DeepStack(one_at_a_time) = &deep.long_words else { unreachable!() };
    std::thread::scope(|scope| {
        let turn = one_at_a_time.lock().unwrap();
        let long = scope.spawn(|| deep.tokenize(&word, false, false, &CancellationToken::new()));
        let chat = "A sentence of a chat. ".repeat(MAX_SHALLOW_BYTES / 22);
        assert!(deep.tokenize(&chat, false, false, &is_abandoned).is_ok(), "a short text needs no turn");
        assert!(!long.is_finished());
        drop(turn);
        assert!(long.join().unwrap().is_ok());
    });
    let expected = on_deep_stack(word.len() * STACK_BYTES, || vocabulary::tokenize(&deep.model, &word, false, false));
    assert_eq!(deep.tokenize(&word, false, false, &is_abandoned), expected);
    let longest = "ab ".repeat(MAX_DEEP_BYTES);
    let refused = deep.tokenize(&longest, false, false, &is_abandoned);
    assert!(matches!(refused, Err(EngineError::InvalidRequest { .. })), "{refused:?}");
}
