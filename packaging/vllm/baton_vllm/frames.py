"""Writes a handoff stream as docs/kv-frames.md describes it: records with keyed BLAKE3, and frames and states without a codec.

A frame's length follows from its positions, so its first layers can leave before its last ones are computed.
"""

import json
import struct
from dataclasses import dataclass

from blake3 import blake3

HEAD, FRAME, END, ERROR, WAIT, STATE = 1, 2, 3, 4, 5, 6
MAC_BYTES = 32
MAX_FRAME_POSITIONS = 4096
MAX_FRAME_BYTES = 1 << 30
NO_CODEC = 0
VALUE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# The type of states on the wire, as llama.cpp keeps them.
STATE_DTYPE = "f32"
# The states of a layer that keeps some: the last inputs of its convolution, and its memory.
N_STATES = 2
# Format 2 has states; readers of version 1 refuse it.
PLAIN_VERSION, STATES_VERSION = 1, 2


@dataclass(frozen=True)
class LinearLayer:
    """A layer that keeps two states of a sequence instead of rows: how many values each has."""

    n_convolution: int
    n_recurrence: int
    # How many layers with rows come before it. The next one of these is computed after it.
    n_before: int

    @property
    def n_bytes(self):
        return (self.n_convolution + self.n_recurrence) * VALUE_BYTES[STATE_DTYPE]


@dataclass(frozen=True)
class Window:
    """Layers that attend to the last positions only: how many, the own one included, and the numbers of these layers."""

    n_positions: int
    layers: tuple


@dataclass(frozen=True)
class Layout:
    """The shape of a model's KV: equal layers that keep rows, some perhaps with a window, and the layers that keep states."""

    rope: str
    n_layers: int
    n_values: int
    dtype: str
    linear: tuple = ()
    window: Window | None = None

    @property
    def row_bytes(self):
        return self.n_values * VALUE_BYTES[self.dtype]

    @property
    def state_bytes(self):
        return sum(layer.n_bytes for layer in self.linear)

    @property
    def position_bytes(self):
        return 2 * self.n_layers * self.row_bytes

    @property
    def max_frame_positions(self):
        return max(1, min(MAX_FRAME_POSITIONS, MAX_FRAME_BYTES // self.position_bytes))

    def json(self):
        rows = {"dtype": self.dtype, "n_values": self.n_values}
        sections = [
            ({} if section is None else {"window": section.n_positions}) | {"layers": [{"k": rows, "v": rows}] * len(layers)}
            for section, layers in self.sections()
        ]
        layout = {"rope": self.rope, "sections": sections}
        states = [
            {"kind": kind, "dtype": STATE_DTYPE, "n_values": n_values}
            for layer in self.linear
            for kind, n_values in (("convolution", layer.n_convolution), ("recurrence", layer.n_recurrence))
        ]
        return layout | {"states": states} if states else layout


    def sections(self):
        """The window and the layers of each section: those that keep every position come first."""
        windowed = self.window.layers if self.window else ()
        full = tuple(layer for layer in range(self.n_layers) if layer not in windowed)
        return [(window, layers) for window, layers in ((None, full), (self.window, windowed)) if layers]

    def starts(self, p0, p1, end):
        """The first position of each section in a frame of a handoff that ends at `end`.

        Of a window there are those rows alone that the token at `end` looks back to: vLLM may have freed the blocks of others.
        """
        def start(window):
            return p0 if window is None else max(p0, min(p1, end + 1 - window.n_positions))

        return [start(window) for window, _ in self.sections()]

    def layers(self, starts):
        """The layers in the order of a frame, each with the first position that the frame has of it."""
        return [(layer, start) for (_, layers), start in zip(self.sections(), starts) for layer in layers]

    @property
    def longest_wait(self):
        """After how many layers at most the next one in a frame's order is computed."""
        n_computed, longest = 0, 1
        for layer, _ in self.layers([0] * len(self.sections())):
            longest = max(longest, layer + 1 - n_computed)
            n_computed = max(n_computed, layer + 1)
        return longest


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
        # The layers whose states are written.
        self.n_linear = 0

    def head(self):
        has_states = bool(self._layout.linear)
        return self._message(HEAD, {
            "version": STATES_VERSION if has_states else PLAIN_VERSION,
            "handoff": self._handoff.hex(),
            "fingerprint": self._fingerprint,
            "layout": self._layout.json(),
            "start": self._start,
            "end": self.end_position,
            "codec": "none",
            **({"states_at": [self.end_position]} if has_states else {}),
        })

    def wait(self, has_begun=False):
        record = {"queued_ahead": 0, "n_done": self.position - self._start}
        return self._message(WAIT, record | {"has_begun": True} if has_begun else record)

    def error(self, error):
        return self._message(ERROR, error.body)

    def end(self, timings):
        if self.position != self.end_position:
            raise ValueError(f"the handoff ends at {self.end_position} and was written up to {self.position}")
        if self.n_linear != len(self._layout.linear):
            raise ValueError(f"the states of {self.n_linear} layers were written, not of {len(self._layout.linear)}")
        return self._message(END, {
            "n_frames": self._n_frames,
            "start": self._start,
            "end": self.end_position,
            "timings": timings,
        })

    def frame(self, p1):
        """Begins the frame of the positions from `position` to before `p1`. Returns the first positions of its sections, too. Its
        rows follow as pieces: K and V of each layer, in the order of the layout."""
        p0 = self.position
        if not p0 < p1 <= min(self.end_position, p0 + self._layout.max_frame_positions):
            raise ValueError(f"no frame may hold the positions {p0} to {p1}")
        self._prefix.update(self._tokens[4 * p0 : 4 * p1])
        starts = self._layout.starts(p0, p1, self.end_position)
        n = len(starts)
        header = struct.pack(f"<II32sB3xI{n}I", p0, p1, self._prefix.digest(), NO_CODEC, n, *starts)
        n_rows = sum(p1 - start for _, start in self._layout.layers(starts))
        record = self._record(FRAME, len(header) + 2 * n_rows * self._layout.row_bytes)
        self.position, self._n_frames = p1, self._n_frames + 1
        return record, record.begin + record.add(header), starts

    def states(self):
        """Begins the record of the next layer's states after the whole prompt. They follow as pieces."""
        if self.n_linear >= len(self._layout.linear):
            raise ValueError("the states of all layers are written")
        prefix = blake3(self._tokens).digest()
        header = struct.pack("<IIIB3x32s", self.end_position, N_STATES * self.n_linear, N_STATES, NO_CODEC, prefix)
        record = self._record(STATE, len(header) + self._layout.linear[self.n_linear].n_bytes)
        self.n_linear += 1
        return record, record.begin + record.add(header)

    def _message(self, kind, message):
        payload = json.dumps(message, separators=(",", ":")).encode()
        record = self._record(kind, len(payload))
        return record.begin + record.add(payload) + record.mac()

    def _record(self, kind, length):
        record = Record(self._key, kind, self._index, length)
        self._index += 1
        return record
