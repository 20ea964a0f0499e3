"""Converts SmolLM2 from GGUF to the Hugging Face format, for mlx_lm.server and Dynamo: to_hugging_face.py MODEL.gguf FOLDER

With a third argument, `no-weights`, it writes only the configuration and the tokenizer.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# GGUF's names of a layer's tensors, and the Hugging Face ones.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3


def write_weights(reader, heads, kv_heads, folder):
    # Only mlx_lm.server needs them, and only its environment has this.
    import mlx.core as mx

    def half_split(weights, n_heads):
        """GGUF pairs neighbouring rows of a head for RoPE; the Hugging Face format pairs its halves."""
        rows, columns = weights.shape
        pairs = weights.reshape(n_heads, rows // n_heads // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns)

    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
            rope_heads = {"attn_q": heads, "attn_k": kv_heads}.get(parts[2])
            values = half_split(values, rope_heads) if rope_heads else values
        else:
            name = f"{WHOLE[parts[0]]}.weight"
        weights[name] = mx.array(values)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def main(source, folder, parts="all"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    if parts != "no-weights":
        write_weights(reader, heads, kv_heads, folder)
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": meta["llama.embedding_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "max_position_embeddings": meta["llama.context_length"],
        "vocab_size": len(tokens),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {"eos_token": tokens[config["eos_token_id"]], "bos_token": tokens[config["bos_token_id"]]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = meta["tokenizer.chat_template"]
    fast.save_pretrained(folder)


main(*sys.argv[1:])
