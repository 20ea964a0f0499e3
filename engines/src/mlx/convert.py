"""Converts a GGUF model to a folder as mlx-lm and the Hugging Face hub have it: convert.py MODEL.gguf FOLDER [f16|f32|none]

Llama, Qwen 2 and Qwen 3 with a byte-pair tokenizer, dequantized; `none` leaves the weights out. Needs numpy and gguf. config.json is written last: a folder
without it is not complete.
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
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONTROL = 3

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(dtype)
        *path, kind = tensor.name.split(".")
        if path[0] == "blk":
            name = f"model.layers.{path[1]}.{LAYER[path[2]]}.{kind}"
            if architecture == "llama" and path[2] in heads:
                values = half_split(values, heads[path[2]])
        else:
            name = f"{WHOLE[path[0]]}.{kind}"
        yield name, values


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


def main(source, folder, dtype="f16"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture = meta["general.architecture"]
    if architecture not in CLASSES or meta["tokenizer.ggml.model"] != "gpt2" or meta["tokenizer.ggml.pre"] not in WORDS:
        sys.exit(f"{source} is no Llama, Qwen 2 or Qwen 3 with a byte-pair tokenizer that is known here")
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
        "model_type": architecture,
        "architectures": [CLASSES[architecture]],
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
    added = [
        {"id": i, "content": token, "special": kind == CONTROL, "normalized": False}
        | {"lstrip": False, "rstrip": False, "single_word": False}
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind != 1
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": WORDS[meta["tokenizer.ggml.pre"]],
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [m.split(" ", 1) for m in meta["tokenizer.ggml.merges"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
    }
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))


main(*sys.argv[1:])
