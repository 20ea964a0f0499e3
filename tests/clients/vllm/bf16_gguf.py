"""Writes a GGUF file's model again with its matrices in bf16: bf16_gguf.py MODEL.gguf OUTPUT.gguf

vLLM computes in bf16, so both engines then have the same weights. Needs numpy and gguf.
"""

import sys

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize


def main(source, output):
    reader = GGUFReader(source)
    writer = GGUFWriter(output, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = 32 if name == "general.file_type" else field.contents()
        kind, *element = field.types
        writer.add_key_value(name, value, kind, element[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(*sys.argv[1:])
