"""A model's hashes and layout. That they equal those of Baton's other engines is shown with the real model (`make vllm`)."""

import json
import struct

import pytest

from baton_vllm import identity
from baton_vllm.identity import Unsupported

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


def test_the_layout_is_llama_cpps():
    layout = identity.layout_of(CONFIG, "f16")
    assert (layout.rope, layout.n_layers, layout.n_values, layout.position_bytes) == ("interleaved", 2, 16, 128)
    assert identity.layout_of({**CONFIG, "model_type": "qwen3", "head_dim": 16}, "bf16").rope == "half_split"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3"},
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
