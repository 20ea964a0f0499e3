"""Writes a tiny Nemotron-H as the Hugging Face hub has it: nemotron_folder.py MODEL.gguf OTHER FOLDER

The tokenizer is that of another folder, of a model with the same vocabulary. Needs numpy, gguf and safetensors.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

WHOLE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
LAYER = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
UNNAMED = {"ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_dt": "mixer.dt_bias"}


def named(path):
    if path[0] != "blk":
        return f"{WHOLE[path[0]]}.{path[1]}"
    kind = path[2]
    return f"backbone.layers.{path[1]}.{UNNAMED[kind] if kind in UNNAMED else f'{LAYER[kind]}.{path[3]}'}"


def of_hub(values, path):
    if "ssm_a" in path:
        return np.log(-values).reshape(-1)
    if "ssm_d" in path or "ssm_norm" in path:
        return values.reshape(-1)
    return values[:, None] if path[-2:] == ["ssm_conv1d", "weight"] else values


def main(source, other, folder):
    folder, reader = Path(folder), GGUFReader(source)
    folder.mkdir()
    meta = {name: field.contents() for name, field in reader.fields.items()}

    def own(key):
        return meta[f"nemotron_h.{key}"]

    weights = {}
    for tensor in reader.tensors:
        path = tensor.name.split(".")
        weights[named(path)] = np.ascontiguousarray(of_hub(dequantize(tensor.data, tensor.tensor_type), path))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(other) / name, folder)
    sizes, heads = own("feed_forward_length"), own("attention.head_count_kv")
    pattern = "".join("-" if size else "*" if n_heads else "M" for size, n_heads in zip(sizes, heads))
    has_bias = {kind: any(f".{kind}.bias" in tensor.name for tensor in reader.tensors) for kind in ("attn_q", "ffn_up")}
    config = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": own("embedding_length"),
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "intermediate_size": max(sizes),
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": max(heads),
        "head_dim": own("attention.key_length"),
        "attention_bias": has_bias["attn_q"],
        "mlp_bias": has_bias["ffn_up"],
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": own("ssm.time_step_rank"),
        "mamba_head_dim": own("ssm.inner_size") // own("ssm.time_step_rank"),
        "ssm_state_size": own("ssm.state_size"),
        "n_groups": own("ssm.group_count"),
        "conv_kernel": own("ssm.conv_kernel"),
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "layer_norm_epsilon": own("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own("context_length"),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))


main(*sys.argv[1:])
