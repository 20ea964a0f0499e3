"""Reads a KV handoff stream as docs/kv-frames.md describes it.

`read` yields ("head", dict), ("wait", dict), ("frame", Frame), ("state", State), ("end", dict) and ("error", dict), or raises
ValueError.
"""

import json
import struct
from typing import NamedTuple

import numpy as np
import zstandard
from blake3 import blake3
from pyaegis import AegisMac128X2

import kvq

D, M, FIFTH, HALVES = ("d", "<f2"), ("m", "<f2"), ("fifth", "<u4"), ("halves", "u1", 16)
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
# One value of a float, or a block of 32 of a quantized type.
DTYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2"),
          "q4_0": np.dtype([D, HALVES]), "q4_1": np.dtype([D, M, HALVES]), "iq4_nl": np.dtype([D, HALVES]),
          "q5_0": np.dtype([D, FIFTH, HALVES]), "q5_1": np.dtype([D, M, FIFTH, HALVES]),
          "q8_0": np.dtype([D, ("q", "i1", 32)])}


class Frame(NamedTuple):
    p0: int
    p1: int
    starts: tuple  # of each section
    tensors: list  # [section][layer] -> (K, V or None), float32 arrays [rows][values]


class State(NamedTuple):
    position: int
    tensors: list  # of each state, float32


def n_bytes(dtype, n_values):
    return n_values // (1 if DTYPES[dtype].names is None else 32) * DTYPES[dtype].itemsize


def read(stream, cluster_key, handoff_id, tokens):
    material = struct.pack("<Q", len(cluster_key)) + cluster_key + handoff_id
    key = blake3(material, derive_key_context="baton kv handoff v1").digest()
    aegis_key = blake3(material, derive_key_context="baton kv handoff v1 aegis128x2").digest(16)
    at, index, head, next_position, n_frames = 0, 0, None, None, 0
    while True:
        magic, kind, reserved, found, length = struct.unpack_from("<4sB3sIQ", stream, at)
        check(magic == b"BKV1" and reserved == bytes(3) and found == index, "record header")
        payload = stream[at + 20:at + 20 + length]
        mac = stream[at + 20 + length:at + 52 + length]
        if head and head.get("mac") == "aegis128x2":
            expected = AegisMac128X2(aegis_key, struct.pack("<I12x", index))
            expected.update(stream[at:at + 20 + length])
            check(expected.final() == mac, "MAC")
        else:
            check(blake3(stream[at:at + 20 + length], key=key).digest() == mac, "MAC")
        at, index = at + 52 + length, index + 1
        check((kind == 1) == (index == 1), "the head is the first record and no other")
        if kind == 1:
            head = json.loads(payload)
            check(head["version"] == version(head["layout"]) and head["handoff"] == handoff_id.hex(), "head")
            check(head.get("mac", "blake3") in ("blake3", "aegis128x2"), "MAC of an unknown kind")
            next_position, channels = head["start"], {}
            states, states_at = [], list(head.get("states_at", []))
            check(bool(states_at) == bool(head["layout"].get("states")) and len(states_at) <= 8, "states_at")
            check(states_at == sorted(set(states_at)) and states_at[-1:] in ([], [head["end"]]), "states_at")
            check(all(position > head["start"] for position in states_at), "states_at")
            yield "head", head
        elif kind == 2:
            frame = read_frame(payload, head, tokens, next_position, channels)
            next_position, n_frames = frame.p1, n_frames + 1
            yield "frame", frame
        elif kind == 5:
            yield "wait", json.loads(payload)
        elif kind == 6:
            check(states_at, "no more states")
            states += read_states(payload, head, tokens, states_at[0], len(states))
            if len(states) == len(head["layout"]["states"]):
                yield "state", State(states_at.pop(0), states)
                states = []
        else:
            check(kind in (3, 4) and at == len(stream), "nothing follows an end or an error")
            message = json.loads(payload)
            check(kind == 4 or (message["n_frames"], next_position) == (n_frames, head["end"]), "end")
            check(kind == 4 or not states_at, "a state is missing")
            yield {3: "end", 4: "error"}[kind], message
            return


def version(layout):
    types = {layer[t]["dtype"] for section in layout["sections"] for layer in section["layers"] for t in layer}
    is_new = layout.get("states") or any(k in section for section in layout["sections"] for k in ("n_rot", "tokens_per_row"))
    return 2 if is_new or types - {"f32", "f16", "bf16"} else 1


def read_states(payload, head, tokens, wanted_position, wanted_first):
    position, first, n, codec, reserved, prefix = struct.unpack_from("<IIIB3s32s", payload)
    check((position, first) == (wanted_position, wanted_first) and n > 0 and reserved == bytes(3), "state")
    check(codec == {"none": 0, "state_f16": 5, "state_int8": 6}[head.get("state_codec", "none")], "codec of states")
    check(blake3(struct.pack(f"<{position}I", *tokens[:position])).digest() == prefix, "computed for other tokens")
    shapes, at, states = head["layout"]["states"][first:first + n], 48, []
    check(len(shapes) == n, "number of states")
    for shape in shapes:
        dtype, n_values = shape["dtype"], shape["n_values"]
        if codec and dtype == "f32":
            values, size = narrow(payload[at:], n_values, *{5: ("<f2", 256), 6: ("i1", 32)}[codec])
        else:
            size = n_bytes(dtype, n_values)
            values = decode(0, dtype, payload[at:at + size], (1, n_values))[0]
        states.append(values)
        at += size
    check(at == len(payload), "length of states")
    return states


def narrow(payload, n_values, dtype, block):
    values, at = [], 0
    for first in range(0, n_values, block):
        n = min(block, n_values - first)
        scale = np.frombuffer(payload, "<f4", 1, at)[0]
        values.append(np.frombuffer(payload, dtype, n, at + 4).astype(np.float32) * scale)
        at += 4 + n * np.dtype(dtype).itemsize
    values = np.concatenate(values)
    check(np.isfinite(values).all(), "not finite")
    return values, at


def read_frame(payload, head, tokens, next_position, channels):
    p0, p1, prefix, codec, reserved, n_sections = struct.unpack_from("<II32sB3sI", payload)
    sections = head["layout"]["sections"]
    check(p0 == next_position < p1 <= head["end"] and reserved == bytes(3) and n_sections == len(sections), "frame")
    check(codec == {"none": 0, "planes_zstd": 1, "q8_0": 2, "kvq": 3, "kvq_fast": 4}[head["codec"]], "codec")
    check(blake3(struct.pack(f"<{p1}I", *tokens[:p1])).digest() == prefix, "computed for other tokens")
    starts = struct.unpack_from(f"<{n_sections}I", payload, 48)
    check(all(p0 <= s <= (p0 if "window" not in sec else p1) for s, sec in zip(starts, sections)), "section start")
    rotations = head.get("rotation") or [None] * n_sections
    places = [(start // section.get("tokens_per_row", 1), rotation if t == "k" else None)
              for start, rotation, section in zip(starts, rotations, sections)
              for layer in section["layers"] for t in ("k", "v") if t in layer]
    # The first row of each section, and one past the last: positions, unless a row stands for several tokens.
    rows = [(start // per_row, p1 // per_row) for start, per_row in
            zip(starts, (section.get("tokens_per_row", 1) for section in sections))]
    shapes = [(last - first, layer[t]) for (first, last), section in zip(rows, sections) for layer in section["layers"]
              for t in ("k", "v") if t in layer]
    body = payload[48 + 4 * n_sections:]
    if codec == 0:
        lengths = [n_rows * n_bytes(rows["dtype"], rows["n_values"]) for n_rows, rows in shapes]
    else:
        n_tensors, *lengths = struct.unpack_from(f"<{1 + len(shapes)}I", body)
        check(n_tensors == len(shapes), "number of tensors")
        body = body[4 + 4 * n_tensors:]
    check(sum(lengths) == len(body), "length of the body")
    values, at = [], 0
    for tensor, ((n_rows, rows), length) in enumerate(zip(shapes, lengths)):
        encoded, shape = body[at:at + length], (n_rows, rows["n_values"])
        if codec >= 3 and length:
            start, rotation = places[tensor]
            plain = lambda raw: decode(0, rows["dtype"], raw, (-1, shape[1]))
            values.append(kvq.decode(encoded, shape, start, head["layout"]["rope"], rotation, plain,
                                     DTYPES[rows["dtype"]].itemsize, channels, tensor))
        else:
            values.append(decode(codec, rows["dtype"], encoded, shape))
        at += length
    values = iter(values)
    tensors = [[(next(values), next(values) if "v" in layer else None) for layer in s["layers"]] for s in sections]
    return Frame(p0, p1, starts, tensors)


def decode(codec, dtype, encoded, shape):
    n, size = shape[0] * shape[1], DTYPES[dtype].itemsize
    if codec == 2:
        values = blocks("q8_0", encoded).reshape(shape)
    elif DTYPES[dtype].names:
        check(codec == 0, "a codec on quantized rows")
        values = blocks(dtype, encoded).reshape(shape)
    else:
        if codec == 1 and n:
            planes = np.frombuffer(zstandard.decompress(encoded, max_output_size=n * size), np.uint8)
            encoded = planes.reshape(size, n).T.tobytes()
        raw = np.frombuffer(encoded, DTYPES[dtype]).reshape(shape)
        values = (raw.astype("<u4") << 16).view("<f4") if dtype == "bf16" else raw.astype(np.float32)
    check(np.isfinite(values).all(), "a value is not finite")
    return values


def blocks(dtype, encoded):
    block = np.frombuffer(encoded, DTYPES[dtype])
    d = block["d"].astype(np.float32)[:, None]
    if dtype == "q8_0":
        return d * block["q"]
    q = np.concatenate([block["halves"] & 15, block["halves"] >> 4], axis=1).astype(np.int32)
    if "fifth" in block.dtype.names:
        q += ((block["fifth"][:, None] >> np.arange(32, dtype="<u4") & 1) << 4).astype(np.int32)
    if "m" in block.dtype.names:
        return d * q + block["m"].astype(np.float32)[:, None]
    return (d * (IQ4_NL[q] if dtype == "iq4_nl" else q - {"q4_0": 8, "q5_0": 16}[dtype])).astype(np.float32)


def check(right, what):
    if not right:
        raise ValueError(what)
