"""A model's hashes and layout. That they equal those of Baton's other engines is shown with the real model (`make vllm`)."""

import json
import struct

import pytest

from baton_vllm import identity
from baton_vllm.errors import Unsupported

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 6,
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<|end|>": 2}},
    "added_tokens": [{"id": 3, "content": "<s>", "special": True}, {"id": 4, "content": "x\u2581y", "special": False}],
}


def folder(path, weights=b"12345678", tokenizer=TOKENIZER, **config):
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, len(weights)]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return path


def test_tokens_have_llama_cpps_types():
    tokens = identity.tokens_of(TOKENIZER, 6)
    assert tokens == [("a", 1), ("b", 1), ("<|end|>", 1), ("<s>", 3), ("x y", 4), ("[PAD5]", 5)]
    added = {**TOKENIZER, "added_tokens": [{"id": 2, "content": "<|end|>", "special": False}]}
    assert identity.tokens_of(added, 3)[2] == ("<|end|>", 3), "llama.cpp makes such spellings control tokens"


def test_the_vocabularys_hash_depends_on_spellings_types_and_order():
    base = identity.vocabulary_hash([("ab", 1), ("c", 1)])
    # Pinned: nodes of other versions compare it.
    assert base == "e8d6b46fc23d44db96a670de14d014556b22d2cb98c96274f57a9fc1443fd4eb"
    others = [[("a", 1), ("bc", 1)], [("c", 1), ("ab", 1)], [("ab", 1), ("c", 3)], [("ab", 1)]]
    assert len({base, *map(identity.vocabulary_hash, others)}) == 5


def test_the_weights_hash_depends_on_values_and_options(tmp_path):
    def weights(changes, **files):
        return identity.of_folder(folder(tmp_path, **files), "f16", changes)[2]["weights"]

    plain = weights({})
    assert plain == weights({})
    assert len({plain, weights({"quantization": "fp8"}), weights({}, weights=b"1234567x"), weights({}, rope_theta=5)}) == 4


HYBRID = {
    **CONFIG,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def test_a_hybrids_layout_has_the_states_between_its_rows():
    layout = identity.layout_of(identity.of_text(HYBRID), "f16")
    assert (layout.rope, layout.n_layers, layout.n_values) == ("multi_axis", 2, 16)
    # 2 heads of Q, 2 of K and 4 of V, of which the convolution keeps 3 inputs.
    assert [(one.n_convolution, one.n_recurrence, one.n_before) for one in layout.linear] == [
        (8 * 16 * 3, 4 * 16 * 16, n_before) for n_before in (0, 1, 2)]
    assert layout.state_bytes == 3 * 4 * (384 + 1024)
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
    assert identity.layout_of(identity.of_text({**HYBRID, "layer_types": kinds}), "f16") == layout
    with_images = {"model_type": "qwen3_5", "vision_config": {}, "text_config": HYBRID}
    assert identity.layout_of(identity.of_text(with_images), "f16") == layout


WINDOWED = {**CONFIG, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64}


def test_layers_with_a_window_are_known():
    def window(**more):
        return identity.layout_of(identity.of_text({**WINDOWED, **more}), "f16").window

    assert (window().n_positions, window().layers) == (64, (0, 1, 2, 3, 4, 6))
    assert window(sliding_window_pattern=2).layers == (0, 2, 4, 6)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    assert window(layer_types=kinds).layers == (0, 1, 3, 4, 6)


@pytest.mark.parametrize(
    "config",
    [
        {"sliding_window": None},
        {"sliding_window_pattern": 8},
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 6},
        {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"] * 3},
        {"use_bidirectional_attention": True},
    ],
    ids=str,
)
def test_windows_that_llama_cpp_has_otherwise_are_refused(config):
    with pytest.raises(Unsupported):
        identity.layout_of(identity.of_text({**WINDOWED, **config}), "f16")


def test_gemmas_tokens_have_llama_cpps_types():
    pieces = {"type": "BPE", "byte_fallback": True, "vocab": {"<bos>": 0, "<0x0A>": 1, "\u2581the": 2, "<0xZZ>": 3}}
    added = [{"id": 0, "content": "<bos>", "special": True}, {"id": 9, "content": "<image_soft_token>", "special": True}]
    tokens = identity.tokens_of({"model": pieces, "added_tokens": added}, 4, "gemma3")
    assert tokens == [("<bos>", 3), ("<0x0A>", 6), ("\u2581the", 1), ("<0xZZ>", 1)]
    with pytest.raises(Unsupported):
        identity.tokens_of({"model": pieces}, 4, "llama")


@pytest.mark.parametrize("config, name", [(CONFIG, "kv"), (HYBRID, "kv_2")])
def test_nodes_that_know_no_states_do_not_see_a_layout_with_some(config, name, tmp_path):
    limits = {"n_ctx": 8, "n_slots": 1, "kv_bytes": 9}
    text = identity.of_text(config)
    layout = identity.layout_of(text, "f16")
    described = identity.describe(folder(tmp_path), text, layout, {}, [1], limits, [])
    assert {key: described[key]["layout"] for key in described if key.startswith("kv")} == {name: layout.json()}


MAMBA = {
    **CONFIG,
    "model_type": "nemotron_h",
    "head_dim": 16,
    "hybrid_override_pattern": "MM*-M*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
}


def test_a_layout_of_mamba_counts_the_layers_that_keep_something():
    layout = identity.layout_of(MAMBA, "f16")
    assert (layout.rope, layout.n_layers, layout.n_values) == ("none", 2, 32)
    assert [(one.n_convolution, one.n_recurrence, one.n_before) for one in layout.linear] == [
        (3 * (128 + 2 * 128), 8 * 16 * 64, n_before) for n_before in (0, 0, 1)]
    words = ["mamba", "mamba", "attention", "mlp", "mamba", "attention", "moe"]
    assert identity.layout_of({**MAMBA, "hybrid_override_pattern": None, "layers_block_type": words}, "f16") == layout
    for wrong in ({"hybrid_override_pattern": "MX*"}, {"hybrid_override_pattern": "MM-"}, {"n_groups": 3}, {"conv_kernel": 1}):
        with pytest.raises(Unsupported):
            identity.layout_of({**MAMBA, **wrong}, "f16")


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["linear_attention"] * 5},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"full_attention_interval": 6},
        {"linear_num_key_heads": None},
        {"linear_num_value_heads": 3},
        {"linear_num_value_heads": 1 << 17},
        {"linear_value_head_dim": 32},
        {"linear_conv_kernel_dim": 1},
        {"linear_num_value_heads": 1 << 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ],
    ids=str,
)
def test_hybrids_that_llama_cpp_has_otherwise_are_refused(config):
    with pytest.raises(Unsupported):
        identity.layout_of(identity.of_text({**HYBRID, **config}), "f16")


def test_the_layout_is_llama_cpps():
    layout = identity.layout_of(CONFIG, "f16")
    assert (layout.rope, layout.n_layers, layout.n_values, layout.position_bytes) == ("interleaved", 2, 16, 128)
    assert identity.layout_of({**CONFIG, "model_type": "qwen3", "head_dim": 16}, "bf16").rope == "half_split"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma2"},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
        {"rope_traditional": True},
        {"partial_rotary_factor": 0.5},
        {"num_hidden_layers": 10_000},
        {"head_dim": 15},
    ],
    ids=str,
)
def test_models_whose_kv_differs_are_refused(config):
    with pytest.raises(Unsupported):
        identity.layout_of({**CONFIG, **config}, "f16")


def test_a_setting_that_changes_nothing_is_accepted():
    assert identity.layout_of({**CONFIG, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, "f16")
    assert identity.layout_of({**CONFIG, "model_type": "mistral", "sliding_window": None}, "f16")


def test_damaged_folders_are_refused(tmp_path):
    with pytest.raises(Unsupported):
        identity.of_folder(tmp_path, "f16", {})
    outside = {**TOKENIZER, "model": {"type": "BPE", "vocab": {"a": 99}}}
    with pytest.raises(Unsupported):
        identity.of_folder(folder(tmp_path, tokenizer=outside), "f16", {})
    pieces = {**TOKENIZER, "model": {"type": "Unigram", "vocab": []}}
    with pytest.raises(Unsupported):
        identity.of_folder(folder(tmp_path, tokenizer=pieces), "f16", {})
    folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    with pytest.raises(Unsupported):
        identity.of_folder(tmp_path, "f16", {})
