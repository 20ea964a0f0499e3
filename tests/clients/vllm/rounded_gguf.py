"""Writes a GGUF file's model again with its matrices in f16, rounded to bf16 first: rounded_gguf.py MODEL.gguf OUTPUT.gguf

vLLM computes with bf16, so both engines then have the same weights: f16 holds what bf16 holds of weights of usual sizes, and
llama.cpp multiplies f16 faster on a processor. Needs numpy and gguf.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

BF16, MOSTLY_F16 = GGMLQuantizationType.BF16, 1


def main(source, output):
    reader = GGUFReader(source)
    writer = GGUFWriter(output, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = MOSTLY_F16 if name == "general.file_type" else field.contents()
        kind, *element = field.types
        writer.add_key_value(name, value, kind, element[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = dequantize(quantize(dequantize(tensor.data, tensor.tensor_type), BF16), BF16)
        # llama.cpp wants vectors in f32.
        writer.add_tensor(tensor.name, values.astype(np.float16) if values.ndim == 2 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(*sys.argv[1:])
