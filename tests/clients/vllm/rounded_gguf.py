"""Writes a GGUF file's model again with its matrices in f16, rounded to bf16 first: rounded_gguf.py MODEL.gguf OUTPUT.gguf

vLLM computes with bf16, so both engines then have the same weights: f16 holds what bf16 holds of weights of usual sizes, and
llama.cpp multiplies f16 faster on a processor. Needs numpy and gguf.
"""

import re
import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

BF16, MOSTLY_F16 = GGMLQuantizationType.BF16, 1
# Tensors of linear layers that are not multiplied as matrices.
NO_MATRICES = {"ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm"}


def main(source, output):
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(output, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = MOSTLY_F16 if name == "general.file_type" else field.contents()
        kind, *element = field.types
        writer.add_key_value(name, value, kind, element[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        # Random models have all that llama.cpp can read. No published Nemotron-H has these, and vLLM does not read them.
        if architecture == "nemotron_h" and re.search(r"scale$|\.attn_.*\.bias$", tensor.name):
            continue
        values = dequantize(quantize(dequantize(tensor.data, tensor.tensor_type), BF16), BF16)
        # llama.cpp wants all others in f32.
        is_matrix = values.ndim == 2 and NO_MATRICES.isdisjoint(tensor.name.split("."))
        writer.add_tensor(tensor.name, values.astype(np.float16) if is_matrix else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(*sys.argv[1:])
