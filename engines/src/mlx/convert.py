"""Converts a GGUF model to a folder as mlx-lm and the Hugging Face hub have it: convert.py MODEL.gguf FOLDER [f16|f32|none]

Llama, Qwen 2, Qwen 3 and Gemma 3 with a byte-pair tokenizer or Gemma's, dequantized; `none` leaves the weights out. Needs numpy
and gguf. config.json is written last: a folder without it is not complete.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

# GGUF's names of a layer's tensors, and the Hugging Face ones.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where Gemma's differ: it has norms of what attention and the feed-forward network return, too.
GEMMA_LAYER = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF's architectures, and the Hugging Face names of them.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# GGUF's types of tokens.
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
# In Gemma 3, every sixth layer has no window.
GEMMA_PERIOD = 6

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The character that stands for a space in SentencePiece's tokens.
SPACE = "\u2581"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
# How text is cut into words, by GGUF's name.
WORDS = {
    "gpt-2": {**BYTE_LEVEL, "use_regex": True},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}],
    },
    "qwen2": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False},
            {**BYTE_LEVEL, "use_regex": False},
        ],
    },
}


def half_split(weights, n_heads):
    """GGUF pairs neighbouring rows of a head for RoPE; the Hugging Face format pairs its halves."""
    pairs = weights.reshape(n_heads, weights.shape[0] // n_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def tensors(reader, architecture, heads, dtype):
    names = GEMMA_LAYER if architecture == "gemma3" else LAYER
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        *path, kind = tensor.name.split(".")
        if path[0] == "blk":
            name = f"model.layers.{path[1]}.{names[path[2]]}.{kind}"
            if architecture == "llama" and path[2] in heads:
                values = half_split(values, heads[path[2]])
        else:
            name = f"{WHOLE[path[0]]}.{kind}"
        if architecture == "gemma3" and path[-1].endswith("norm"):
            # The Hugging Face format has the difference from 1.
            values = values - 1
        yield name, values.astype(dtype)


def write_safetensors(path, weights):
    names = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
    header, end = {"__metadata__": {"format": "mlx"}}, 0
    for name, values in weights.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": names[values.dtype], "shape": values.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in weights.values():
            file.write(np.ascontiguousarray(values).tobytes())


def own_keys(meta, architecture, prefix):
    return [key for key in meta if key.startswith(f"{architecture}.{prefix}")]


def byte_pairs(meta, tokens):
    """The parts of tokenizer.json that are those of byte-level BPE."""
    return {
        "normalizer": None,
        "pre_tokenizer": WORDS[meta["tokenizer.ggml.pre"]],
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def pieces(meta, tokens, kinds):
    """The same of SentencePiece's BPE as Gemma has it. A token is made by merging any two that it consists of, the token with
    the best score first."""
    scores = meta["tokenizer.ggml.scores"]
    spaced = [token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds)]
    vocabulary = {token: i for i, token in enumerate(spaced)}
    # Added tokens have lost their scores. SentencePiece merges them before all others.
    merged = [i for i, kind in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)]
    merged.sort(key=lambda i: (kinds[i] != USER_DEFINED, -scores[i]))
    halves = ((spaced[i][:cut], spaced[i][cut:]) for i in merged for cut in range(len(spaced[i]) - 1, 0, -1))
    replaced = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary],
        },
    }


def gemma_config(own, head_dim):
    return {
        "sliding_window": own("attention.sliding_window"),
        "sliding_window_pattern": own("attention.sliding_window_pattern", GEMMA_PERIOD),
        "rope_local_base_freq": own("rope.freq_base_swa", 10000.0),
        # llama.cpp has another one for the model of 27B, whose files scale RoPE and are not converted.
        "query_pre_attn_scalar": head_dim,
    }


def main(source, folder, dtype="f16"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture = meta["general.architecture"]
    if architecture not in FAMILIES:
        sys.exit(f"{source} is no Llama, Qwen 2, Qwen 3 or Gemma 3")
    is_pieces = meta["tokenizer.ggml.model"] == "llama" and not meta.get("tokenizer.ggml.add_space_prefix", True)
    is_pairs = meta["tokenizer.ggml.model"] == "gpt2" and meta["tokenizer.ggml.pre"] in WORDS
    if not is_pieces and not is_pairs:
        sys.exit(f"{source} has no byte-pair tokenizer that is known here, and not Gemma's")
    scaling = own_keys(meta, architecture, "rope.scaling.")
    if scaling or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        sys.exit(f"{source} scales RoPE, which is not converted")

    def own(key, default=None):
        return meta.get(f"{architecture}.{key}", default)

    n_heads, n_kv_heads = own("attention.head_count"), own("attention.head_count_kv")
    heads = {"attn_q": n_heads, "attn_k": n_kv_heads}
    dtypes = {"f16": np.float16, "f32": np.float32}
    if dtype != "none":
        write_safetensors(folder / "model.safetensors", dict(tensors(reader, architecture, heads, dtypes[dtype])))
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    bos, eos = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    config = {
        "model_type": FAMILIES[architecture][0],
        "architectures": [FAMILIES[architecture][1]],
        "hidden_size": own("embedding_length"),
        "num_hidden_layers": own("block_count"),
        "intermediate_size": own("feed_forward_length"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": own("attention.key_length", own("embedding_length") // n_heads),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "rope_theta": own("rope.freq_base", 10000.0),
        "max_position_embeddings": own("context_length"),
        "vocab_size": len(tokens),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "eos_token_id": eos,
        "bos_token_id": bos,
    }
    if architecture == "gemma3":
        config |= gemma_config(own, config["head_dim"])
    added = [
        {"id": i, "content": token.replace(" ", SPACE) if is_pieces else token, "special": kind == CONTROL}
        | {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind not in (NORMAL, BYTE)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "post_processor": None,
        **(pieces(meta, tokens, kinds) if is_pieces else byte_pairs(meta, tokens)),
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", is_pieces)),
    }
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))


main(*sys.argv[1:])
