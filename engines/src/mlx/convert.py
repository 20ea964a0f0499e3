"""Converts a GGUF model to a folder as mlx-lm and the Hugging Face hub have it: convert.py MODEL.gguf FOLDER [f16|f32|none]

Llama, Qwen 2, 3 and 3.5 (also of experts), Gemma 3 and 4 and gpt-oss with a byte-pair tokenizer or Gemma's, dequantized; `none` leaves
the weights out. Of Qwen 3.5 there is what reads text, without its head for further tokens. Needs numpy
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
    # In a mixture, the experts of a layer are one tensor, as in mlx-lm.
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
# Where Gemma's differ: it has norms of what attention and the feed-forward network return, too.
GEMMA_LAYER = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA4_LAYER = {
    **GEMMA_LAYER,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": "experts.switch_glu.gate_proj",
    "ffn_up_exps": "experts.switch_glu.up_proj",
    "ffn_down_exps": "experts.switch_glu.down_proj",
}
# GGUF keeps what its router multiplies by as scales of these tensors: what comes in, and what each expert returns.
GEMMA4_ROUTER = {"ffn_gate_inp": "scale", "ffn_down_exps": "per_expert_scale"}
GPT_OSS_LAYER = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Qwen 3.5's attention, linear layers, and the expert that every token passes.
QWEN35_LAYER = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# Tensors whose name is no layer's.
UNNAMED = {
    "attn_sinks": "self_attn.sinks",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "layer_output_scale": "layer_scalar",
}
HYBRIDS = ("qwen35", "qwen35moe")
LAYERS = {"gemma3": GEMMA_LAYER, "gemma4": GEMMA4_LAYER, "gpt-oss": GPT_OSS_LAYER}
LAYERS |= {name: QWEN35_LAYER for name in HYBRIDS}
WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# GGUF's architectures, and the Hugging Face names of them.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen35": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen35moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4", "Gemma4ForConditionalGeneration"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
# GGUF's types of tokens.
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
# In Gemma 3, every sixth layer has no window.
GEMMA_PERIOD = 6

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The character that stands for a space in SentencePiece's tokens.
SPACE = "\u2581"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split_by(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


# How text is cut into words, by GGUF's name.
WORDS = {
    "gpt-2": {**BYTE_LEVEL, "use_regex": True},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}],
    },
    "qwen2": split_by(QWEN2),
    "qwen35": split_by(QWEN35),
    "gpt-4o": split_by(O200K),
}


def half_split(weights, n_heads):
    """GGUF pairs neighbouring rows of a head for RoPE; the Hugging Face format pairs its halves."""
    pairs = weights.reshape(n_heads, weights.shape[0] // n_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def by_k_head(values, kind, linear):
    """llama.cpp counts V heads by their number within a K head first, and the Hugging Face format by K head."""
    n_k, n_v, size = linear

    def reordered(part, axis):
        of_head = part.shape[axis] // n_v
        shape = (*part.shape[:axis], n_v // n_k, n_k, of_head, *part.shape[axis + 1 :])
        return part.reshape(shape).swapaxes(axis, axis + 1).reshape(part.shape)

    if kind in ("attn_qkv", "ssm_conv1d"):
        first = 2 * n_k * size
        return np.concatenate([values[:first], reordered(values[first:], 0)])
    if kind == "ssm_out":
        return reordered(values, 1)
    return reordered(values, 0) if kind in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else values


def of_hybrid(values, kind, linear):
    """A layer's tensor of Qwen 3.5, as mlx-lm keeps it: a folder is recognised by the shape of the convolution."""
    values = by_k_head(values, kind, linear)
    match kind:
        case "ssm_a":
            return np.log(-values)
        case "ssm_conv1d":
            return values[..., None]
        case "ffn_gate_inp_shexp":
            return values.reshape(1, -1)
        case _:
            return values


def layer_tensors(values, kind, suffix, names):
    """The tensors that one of a layer becomes: a name within the layer, and values."""
    if kind in UNNAMED:
        yield UNNAMED[kind], values
    elif kind == "ffn_gate_up_exps":
        for name, half in zip(("ffn_gate_exps", "ffn_up_exps"), np.split(values, 2, axis=1)):
            yield f"{names[name]}.{suffix}", half
    else:
        yield f"{names[kind]}.{suffix}", values


def tensors(reader, architecture, n_layers, heads, dtype, linear=None, prefix=""):
    names = LAYERS.get(architecture, LAYER)
    # NVFP4's scales of whole tensors, or of each expert. What comes in has scales, too, which llama.cpp does not use.
    scales = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.endswith(".scale")}
    for tensor in reader.tensors:
        *path, kind = tensor.name.split(".")
        of_router = GEMMA4_ROUTER.get(path[-1]) if architecture == "gemma4" else None
        if of_router and kind == "scale":
            yield f"{prefix}model.layers.{path[1]}.router.{of_router}", tensor.data.astype(dtype)
        if path[-1] == "rope_freqs":
            continue
        if kind == "ssm_a":
            path, kind = [*path, kind], "weight"
        of_layer = path[0] == "blk"
        # A head for further tokens is the last layer of a file.
        if kind in ("scale", "input_scale") or (of_layer and int(path[1]) >= n_layers):
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        scale = scales.get(".".join([*path, "scale"]))
        if kind == "weight" and scale is not None and not of_router:
            values = values * scale.reshape([-1] + [1] * (values.ndim - 1))
        if of_layer and architecture == "llama" and path[2] in heads:
            values = half_split(values, heads[path[2]])
        if of_layer and linear:
            values = of_hybrid(values, path[2], linear)
        if architecture == "gemma3" and path[-1].endswith("norm"):
            # The Hugging Face format has the difference from 1.
            values = values - 1
        if of_layer:
            for name, part in layer_tensors(values, path[2], kind, names):
                yield f"{prefix}model.layers.{path[1]}.{name}", part.astype(dtype)
        else:
            yield f"{prefix}{WHOLE[path[0]]}.{kind}", values.astype(dtype)


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


def by_score(scores, spaced, kinds, vocabulary):
    """The merges of SentencePiece: a token is made by merging any two that it consists of, the token with the best score first."""
    # Added tokens have lost their scores. SentencePiece merges them before all others.
    merged = [i for i, kind in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)]
    merged.sort(key=lambda i: (kinds[i] != USER_DEFINED, -scores[i]))
    halves = ((spaced[i][:cut], spaced[i][cut:]) for i in merged for cut in range(len(spaced[i]) - 1, 0, -1))
    return [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]


def pieces(meta, tokens, kinds):
    """The same of BPE of characters as Gemma 3, whose file has scores, and Gemma 4 have it."""
    spaced = [token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds)]
    vocabulary = {token: i for i, token in enumerate(spaced)}
    if "tokenizer.ggml.merges" in meta:
        merges = [merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]]
    else:
        merges = by_score(meta["tokenizer.ggml.scores"], spaced, kinds, vocabulary)
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
            "merges": merges,
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


def gemma4_config(own, config, reader):
    """What reads text is a part of the model."""
    [factors] = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    names = {tensor.name for tensor in reader.tensors}
    windowed, sizes = own("attention.sliding_window_pattern"), config["intermediate_size"]
    heads = config["num_key_value_heads"]
    heads = heads if isinstance(heads, list) else [heads] * len(windowed)
    [n_kv_heads] = {n for n, is_windowed in zip(heads, windowed) if is_windowed}
    [n_global_kv_heads] = {n for n, is_windowed in zip(heads, windowed) if not is_windowed}
    sizes = sizes if isinstance(sizes, list) else [sizes]
    of_layers = {
        "layer_types": [("full_attention", "sliding_attention")[is_windowed] for is_windowed in windowed],
        "sliding_window": own("attention.sliding_window"),
        "head_dim": own("attention.key_length_swa"),
        "global_head_dim": own("attention.key_length"),
        "num_key_value_heads": n_kv_heads,
        "num_global_key_value_heads": n_global_kv_heads,
        "num_kv_shared_layers": own("attention.shared_kv_layers", 0),
        # Without a projection for V, V is what becomes K.
        "attention_k_eq_v": f"blk.{windowed.index(False)}.attn_v.weight" not in names,
        "hidden_size_per_layer_input": own("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "final_logit_softcapping": own("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                # llama.cpp leaves pairs as they are by dividing their frequencies by 1e30.
                "partial_rotary_factor": float((factors < 1e29).mean()),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": own("rope.freq_base_swa", 10000.0)},
        },
    }
    if own("expert_count"):
        of_layers |= {
            "enable_moe_block": True,
            "num_experts": own("expert_count"),
            "top_k_experts": own("expert_used_count"),
            "moe_intermediate_size": own("expert_feed_forward_length"),
        }
    text = {key: value for key, value in config.items() if key != "rope_theta"} | of_layers
    whole = ("model_type", "architectures", "tie_word_embeddings", "vocab_size")
    return {key: config[key] for key in whole} | {"text_config": text | {"model_type": "gemma4_text"}}


def mixture_config(own):
    return {
        "num_experts": own("expert_count"),
        "num_experts_per_tok": own("expert_used_count"),
        "moe_intermediate_size": own("expert_feed_forward_length"),
        # llama.cpp has a mixture in every layer, whose weights it brings to a sum of 1.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def hybrid_config(own, config):
    """What reads text is a part of the model."""
    linear = {
        "linear_num_key_heads": own("ssm.group_count"),
        "linear_num_value_heads": own("ssm.time_step_rank"),
        "linear_key_head_dim": own("ssm.state_size"),
        "linear_value_head_dim": own("ssm.inner_size") // own("ssm.time_step_rank"),
        "linear_conv_kernel_dim": own("ssm.conv_kernel"),
        "full_attention_interval": own("full_attention_interval", 4),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": own("rope.dimension_count") / config["head_dim"],
        },
    }
    if own("expert_count"):
        linear |= mixture_config(own) | {"shared_expert_intermediate_size": own("expert_shared_feed_forward_length")}
    text = config | linear | {"model_type": f"{config['model_type']}_text"}
    return {key: config[key] for key in ("model_type", "architectures", "tie_word_embeddings")} | {"text_config": text}


def gpt_oss_config(own, n_layers):
    return {
        "num_local_experts": own("expert_count"),
        "num_experts_per_tok": own("expert_used_count"),
        "intermediate_size": own("expert_feed_forward_length"),
        "sliding_window": own("attention.sliding_window"),
        # As llama.cpp has them, which reads no pattern.
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(n_layers)],
        "rope_scaling": own("rope.scaling.type")
        and {
            "rope_type": "yarn",
            "factor": own("rope.scaling.factor"),
            "original_max_position_embeddings": own("rope.scaling.original_context_length"),
        },
    }


def main(source, folder, dtype="f16"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture = meta["general.architecture"]
    if architecture not in FAMILIES:
        sys.exit(f"{source} is no Llama, Qwen 2, 3 or 3.5, Gemma 3 or 4 or gpt-oss")
    is_pieces = meta["tokenizer.ggml.model"] == "gemma4"
    is_pieces |= meta["tokenizer.ggml.model"] == "llama" and not meta.get("tokenizer.ggml.add_space_prefix", True)
    is_pairs = meta["tokenizer.ggml.model"] == "gpt2" and meta["tokenizer.ggml.pre"] in WORDS
    if not is_pieces and not is_pairs:
        sys.exit(f"{source} has no byte-pair tokenizer that is known here, and not Gemma's")
    scaling = own_keys(meta, architecture, "rope.scaling.")
    # All that gpt-oss's files say of YaRN. The rest are numbers that llama.cpp and mlx-lm have in common.
    yarn = [f"{architecture}.rope.scaling.{key}" for key in ("factor", "original_context_length", "type")]
    if architecture == "gpt-oss" and sorted(scaling) == yarn and meta[yarn[-1]] == "yarn":
        scaling = []
    has_factors = any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)
    if scaling or has_factors != (architecture == "gemma4"):
        sys.exit(f"{source} scales RoPE, which is not converted")

    def own(key, default=None):
        return meta.get(f"{architecture}.{key}", default)

    n_layers = own("block_count") - own("nextn_predict_layers", 0)
    n_heads, n_kv_heads = own("attention.head_count"), own("attention.head_count_kv")
    heads = {"attn_q": n_heads, "attn_k": n_kv_heads}
    dtypes = {"f16": np.float16, "f32": np.float32}
    linear, prefix = None, ""
    if architecture in HYBRIDS:
        linear = own("ssm.group_count"), own("ssm.time_step_rank"), own("ssm.state_size")
        prefix = "language_model."
    if architecture == "gemma4":
        prefix = "language_model."
    if dtype != "none":
        converted = tensors(reader, architecture, n_layers, heads, dtypes[dtype], linear, prefix)
        write_safetensors(folder / "model.safetensors", dict(converted))
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    bos, eos = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    config = {
        "model_type": FAMILIES[architecture][0],
        "architectures": [FAMILIES[architecture][1]],
        "hidden_size": own("embedding_length"),
        "num_hidden_layers": n_layers,
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
    if architecture == "qwen3moe":
        config |= mixture_config(own)
    if architecture in HYBRIDS:
        config = hybrid_config(own, config)
    if architecture == "gpt-oss":
        config |= gpt_oss_config(own, config["num_hidden_layers"])
    if architecture == "gemma3":
        config |= gemma_config(own, config["head_dim"])
    if architecture == "gemma4":
        config = gemma4_config(own, config, reader)
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
