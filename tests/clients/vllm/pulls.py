"""A decode node's pull without a decode node, and a slow link: what the wire costs beside vLLM's work."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from typing import NamedTuple

import numpy as np

from fronts import eventually
from server import CLUSTER_KEY


class Pull(NamedTuple):
    """Seconds from the request; `computed` is the node's own time of the last layer."""

    n_bytes: int
    computed: float
    ended: float
    n_cached: int

    @property
    def unhidden(self):
        return max(0.0, self.ended - self.computed)


def info(port):
    """The node's description, once it has seen that vLLM takes prompts."""
    call = urllib.request.Request(f"http://127.0.0.1:{port}/node/v1/info", headers={"authorization": f"Bearer {CLUSTER_KEY}"})

    told = []

    def answers():
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(call, timeout=20) as reply:
            told.append(json.load(reply))
        return told

    eventually(answers, "the node's description", 20)
    # The second name is that of layouts with states.
    return told[0] | {"kv": told[0].get("kv") or told[0]["kv_2"]}


def pull(port, tokens, vocabulary, seconds=300):
    """Pulls a prompt's KV and reads the end."""
    stream, ended = received(port, tokens, vocabulary, seconds)
    *_, (kind, payload) = records(stream)
    assert kind == 3, (kind, bytes(payload[:500]))
    timings = json.loads(payload)["timings"]
    computed = (timings["queue_ms"] + timings["prefill_ms"]) / 1e3
    return Pull(len(stream), computed, ended, timings["n_cached"])


def rows(port, tokens, known):
    """A prompt's KV in f16: [layers, K and V, positions, values]."""
    layers = known["kv"]["layout"]["sections"][0]["layers"]
    n_values = layers[0]["k"]["n_values"]
    stream, _ = received(port, tokens, known["fingerprint"]["vocabulary"])
    *frames, (end, _) = records(stream)
    assert end == 3, f"the stream was cut after {len(stream)} bytes"
    frames = [payload for kind, payload in frames if kind == 2]
    # A frame begins with its positions, the prefix's hash, the codec and the section; the rows follow.
    rows = [np.frombuffer(frame[52:], np.float16).reshape(len(layers), 2, -1, n_values) for frame in frames]
    return np.concatenate(rows, axis=2).astype(np.float32)


def states(port, tokens, known):
    """The states after a prompt: an array of f32 for each that the layout names, by its kind."""
    stream, _ = received(port, tokens, known["fingerprint"]["vocabulary"])
    *others, (end, _) = records(stream)
    assert end == 3, f"the stream was cut after {len(stream)} bytes"
    # A record of states begins with its position, which states it has, the codec and the prefix's hash.
    values = np.concatenate([np.frombuffer(payload[48:], np.float32) for kind, payload in others if kind == 6])
    shapes = known["kv"]["layout"]["states"]
    ends = np.cumsum([shape["n_values"] for shape in shapes])
    assert len(values) == ends[-1]
    return [(shape["kind"], part) for shape, part in zip(shapes, np.split(values, ends[:-1]))]


def received(port, tokens, vocabulary, seconds=300):
    """All bytes of a pull's stream, and how long it took."""
    fingerprint = {"vocabulary": vocabulary, "weights": "00" * 32}
    body = {"handoff": os.urandom(16).hex(), "tokens": tokens, "start": 0, "codecs": [0], "fingerprint": fingerprint}
    body = json.dumps(body).encode()
    head = f"POST /node/v1/prefill HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {CLUSTER_KEY}\r\n"
    head += f"connection: upgrade\r\nupgrade: baton-kv\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        began = time.monotonic()
        connection.sendall(head.encode() + body)
        data = bytearray()
        while piece := connection.recv(1 << 20):
            data += piece
        ended = time.monotonic() - began
    return data.partition(b"\r\n\r\n")[2], ended


def records(stream):
    """The kind and the payload of each record."""
    at = 0
    while at < len(stream):
        _, kind, _, length = struct.unpack_from("<4sB3xIQ", stream, at)
        yield kind, stream[at + 20 : at + 20 + length]
        at += 52 + length


class SlowLink:
    """Forwards connections to a port, and what comes back at a rate in bytes a second."""

    def __init__(self, port, rate):
        self._target, self._rate = port, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            near, _ = self._listener.accept()
            far = socket.socket()
            # Small buffers: what they hold has not crossed the link.
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            far.connect(("127.0.0.1", self._target))
            threading.Thread(target=self._forward, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._forward, args=(far, near, self._rate), daemon=True).start()

    @staticmethod
    def _forward(source, to, rate):
        free_at = time.monotonic()
        try:
            while piece := source.recv(16 << 10):
                if rate:
                    # An idle link saves nothing up; a sleep that lasted too long is made up for.
                    free_at = max(free_at, time.monotonic() - 0.05) + len(piece) / rate
                    time.sleep(max(0.0, free_at - time.monotonic()))
                to.sendall(piece)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            to.close()
