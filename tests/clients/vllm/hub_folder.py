"""Rewrites a folder that engines/src/mlx/convert.py has made as the Hugging Face hub has it: hub_folder.py FOLDER

Of Qwen 3.5, here without images, mlx-lm has other names, another order of the convolution's axes, and norms that are not stored as their difference
from 1. Other folders are the same. Needs numpy and safetensors.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def of_hub(name, values):
    if name.endswith("conv1d.weight"):
        return np.ascontiguousarray(values.swapaxes(1, 2))
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values - 1
    return values


def main(folder):
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ("qwen3_5", "qwen3_5_moe"):
        return
    (folder / "config.json").unlink()
    weights = folder / "model.safetensors"
    tensors = {name.removeprefix("language_model."): of_hub(name, values) for name, values in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    text = config["text_config"]
    interval = text["full_attention_interval"]
    kinds = [("linear_attention", "full_attention")[(layer + 1) % interval == 0] for layer in range(text["num_hidden_layers"])]
    is_mixture = config["model_type"] == "qwen3_5_moe"
    text |= {
        "architectures": ["Qwen3_5MoeForCausalLM" if is_mixture else "Qwen3_5ForCausalLM"],
        "layer_types": kinds,
        "hidden_act": "silu",
        "attn_output_gate": True,
        # As in the published files.
        "mamba_ssm_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(text))


main(*sys.argv[1:])
