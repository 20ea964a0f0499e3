"""What a model is, as Baton's other nodes name it: the hashes and the layout that engines/model/src/hf/ makes of the same folder.

A GGUF file of the model has the same vocabulary and layout and another hash of the weights: the decode node then compares the
KV of a fixed text (docs/handoff.md).
"""

import json
import os
import re
import struct
from pathlib import Path

from blake3 import blake3

from .frames import Layout

# engines/src/serving/start.rs has the same text.
CANARY = (
    "In 1851 the cable between Dover and Calais carried its first message; by 1866 another one, 3,000 km long, joined Ireland to "
    'Newfoundland. "What hath been done," a clerk wrote, "cannot be undone: two cities, one clock."'
)
MAX_CANARY = 48

# By the folder's `model_type`: GGUF's name, and the order of K's elements in GGUF files. vLLM's own order is half-split.
FAMILIES = {
    "llama": ("llama", "interleaved"),
    "mistral": ("llama", "interleaved"),
    "qwen2": ("qwen2", "half_split"),
    "qwen3": ("qwen3", "half_split"),
}
MAX_VOCAB = 1 << 20
MAX_LAYERS = 512
MAX_JSON_BYTES = 128 << 20
MAX_HEADER_BYTES = 64 << 20
SAMPLE_BYTES = 4096
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# GGUF's numbers of the types of an array and of its elements.
ARRAY, STRING, I32 = 9, 8, 5


class Unsupported(Exception):
    """Why the model's KV cannot be handed over, in words for the operator."""


def read_json(path, max_bytes=MAX_JSON_BYTES):
    if path.stat().st_size > max_bytes:
        raise Unsupported(f"{path.name} has more than {max_bytes} bytes")
    return json.loads(path.read_bytes())


def layout_of(config, dtype):
    """The layout of a model with this config.json, whose KV is sent in this type."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise Unsupported(f"its model_type is {model_type!r}; {', '.join(FAMILIES)} are supported")
    if config.get("rope_traditional"):
        raise Unsupported("rope_traditional: its K has another order of elements")
    windowed = config.get("use_sliding_window", model_type == "mistral") and config.get("sliding_window")
    if windowed or any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise Unsupported("some of its layers do not attend to all positions")
    if (config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise Unsupported("only a part of each head is rotated")
    n_layers, n_heads = config["num_hidden_layers"], config["num_attention_heads"]
    n_kv_heads = config.get("num_key_value_heads") or n_heads
    head_size = config.get("head_dim") or config["hidden_size"] // n_heads
    if not 1 <= n_layers <= MAX_LAYERS or head_size % 2 or n_heads % n_kv_heads:
        raise Unsupported(f"{n_layers} layers, {n_heads} heads, {n_kv_heads} KV heads, {head_size} elements of a head")
    return Layout(FAMILIES[model_type][1], n_layers, n_kv_heads * head_size, dtype)


def looks_special(spelling):
    """Tokens that llama.cpp's converter makes control tokens, whatever the file says."""
    return spelling in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or bool(
        re.fullmatch(r"<\|.*\|>|<｜.*｜>|<unused.*>", spelling, re.S)
    )


def tokens_of(tokenizer, n_vocab):
    """The spelling and llama.cpp's number of the type of each token of a tokenizer.json."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        raise Unsupported("its tokenizer is of another kind than byte-level BPE")
    if not 1 <= n_vocab <= MAX_VOCAB:
        raise Unsupported(f"it has {n_vocab} tokens; {MAX_VOCAB} are possible")
    tokens = [(f"[PAD{i}]", UNUSED) for i in range(n_vocab)]

    def put(i, token):
        if not isinstance(i, int) or not 0 <= i < n_vocab:
            raise Unsupported(f"the token {token[0]!r} is not one of {n_vocab}")
        tokens[i] = token

    for spelling, i in (model.get("vocab") or {}).items():
        put(i, (spelling, NORMAL))
    for added in tokenizer.get("added_tokens") or ():
        spelling = added["content"]
        is_control = added.get("special") or looks_special(spelling)
        put(added["id"], (spelling, CONTROL) if is_control else (spelling.replace("\u2581", " "), USER_DEFINED))
    return tokens


def vocabulary_hash(tokens):
    """The hash of the tokens and their types, as `Gguf::vocabulary_hash` makes it."""
    spellings = blake3(struct.pack("<IIQ", ARRAY, STRING, len(tokens)))
    types = blake3(struct.pack("<IIQ", ARRAY, I32, len(tokens)))
    for spelling, kind in tokens:
        encoded = spelling.encode()
        spellings.update(struct.pack("<Q", len(encoded)) + encoded)
        types.update(struct.pack("<I", kind))
    whole = blake3()
    for key, digest in (("tokenizer.ggml.token_type", types.digest()), ("tokenizer.ggml.tokens", spellings.digest())):
        whole.update(struct.pack("<Q", len(key)) + key.encode() + digest)
    return whole.hexdigest()


def read_tensors(folder):
    """Name → (type, shape, file, start, length) of all tensors of a folder's safetensors."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (n,) = struct.unpack("<Q", file.read(8))
            if n > MAX_HEADER_BYTES:
                raise Unsupported(f"{path.name} has a header of {n} bytes")
            header = json.loads(file.read(n))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                tensors[name] = (tensor["dtype"], tensor["shape"], path, 8 + n + begin, end - begin)
    if not tensors:
        raise Unsupported("its folder has no safetensors")
    return tensors


def weights_hash(folder, changes):
    """A hash of samples of all tensors, and of what the server's options change of them."""
    hasher = blake3(b"vllm safetensors")
    for name, (dtype, shape, path, start, length) in sorted(read_tensors(folder).items()):
        described = json.dumps([name, dtype, shape]).encode()
        hasher.update(struct.pack("<Q", len(described)) + described)
        with open(path, "rb") as file:
            n_first = min(length, SAMPLE_BYTES)
            n_last = min(length - n_first, SAMPLE_BYTES)
            for at, n in ((start, n_first), (start + length - n_last, n_last)):
                file.seek(at)
                hasher.update(file.read(n))
    described = json.dumps(changes, sort_keys=True).encode()
    hasher.update(struct.pack("<Q", len(described)) + described)
    return hasher.hexdigest()


def of_folder(folder, dtype, changes):
    """The config, layout and fingerprint of a model's folder. Errors: its KV cannot be handed over."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise Unsupported("--model must be a folder: the connector reads its tokenizer.json and its safetensors")
    config = read_json(folder / "config.json")
    layout = layout_of(config, dtype)
    tokens = tokens_of(read_json(folder / "tokenizer.json"), config["vocab_size"])
    rope = {key: config.get(key) for key in ("rope_theta", "rope_scaling", "rope_parameters", "head_dim")}
    fingerprint = {
        "vocabulary": vocabulary_hash(tokens),
        "weights": weights_hash(folder, {**changes, "rope": rope}),
    }
    return config, layout, fingerprint


def describe(folder, config, layout, fingerprint, canary, limits, devices):
    """`NodeInfo` in schemas/src/node.rs, without what the server adds."""
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return {
        "model": os.path.basename(os.path.normpath(folder)),
        "engine": "vllm",
        "architecture": FAMILIES[config["model_type"]][0],
        "n_ctx": limits["n_ctx"],
        "n_ctx_train": config.get("max_position_embeddings") or 0,
        "n_vocab": config["vocab_size"],
        "n_slots": limits["n_slots"],
        "memory": {"model": size, "kv": limits["kv_bytes"]},
        "has_chat_template": False,
        "devices": devices,
        "role": "prefill",
        "fingerprint": fingerprint,
        "kv": {"fingerprint": fingerprint, "layout": layout.json(), "canary": canary},
    }
