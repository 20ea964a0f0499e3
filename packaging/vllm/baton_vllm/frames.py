"""Writes a handoff stream as docs/kv-frames.md describes it: records with keyed BLAKE3, and frames without a codec.

A frame's length follows from its positions, so its first layers can leave before its last ones are computed.
"""

import json
import struct
from dataclasses import dataclass

from blake3 import blake3

HEAD, FRAME, END, ERROR, WAIT = 1, 2, 3, 4, 5
MAC_BYTES = 32
MAX_FRAME_POSITIONS = 4096
MAX_FRAME_BYTES = 1 << 30
NO_CODEC = 0
VALUE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class Layout:
    """The shape of a model's KV: equal layers that keep every position."""

    rope: str
    n_layers: int
    n_values: int
    dtype: str

    @property
    def row_bytes(self):
        return self.n_values * VALUE_BYTES[self.dtype]

    @property
    def position_bytes(self):
        return 2 * self.n_layers * self.row_bytes

    @property
    def max_frame_positions(self):
        return max(1, min(MAX_FRAME_POSITIONS, MAX_FRAME_BYTES // self.position_bytes))

    def json(self):
        rows = {"dtype": self.dtype, "n_values": self.n_values}
        return {"rope": self.rope, "sections": [{"layers": [{"k": rows, "v": rows}] * self.n_layers}]}


class Record:
    """A record whose payload is given piece by piece."""

    def __init__(self, key, kind, index, length):
        self.begin = struct.pack("<4sB3xIQ", b"BKV1", kind, index, length)
        self._mac = blake3(self.begin, key=key)
        self._missing = length

    def add(self, piece):
        """The next piece of the payload, which the caller sends."""
        self._missing -= len(piece)
        if self._missing < 0:
            raise ValueError("a record's payload is longer than its header says")
        self._mac.update(piece)
        return piece

    def mac(self):
        """The last bytes of the record."""
        if self._missing:
            raise ValueError(f"{self._missing} bytes of a record's payload are missing")
        return self._mac.digest()


class Writer:
    """The records of one handoff, in order."""

    def __init__(self, cluster_key, handoff, tokens, start, layout, fingerprint):
        material = struct.pack("<Q", len(cluster_key)) + cluster_key + handoff
        self._key = blake3(material, derive_key_context="baton kv handoff v1").digest()
        self._layout, self._tokens, self._start = layout, struct.pack(f"<{len(tokens)}I", *tokens), start
        self._handoff, self._fingerprint = handoff, fingerprint
        self._prefix = blake3(self._tokens[: 4 * start])
        self._index = self._n_frames = 0
        self.position, self.end_position = start, len(tokens)

    def head(self):
        return self._message(HEAD, {
            "version": 1,
            "handoff": self._handoff.hex(),
            "fingerprint": self._fingerprint,
            "layout": self._layout.json(),
            "start": self._start,
            "end": self.end_position,
            "codec": "none",
        })

    def wait(self, has_begun=False):
        record = {"queued_ahead": 0, "n_done": self.position - self._start}
        return self._message(WAIT, record | {"has_begun": True} if has_begun else record)

    def error(self, error):
        return self._message(ERROR, error.body)

    def end(self, timings):
        if self.position != self.end_position:
            raise ValueError(f"the handoff ends at {self.end_position} and was written up to {self.position}")
        return self._message(END, {
            "n_frames": self._n_frames,
            "start": self._start,
            "end": self.end_position,
            "timings": timings,
        })

    def frame(self, p1):
        """Begins the frame of the positions from `position` to before `p1`. Its rows follow as pieces: K and V of each layer."""
        p0 = self.position
        if not p0 < p1 <= min(self.end_position, p0 + self._layout.max_frame_positions):
            raise ValueError(f"no frame may hold the positions {p0} to {p1}")
        self._prefix.update(self._tokens[4 * p0 : 4 * p1])
        header = struct.pack("<II32sB3xII", p0, p1, self._prefix.digest(), NO_CODEC, 1, p0)
        record = self._record(FRAME, len(header) + (p1 - p0) * self._layout.position_bytes)
        self.position, self._n_frames = p1, self._n_frames + 1
        return record, record.begin + record.add(header)

    def _message(self, kind, message):
        payload = json.dumps(message, separators=(",", ":")).encode()
        record = self._record(kind, len(payload))
        return record.begin + record.add(payload) + record.mac()

    def _record(self, kind, length):
        record = Record(self._key, kind, self._index, length)
        self._index += 1
        return record
