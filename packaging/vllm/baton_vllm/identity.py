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

from .errors import Unsupported
from .frames import Layout, LinearLayer, Window
from .states import DeltaNet, Mamba2

# engines/src/serving/start.rs has the same text.
CANARY = (
    "In 1851 the cable between Dover and Calais carried its first message; by 1866 another one, 3,000 km long, joined Ireland to "
    'Newfoundland. "What hath been done," a clerk wrote, "cannot be undone: two cities, one clock."'
)
MAX_CANARY = 48

# By the folder's `model_type`: GGUF's name, and the order of K's elements in GGUF files. vLLM's own order is half-split, also where
# positions have several axes.
FAMILIES = {
    "llama": ("llama", "interleaved"),
    "mistral": ("llama", "interleaved"),
    "qwen2": ("qwen2", "half_split"),
    "qwen3": ("qwen3", "half_split"),
    "qwen3_5": ("qwen35", "multi_axis"),
    "qwen3_5_moe": ("qwen35moe", "multi_axis"),
    "gemma3": ("gemma3", "half_split"),
    "nemotron_h": ("nemotron_h", "none"),
}
# Families with linear layers: every n-th layer has attention, where the file does not say otherwise.
HYBRIDS = {"qwen3_5": 4, "qwen3_5_moe": 4}
# Families with windows: every n-th layer has none, where the file does not say otherwise.
WINDOWED = {"gemma3": 6}
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
# Mamba 2, attention and layers without a memory in any order, as letters or as words.
MAMBA, FORGETS = "nemotron_h", "feed_forward"
MAMBAS_LAYERS = {"M": LINEAR, "*": FULL, "-": FORGETS, "E": FORGETS}
MAMBAS_LAYERS |= {"mamba": LINEAR, "attention": FULL, "mlp": FORGETS, "moe": FORGETS}
MAX_VOCAB = 1 << 20
MAX_LAYERS = 512
# Heads, and elements of one.
MAX_SIZE = 1 << 16
MAX_WINDOW = 1 << 24
MAX_STATE_VALUES, MAX_STATES_BYTES = 1 << 28, 1 << 30
MAX_JSON_BYTES = 128 << 20
MAX_HEADER_BYTES = 64 << 20
SAMPLE_BYTES = 4096
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
# GGUF's numbers of the types of an array and of its elements.
ARRAY, STRING, I32 = 9, 8, 5


def read_json(path, max_bytes=MAX_JSON_BYTES):
    if path.stat().st_size > max_bytes:
        raise Unsupported(f"{path.name} has more than {max_bytes} bytes")
    return json.loads(path.read_bytes())


def of_text(config):
    """What a config.json says of the part that reads text, under the name of its family."""
    part = config.get("text_config")
    if isinstance(part, dict):
        config = {**part, "model_type": config.get("model_type")}
    model_type = config.get("model_type")
    return {**config, "model_type": model_type.removesuffix("_text")} if isinstance(model_type, str) else config


def layout_of(config, dtype):
    """The layout of a model whose text part is described so, and whose KV is sent in this type."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise Unsupported(f"its model_type is {model_type!r}; {', '.join(FAMILIES)} are supported")
    if config.get("rope_traditional"):
        raise Unsupported("rope_traditional: its K has another order of elements")
    kinds = kinds_of_layers(config, model_type)
    is_rotated_in_part = model_type not in HYBRIDS and FAMILIES[model_type][1] != "none"
    if is_rotated_in_part and (config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise Unsupported("only a part of each head is rotated")
    n_heads = config["num_attention_heads"]
    n_kv_heads = config.get("num_key_value_heads") or n_heads
    head_size = config.get("head_dim") or config["hidden_size"] // n_heads
    if head_size % 2 or n_heads % n_kv_heads:
        raise Unsupported(f"{n_heads} heads, {n_kv_heads} KV heads, {head_size} elements of a head")
    linear = linear_layers(config, kinds) if LINEAR in kinds else ()
    window = window_of(config, kinds) if SLIDING in kinds else None
    n_layers = kinds.count(FULL) + kinds.count(SLIDING)
    layout = Layout(FAMILIES[model_type][1], n_layers, n_kv_heads * head_size, dtype, linear, window)
    if layout.state_bytes > MAX_STATES_BYTES:
        raise Unsupported(f"its states have {layout.state_bytes} bytes; {MAX_STATES_BYTES} are possible")
    return layout


def kinds_of_layers(config, model_type):
    """What each layer keeps. Errors: it is not what llama.cpp has."""
    listed = config.get("layer_types") or []
    n_layers = config.get("num_hidden_layers") or len(listed)
    if model_type == MAMBA:
        layers = config.get("hybrid_override_pattern") or config.get("layers_block_type") or listed
        kinds = [MAMBAS_LAYERS.get(layer) for layer in layers]
        if None in kinds or len(kinds) > MAX_LAYERS or FULL not in kinds:
            raise Unsupported(f"its layers are {layers!r}")
        return kinds
    if type(n_layers) is not int or not 1 <= n_layers <= MAX_LAYERS:
        raise Unsupported(f"it has {n_layers!r} layers")
    other, period = FULL, 1
    if model_type in HYBRIDS:
        other, period = LINEAR, config.get("full_attention_interval") or HYBRIDS[model_type]
    elif model_type in WINDOWED:
        of_list = listed.index(FULL) + 1 if FULL in listed else WINDOWED[model_type]
        other, period = SLIDING, config.get("sliding_window_pattern") or of_list
    elif config.get("use_sliding_window", model_type == "mistral") and config.get("sliding_window"):
        raise Unsupported("some of its layers do not attend to all positions")
    if type(period) is not int or not 1 <= period <= n_layers:
        raise Unsupported(f"every {period!r}-th of {n_layers} layers attends to all positions")
    kinds = [other if (layer + 1) % period else FULL for layer in range(n_layers)]
    if listed and listed != kinds:
        if other == FULL:
            raise Unsupported("some of its layers do not attend to all positions")
        raise Unsupported(f"layer_types is not {period - 1} layers of {other} before each {FULL}")
    return kinds


def window_of(config, kinds):
    """The layers that attend to the last positions only, as llama.cpp and mlx-lm have them."""
    if config.get("use_bidirectional_attention") is True:
        raise Unsupported("its tokens attend to later ones (use_bidirectional_attention)")
    n_positions = config.get("sliding_window")
    if type(n_positions) is not int or not 1 <= n_positions <= MAX_WINDOW:
        raise Unsupported(f"its sliding_window is {n_positions!r}")
    return Window(n_positions, tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING))


def linear_layers(config, kinds):
    """The layers that keep states, which stand between those with attention."""
    shape = linear_shape(config)
    return tuple(
        LinearLayer(shape.n_convolution, shape.n_recurrence, kinds[:layer].count(FULL))
        for layer, kind in enumerate(kinds)
        if kind == LINEAR
    )


def linear_shape(config):
    """The shape of a linear layer. Errors: a number is missing or out of range, or llama.cpp has no such layers."""
    def number(key):
        if type(config.get(key)) is not int or not 1 <= config[key] <= MAX_SIZE:
            raise Unsupported(f"its {key} is {config.get(key)!r}")
        return config[key]

    if config["model_type"] == MAMBA:
        shape = Mamba2(number("mamba_num_heads"), number("mamba_head_dim"), number("ssm_state_size"), number("n_groups"),
                       number("conv_kernel") - 1)
        is_known = shape.n_heads % shape.n_groups == 0
    else:
        shape = DeltaNet(number("linear_num_key_heads"), number("linear_num_value_heads"), number("linear_key_head_dim"),
                         number("linear_conv_kernel_dim") - 1)
        is_known = shape.n_v % shape.n_k == 0 and number("linear_value_head_dim") == shape.size
    if not is_known or not shape.n_inputs or max(shape.n_convolution, shape.n_recurrence) > MAX_STATE_VALUES:
        raise Unsupported(f"linear layers of {shape}, or of other elements of V")
    return shape


def looks_special(spelling):
    """Tokens that llama.cpp's converter makes control tokens, whatever the file says."""
    return spelling in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or bool(
        re.fullmatch(r"<\|.*\|>|<｜.*｜>|<unused.*>", spelling, re.S)
    )


def tokens_of(tokenizer, n_vocab, model_type=None):
    """The spelling and llama.cpp's number of the type of each token of a tokenizer.json."""
    model = tokenizer.get("model") or {}
    has_bytes = bool(model.get("byte_fallback"))
    if model.get("type") != "BPE" or has_bytes and model_type != "gemma3" or model.get("continuing_subword_prefix"):
        raise Unsupported("its tokenizer is of another kind than byte-level BPE, and not Gemma 3's")
    if not 1 <= n_vocab <= MAX_VOCAB:
        raise Unsupported(f"it has {n_vocab} tokens; {MAX_VOCAB} are possible")
    tokens = [(f"[PAD{i}]", UNUSED) for i in range(n_vocab)]

    def put(i, token):
        if not isinstance(i, int) or not 0 <= i < n_vocab:
            raise Unsupported(f"the token {token[0]!r} is not one of {n_vocab}")
        tokens[i] = token

    for spelling, i in (model.get("vocab") or {}).items():
        is_byte = has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", spelling)
        put(i, (spelling, BYTE if is_byte else NORMAL))
    for added in tokenizer.get("added_tokens") or ():
        if added["id"] >= n_vocab:
            # It has no embedding, as that of images in models of text.
            continue
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
    """The config of the part that reads text, the layout and the fingerprint of a model's folder. Errors: its KV cannot be handed
    over."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise Unsupported("--model must be a folder: the connector reads its tokenizer.json and its safetensors")
    config = of_text(read_json(folder / "config.json"))
    layout = layout_of(config, dtype)
    tokens = tokens_of(read_json(folder / "tokenizer.json"), config["vocab_size"], config["model_type"])
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
        # Nodes of earlier versions know the first name, and no states.
        "kv_2" if layout.linear else "kv": {"fingerprint": fingerprint, "layout": layout.json(), "canary": canary},
    }
