//! Reads small GGUF files that the tests write, whole and damaged.

use std::io::Write;

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;
use crate::options::{CacheType, CacheTypes};

/// Writes a GGUF file without any checks, so that it can write invalid ones.
#[derive(Clone, Default)]
struct Draft {
    n_metadata: u64,
    metadata: Vec<u8>,
    n_tensors: u64,
    tensors: Vec<u8>,
    data: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn array(element_type: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    [&element_type.to_le_bytes()[..], &len.to_le_bytes(), elements].concat()
}

impl Draft {
    fn raw(mut self, key: &str, value_type: u32, value: &[u8]) -> Self {
        self.n_metadata += 1;
        self.metadata.extend([&string(key)[..], &value_type.to_le_bytes(), value].concat());
        self
    }

    fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    fn tensor(mut self, name: &str, dims: &[u64], ggml_type: u32, offset: u64) -> Self {
        self.n_tensors += 1;
        self.tensors.extend(string(name));
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        self.tensors.extend(dims.iter().flat_map(|n| n.to_le_bytes()));
        self.tensors.extend(ggml_type.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self
    }

    fn data(mut self, n_bytes: usize) -> Self {
        self.data = vec![7; n_bytes];
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend(self.n_metadata.to_le_bytes());
        out.extend(&self.metadata);
        out.extend(&self.tensors);
        if self.n_tensors > 0 {
            out.resize(out.len().next_multiple_of(32), 0);
        }
        out.extend(&self.data);
        out
    }

    fn open(&self) -> Result<Gguf, GgufError> {
        open(&self.bytes())
    }
}

fn open(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    Gguf::open(file.path())
}

fn tiny_llama() -> Draft {
    Draft::default()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 2048)
        .u32("llama.block_count", 30)
        .u32("llama.embedding_length", 576)
        .u32("llama.attention.head_count", 9)
        .u32("llama.attention.head_count_kv", 3)
        .raw("llama.rope.freq_base", 6, &100_000f32.to_le_bytes())
        .raw("tokenizer.ggml.add_bos_token", 7, &[1])
        .raw("tokenizer.ggml.tokens", 9, &array(8, 2, &[string("a"), string("b")].concat()))
        .text("tokenizer.chat_template", "{{ messages }}")
        .tensor("token_embd.weight", &[64, 2], 8, 0)
        .tensor("output_norm.weight", &[5], 0, 160)
        .data(180)
}

fn malformed(draft: &Draft) -> String {
    match draft.open() {
        Err(GgufError::Malformed { what, .. }) => what,
        other => panic!("expected a malformed file, got {other:?}"),
    }
}

#[test]
fn a_header_cannot_fill_the_memory_with_small_elements() {
    let one = array(0, 4096, &[7; 4096]);
    // 4 MB of file that would take 160 MB of memory.
    let draft = (0..1000).fold(Draft::default(), |draft, i| draft.raw(&format!("a{i}"), 9, &one));
    let gguf = draft.open().unwrap();
    let kept = |i: usize| matches!(gguf.get(&format!("a{i}")), Some(Value::Array(array)) if array.elements.is_some());
    let n_kept = (0..1000).filter(|&i| kept(i)).count();
    assert!(kept(0) && n_kept * 4096 * size_of::<Value>() <= 64 << 20, "{n_kept} arrays are kept");
}

#[test]
fn a_whole_file_is_described() {
    let gguf = tiny_llama().open().unwrap();
    assert_eq!((gguf.version, gguf.files.n_bytes()), (3, tiny_llama().bytes().len() as u64));
    assert_eq!(gguf.architecture(), Some("llama"));
    assert_eq!(gguf.context_length(), Some(2048));
    assert_eq!(gguf.f32("llama.rope.freq_base"), Some(100_000.0));
    assert_eq!(gguf.bool("tokenizer.ggml.add_bos_token"), Some(true));
    assert_eq!(gguf.chat_template(), Some("{{ messages }}"));
    assert_eq!(gguf.tensors[0].size_bytes, Some(136));
    assert_eq!(gguf.tensors[1].dims, [5]);
}

#[test]
fn the_kv_cache_of_smollm2_costs_23040_bytes_a_token() {
    let gguf = tiny_llama().open().unwrap();
    assert_eq!((gguf.head_dim_k(), gguf.head_dim_v()), (Some(64), Some(64)));
    assert_eq!(gguf.kv_bytes_per_token(CacheTypes::default()), Some(23_040));
    assert_eq!(gguf.kv_bytes_per_token(CacheTypes { k: CacheType::Q8_0, v: CacheType::Q8_0 }), Some(12_240));
    assert_eq!(gguf.sliding_window(), None);
}

/// The KV of an 8B model: 128 KiB a token.
fn of_8b(n_ctx_train: u32) -> Gguf {
    let draft = Draft::default().text("general.architecture", "x").u32("x.context_length", n_ctx_train);
    let draft = draft.u32("x.block_count", 32).u32("x.attention.head_count_kv", 8);
    draft.u32("x.attention.key_length", 128).u32("x.attention.value_length", 128).open().unwrap()
}

#[test]
fn the_default_context_follows_the_model_and_the_memory() {
    const DEFAULT: SizeOptions = SizeOptions {
        n_ctx: None,
        n_cells: None,
        n_slots: 4,
        sequences: Sequences { n: 5, n_ubatch: Some(512), n_rollback: 0 },
        cache_types: CacheTypes { k: CacheType::F16, v: CacheType::F16 },
        companions: CompanionMemory::NONE,
    };
    let check = |options: SizeOptions, n_ctx_train: u32, available_gib: u64, expected: (u32, u32)| {
        let sizes = ModelSizes::choose(&of_8b(n_ctx_train), options, available_gib << 30).unwrap();
        assert_eq!((sizes.n_ctx, sizes.n_cells), expected, "{options:?} {n_ctx_train} {available_gib}");
        assert!(sizes.memory_bytes <= available_gib << 30);
    };
    // The cache holds one context, which the slots share. 131,072 tokens take 16 GiB.
    check(DEFAULT, 131_072, 100, (131_072, 131_072));
    check(DEFAULT, 131_072, 60, (65_536, 65_536));
    check(DEFAULT, 131_072, 30, (32_768, 32_768));
    check(DEFAULT, 131_072, 9, (32_768, 32_768));
    check(DEFAULT, 131_072, 8, (16_384, 16_384));
    check(DEFAULT, 131_072, 2, (8_192, 8_192));
    // The training context bounds it, and slots have at least their 4,096 cells.
    check(DEFAULT, 40_960, 100, (40_960, 40_960));
    check(DEFAULT, 40_960, 12, (32_768, 32_768));
    check(DEFAULT, 8_192, 100, (8_192, 16_384));
    check(DEFAULT, 1 << 20, 1_000, (131_072, 131_072));
    check(SizeOptions { n_slots: 16, ..DEFAULT }, 131_072, 40, (65_536, 65_536));
    // Configured cells bound it, too, and a configured context is kept.
    check(SizeOptions { n_cells: Some(20_480), ..DEFAULT }, 131_072, 4, (20_480, 20_480));
    check(SizeOptions { n_ctx: Some(40_000), ..DEFAULT }, 131_072, 6, (40_000, 40_192));
    // A quantized cache holds more: 8.5 bits a value for q8_0, 4.5 for q4_0.
    let quantized = |k, v| SizeOptions { cache_types: CacheTypes { k, v }, ..DEFAULT };
    check(quantized(CacheType::Q8_0, CacheType::Q8_0), 131_072, 5, (32_768, 32_768));
    check(quantized(CacheType::Q8_0, CacheType::Q8_0), 131_072, 36, (131_072, 131_072));
    check(quantized(CacheType::Q4_0, CacheType::Q4_0), 131_072, 20, (131_072, 131_072));
}

#[test]
fn heads_may_differ_by_layer_and_have_their_own_sizes() {
    let heads: Vec<u8> = [4u32, 0, 2].iter().flat_map(|n| n.to_le_bytes()).collect();
    let gguf = Draft::default()
        .text("general.architecture", "x")
        .u32("x.block_count", 3)
        .raw("x.attention.head_count_kv", 9, &array(4, 3, &heads))
        .u32("x.attention.key_length", 192)
        .u32("x.attention.value_length", 128)
        .u32("x.attention.sliding_window", 512)
        .open()
        .unwrap();
    let rows = gguf.kv_shape().unwrap().rows;
    assert_eq!(rows.iter().map(|row| (row.k, row.v)).collect::<Vec<_>>(), [(4 * 192, 4 * 128), (2 * 192, 2 * 128)]);
    assert_eq!(gguf.kv_bytes_per_token(CacheTypes::default()), Some(6 * 320 * 2));
    assert_eq!(gguf.sliding_window(), Some(512));
}

#[test]
fn latent_attention_stores_no_v() {
    let draft = Draft::default()
        .text("general.architecture", "deepseek2")
        .u32("deepseek2.block_count", 2)
        .u32("deepseek2.attention.head_count_kv", 1)
        .u32("deepseek2.attention.key_length", 576)
        .u32("deepseek2.attention.value_length", 512)
        .u32("deepseek2.attention.key_length_mla", 192);
    assert_eq!(draft.open().unwrap().kv_bytes_per_token(CacheTypes::default()), Some(2 * 576 * 2));
}

#[test]
fn an_absurd_layer_count_has_no_kv_shape() {
    let draft = Draft::default().text("general.architecture", "x").raw("x.block_count", 10, &u64::MAX.to_le_bytes());
    assert_eq!(draft.u32("x.attention.head_count", 1).open().unwrap().kv_shape(), None);
}

#[test]
fn the_vocabulary_hash_ignores_order_and_other_metadata() {
    let tokens = |draft: Draft, last: &str| {
        let all = [string("a"), string(last)].concat();
        draft.raw("tokenizer.ggml.tokens", 9, &array(8, 2, &all))
    };
    let types = |draft: Draft, last: u32| {
        let all = [1u32.to_le_bytes(), last.to_le_bytes()].concat();
        draft.raw("tokenizer.ggml.token_type", 9, &array(5, 2, &all))
    };
    let a = types(tokens(Draft::default().text("general.name", "x"), "b"), 3);
    let b = tokens(types(Draft::default().text("tokenizer.ggml.pre", "y"), 3), "b");
    let hash = |draft: &Draft| draft.open().unwrap().vocabulary_hash();
    assert_eq!(hash(&a), hash(&b));
    assert_ne!(hash(&a), hash(&types(tokens(Draft::default(), "c"), 3)));
    assert_ne!(hash(&a), hash(&types(tokens(Draft::default(), "b"), 1)));
    // The same vocabulary outside of a GGUF file.
    let described =
        Gguf::described(Default::default(), Vec::new(), ModelFiles::default(), &["a".into(), "b".into()], &[1, 3]);
    assert_eq!(hash(&a), described.vocabulary_hash());
}

#[test]
fn one_changed_token_changes_the_vocabulary_hash() {
    let tokens = |last: &str| {
        let all: Vec<u8> = (0..5000).flat_map(|i| string(&format!("t{i}"))).chain(string(last)).collect();
        Draft::default().raw("tokenizer.ggml.tokens", 9, &array(8, 5001, &all)).open().unwrap()
    };
    assert_eq!(tokens("x").vocabulary_hash(), tokens("x").vocabulary_hash());
    assert_ne!(tokens("x").vocabulary_hash(), tokens("y").vocabulary_hash());
    let Some(Value::Array(array)) = tokens("x").get("tokenizer.ggml.tokens").cloned() else { panic!() };
    assert_eq!((array.element_type, array.len, array.elements), (8, 5001, None));
}

#[test]
fn a_corrected_template_does_not_change_the_vocabulary_hash() {
    let model = |template| Draft::default().text("tokenizer.chat_template", template).open();
    let old = model("old").unwrap();
    let new = model("new").unwrap();
    assert_eq!(old.vocabulary_hash(), new.vocabulary_hash());
}

#[test]
fn every_scalar_type_is_read() {
    let gguf = Draft::default()
        .raw("u8", 0, &[255])
        .raw("i8", 1, &[255])
        .raw("u16", 2, &[255; 2])
        .raw("i16", 3, &[255; 2])
        .raw("i32", 5, &[255; 4])
        .raw("u64", 10, &[255; 8])
        .raw("i64", 11, &[255; 8])
        .raw("f64", 12, &0.5f64.to_le_bytes())
        .open()
        .unwrap();
    assert_eq!(gguf.u64("u8"), Some(255));
    assert_eq!(gguf.u64("u16"), Some(65_535));
    assert_eq!(gguf.u64("u64"), Some(u64::MAX));
    assert_eq!(gguf.f32("f64"), Some(0.5));
    for key in ["i8", "i16", "i32", "i64"] {
        assert_eq!((gguf.get(key), gguf.u64(key)), (Some(&Value::Signed(-1)), None));
    }
}

#[test]
fn nested_arrays_are_skipped_and_bounded() {
    let nest = |depth: usize| (0..depth).fold(array(0, 1, &[9]), |inner, _| array(9, 1, &inner));
    let gguf = Draft::default().raw("nested", 9, &nest(3)).text("after", "it").open().unwrap();
    assert_eq!(gguf.str("after"), Some("it"));
    assert!(malformed(&Draft::default().raw("nested", 9, &nest(100_000))).contains("nested"));
}

#[test]
fn long_strings_are_skipped() {
    let gguf = Draft::default().text("long", &"x".repeat((1 << 20) + 1)).text("after", "it").open().unwrap();
    assert_eq!(gguf.get("long"), Some(&Value::LongString { n_bytes: (1 << 20) + 1 }));
    assert_eq!(gguf.str("after"), Some("it"));
}

#[test]
fn absurd_lengths_are_refused_before_anything_is_allocated() {
    let huge = (1u64 << 63).to_le_bytes();
    assert!(malformed(&Draft::default().raw("s", 8, &huge)).contains("9223372036854775808 bytes"));
    assert!(malformed(&Draft::default().raw("a", 9, &array(4, u64::MAX, &[]))).contains("array elements"));
    assert!(malformed(&Draft { n_metadata: u64::MAX, ..Draft::default() }).contains("metadata entries"));
    assert!(malformed(&Draft { n_tensors: u64::MAX, ..Draft::default() }).contains("tensors"));
    assert!(malformed(&Draft::default().tensor("t", &[u64::MAX, u64::MAX], 0, 0)).contains("shape"));
    assert!(malformed(&Draft::default().tensor("t", &[1; 5], 0, 0)).contains("5 dimensions"));
    assert!(malformed(&Draft::default().tensor("t", &[1], 0, u64::MAX - 31)).contains("2^64"));
    // Within the format's limit, but more than the file holds.
    let arrays = [array(4, 1 << 30, &[]), array(8, 1 << 30, &[]), array(4, 4096, &[])];
    for value in arrays {
        assert!(matches!(Draft::default().raw("a", 9, &value).open(), Err(GgufError::Truncated { .. })));
    }
}

#[test]
fn contradictions_are_refused() {
    assert!(malformed(&Draft::default().text("k", "1").text("k", "2")).contains("twice"));
    assert!(malformed(&Draft::default().raw("k", 13, &[])).contains("unknown type 13"));
    assert!(malformed(&Draft::default().raw("k", 7, &[2])).contains("boolean"));
    assert!(malformed(&Draft::default().u32("general.alignment", 0)).contains("power of two"));
    assert!(malformed(&Draft::default().u32("general.alignment", 24)).contains("power of two"));
    assert!(malformed(&Draft::default().tensor("t", &[31], 8, 0)).contains("shape"));
    assert!(malformed(&Draft::default().tensor("t", &[32], 8, 8)).contains("aligned"));
}

#[test]
fn a_file_that_misses_its_last_byte_is_cut_short() {
    let whole = tiny_llama().bytes();
    match open(&whole[..whole.len() - 1]) {
        Err(GgufError::Truncated { expected_bytes, found_bytes, .. }) => {
            assert_eq!((expected_bytes, found_bytes), (whole.len() as u64, whole.len() as u64 - 1));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tensor_of_an_unknown_type_has_no_length_to_check() {
    assert_eq!(Draft::default().tensor("t", &[1 << 40], 9999, 0).open().unwrap().tensors[0].size_bytes, None);
}

#[test]
fn other_files_have_their_own_errors() {
    assert!(matches!(open(b""), Err(GgufError::NotGguf { .. })));
    assert!(matches!(open(b"GGML\x03\0\0\0"), Err(GgufError::NotGguf { .. })));
    assert!(matches!(open(b"GGUF\x01\0\0\0"), Err(GgufError::UnsupportedVersion { version: 1, .. })));
    assert!(matches!(open(b"GGUF\0\0\0\x03"), Err(GgufError::UnsupportedVersion { .. })));
    assert!(matches!(Gguf::open("/nowhere/at/all.gguf"), Err(GgufError::NotFound { .. })));
    assert!(matches!(Gguf::open("/"), Err(GgufError::Unreadable { .. })));
}

#[test]
fn messages_are_one_line() {
    let whole = tiny_llama().bytes();
    for bytes in [&b"?"[..], b"GGUF\x01\0\0\0", &whole[..100]] {
        let message = open(bytes).unwrap_err().to_string();
        assert!(!message.contains('\n') && message.contains("tmp"), "{message}");
    }
}

proptest! {
    #[test]
    fn every_cut_is_an_error(cut in 0..tiny_llama().bytes().len()) {
        prop_assert!(open(&tiny_llama().bytes()[..cut]).is_err());
    }

    #[test]
    fn no_flipped_byte_panics(at in 0..tiny_llama().bytes().len(), byte: u8) {
        let mut bytes = tiny_llama().bytes();
        bytes[at] = byte;
        if let Ok(gguf) = open(&bytes) {
            let _ = (gguf.kv_bytes_per_token(CacheTypes::default()), gguf.context_length(), gguf.vocabulary_hash());
        }
    }
}

/// The weights hash of a file with one tensor of so many bytes, all of them 7 except those that `change` sets.
fn weights_hash(draft: &Draft, n_bytes: usize, change: impl Fn(&mut [u8])) -> blake3::Hash {
    let mut bytes = draft.clone().tensor("w", &[n_bytes as u64], 24, 0).data(n_bytes).bytes();
    let start = bytes.len() - n_bytes;
    change(&mut bytes[start..]);
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    Gguf::open(file.path()).unwrap().weights_hash().unwrap()
}

#[test]
fn samples_of_each_tensor_distinguish_weights() {
    let llama = Draft::default().text("general.architecture", "llama");
    let plain = weights_hash(&llama, 10_000, |_| ());
    assert_eq!(weights_hash(&llama.clone().text("general.name", "another"), 10_000, |_| ()), plain);
    for place in [0, 4095, 10_000 - 4096, 9_999] {
        assert_ne!(weights_hash(&llama, 10_000, |data| data[place] = 8), plain, "byte {place}");
    }
    // As documented: what is between two samples is not read.
    assert_eq!(weights_hash(&llama, 10_000, |data| data[5_000] = 8), plain);
}

#[test]
fn a_part_that_was_never_written_is_seen_wherever_it_is() {
    let llama = Draft::default().text("general.architecture", "llama");
    let (n_bytes, n_lost) = (1_000_000, 72 << 10);
    let plain = weights_hash(&llama, n_bytes, |_| ());
    for start in (0..=n_bytes - n_lost).step_by(50_000) {
        let broken = weights_hash(&llama, n_bytes, |data| data[start..start + n_lost].fill(0));
        assert_ne!(broken, plain, "{n_lost} bytes lost at {start}");
    }
}

#[test]
fn a_file_that_shrinks_after_its_header_was_read_has_no_weights_hash() {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&Draft::default().tensor("w", &[64], 24, 0).data(64).bytes()).unwrap();
    let gguf = Gguf::open(file.path()).unwrap();
    file.as_file().set_len(70).unwrap();
    assert!(matches!(gguf.weights_hash(), Err(GgufError::Unreadable { .. })));
}

#[test]
fn the_rotation_of_keys_follows_from_the_file() {
    use baton_schemas::kv::{Dtype, KvLayout, LayerShape, RopePairing, Rows, Section};

    use crate::options::{RopeOptions, RopeScaling};

    let rows = Rows { dtype: Dtype::F16, n_values: 192 };
    let layers = vec![LayerShape { k: rows, v: Some(rows) }];
    let section = |window| Section { window, n_rot: [0; 2], tokens_per_row: 1, layers: layers.clone() };
    let layout = |rope| KvLayout { rope, sections: vec![section(None), section(Some(512))], states: Vec::new() };
    let rotation = |draft: &Draft, options: RopeOptions, rope| {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(&draft.bytes()).unwrap();
        let gguf = Gguf::open(file.path()).unwrap();
        gguf.key_rotation(options, &layout(rope)).map_err(|e| e.to_string())
    };
    let plain = RopeOptions::default();
    let frequencies = |draft: &Draft, options| {
        let rotation = rotation(draft, options, RopePairing::Interleaved).unwrap();
        rotation.sections.into_iter().map(|section| section.unwrap().frequencies).collect::<Vec<_>>()
    };
    let base = |base: f64| (0..32).map(|i| base.powf(-f64::from(i) / 32.0)).collect::<Vec<_>>();
    assert_eq!(frequencies(&tiny_llama(), plain), [base(1e5), base(1e5)]);
    let changed = RopeOptions { freq_base: Some(5e4), freq_scale: Some(0.5), ..plain };
    let halved: Vec<f64> = base(5e4).iter().map(|f| f * 0.5).collect();
    assert_eq!(frequencies(&tiny_llama(), changed), [halved, base(5e4)], "layers with a window are not scaled");
    // A part of each head, and factors.
    let factors: Vec<u8> = [1f32, 8.0].iter().flat_map(|factor| factor.to_le_bytes()).collect();
    let partial = tiny_llama().u32("llama.rope.dimension_count", 4).tensor("rope_freqs.weight", &[2], 0, 192).data(192);
    let mut partial = partial;
    partial.data.extend(&factors);
    assert_eq!(frequencies(&partial, plain)[0], [1.0, 1e5f64.powf(-0.5) / 8.0]);
    for (draft, options, rope) in [
        (tiny_llama(), plain, RopePairing::None),
        (tiny_llama(), RopeOptions { scaling: Some(RopeScaling::Yarn), ..plain }, RopePairing::HalfSplit),
        (tiny_llama().text("llama.rope.scaling.type", "yarn"), plain, RopePairing::HalfSplit),
        (tiny_llama().u32("llama.attention.key_length", 80), plain, RopePairing::HalfSplit),
        (tiny_llama().u32("llama.attention.key_length_mla", 64), plain, RopePairing::HalfSplit),
    ] {
        assert!(rotation(&draft, options, rope).is_err());
    }
}
