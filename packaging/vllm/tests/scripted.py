"""A node without vLLM: a scripted engine that reports layers as told, rows with known values, and an API that plays vLLM's."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

import kv_reader
from baton_vllm.frames import Layout, LinearLayer
from baton_vllm.handoffs import Handoffs
from baton_vllm.node import Node
from baton_vllm.prompts import VllmApi
from baton_vllm.ranks import Gathered
from baton_vllm.states import DeltaNet

KEY = "a cluster key"
LAYOUT = Layout("half_split", 3, 8, "f16")
SHAPE = DeltaNet(2, 4, 4, 2)
# A linear layer before the first layer with rows, before the last one, and after all.
HYBRID = replace(
    LAYOUT, linear=tuple(LinearLayer(SHAPE.n_convolution, SHAPE.n_recurrence, n_before) for n_before in (0, 2, 3)))
FINGERPRINT = {"vocabulary": "aa" * 32, "weights": "55" * 32}
N_CTX = 10_000
INFO = {"model": "m", "n_ctx": N_CTX, "n_vocab": 1000, "fingerprint": FINGERPRINT}


def value(layer, is_v, position):
    return np.float16(layer * 100 + is_v * 50 + position % 50)


class Rows:
    n_positions = 12_345

    def copy(self, handoff, layer, p0, p1):
        def rows(is_v):
            return np.concatenate([np.full(LAYOUT.n_values, value(layer, is_v, p)) for p in range(p0, p1)]).tobytes()

        return [rows(0), rows(1)]

    def copy_states(self, handoff, number):
        return [np.full(n_bytes // 4, number + 1, np.float32).tobytes() for n_bytes in SHAPE.part_bytes]


class Api:
    """vLLM's API. `prompts` are the bodies that came; each is held until `answer` gives its status, or None to cut it off."""

    def __init__(self):
        self.prompts, self.left, self.answers = [], [], {}
        self._came = threading.Condition()
        self.port, self.healthy = None, True
        started = threading.Event()

        async def run():
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port, self._loop = server.sockets[0].getsockname()[1], asyncio.get_running_loop()
            started.set()
            await asyncio.sleep(3600)

        threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
        assert started.wait(10)

    async def _serve(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            # A check of vLLM's health that has waited too long.
            return writer.close()
        if head.startswith("GET /health"):
            writer.write(f"HTTP/1.1 {200 if self.healthy else 503} x\r\n\r\n".encode())
            return writer.close()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        handoff = body["kv_transfer_params"]["baton_handoff"]
        self.answers[handoff] = asyncio.get_running_loop().create_future()
        with self._came:
            self.prompts.append(body)
            self._came.notify_all()
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([gone, self.answers[handoff]], return_when=asyncio.FIRST_COMPLETED)
        if self.answers[handoff].done():
            if status := self.answers[handoff].result():
                writer.write(f"HTTP/1.1 {status} x\r\n\r\n{{}}".encode())
        else:
            self.left.append(handoff)
        writer.close()

    def answer(self, handoff, status):
        self._loop.call_soon_threadsafe(lambda: self.answers[handoff].done() or self.answers[handoff].set_result(status))

    def prompt(self, n=1):
        """The body of the n-th prompt, once it has come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.prompts) >= n, 10), "no prompt came"
            return self.prompts[n - 1]


class Scripted:
    """A node, and the engine behind it. `tls` is the context of a server, `trusts` the file of the authorities that calls trust.

    `rows` are what the node sends instead of rows with known values.
    """

    def __init__(self, tls=None, trusts=None, rows=None, layout=LAYOUT, **options):
        self.api, self.handoffs = Api(), Handoffs(options.pop("limit", 8))
        rows = rows or Gathered(Rows(), layout, shape=SHAPE)
        self.node = Node(KEY, layout, INFO, rows, self.handoffs, VllmApi("127.0.0.1", self.api.port), **options)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._trusts = trusts
        self.node.start("127.0.0.1", self.port, tls)
        eventually(lambda: self.call("GET", "/load")[1]["phase"] == "serving")

    def handoff(self, prompt):
        return eventually(lambda: self.handoffs.find(prompt["kv_transfer_params"]["baton_handoff"]))

    def open(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        if self._trusts is None:
            return connection
        return ssl.create_default_context(cafile=self._trusts).wrap_socket(connection, server_hostname="localhost")

    def connect(self):
        return contextlib.closing(self.open())

    def call(self, method, path, body=b"", key=KEY, headers=""):
        """The status and the JSON of a reply."""
        with self.connect() as connection:
            connection.sendall(request(method, path, body, key, headers))
            head, _, reply = received(connection).partition(b"\r\n\r\n")
            return int(head.split()[1]), json.loads(reply) if reply else None

    def prefill(self, tokens, **more):
        return Pull(self, tokens, **more)


def step(handoff, computed, scheduled, n_layers=LAYOUT.n_layers, ends=True):
    """What vLLM reports of a step, or of the first layers of one."""
    handoff.begin_step(computed, scheduled, [])
    for layer in range(n_layers):
        handoff.layer_done(layer + 1, None)
    if ends:
        end_step(handoff)


def end_step(handoff):
    handoff.note_computed()
    handoff.end_step(LAYOUT.n_layers, None)


def request(method, path, body=b"", key=KEY, headers=""):
    head = f"{method} /node/v1{path} HTTP/1.1\r\nhost: node\r\nauthorization: Bearer {key}\r\n{headers}"
    close = "" if "connection:" in headers else "connection: close\r\n"
    return f"{head}{close}content-length: {len(body)}\r\n\r\n".encode() + body


def received(connection):
    """All bytes until the peer closes, or until a whole reply with a length has come."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
        head, end, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if end and lengths and len(body) >= int(lengths[0].split(b":")[1]):
            break
    return data


class Pull:
    """A decode node's request. `n_bytes` grows while records come."""

    def __init__(self, scripted, tokens, start=0, upgrade=True, **more):
        self.tokens, self.id = tokens, os.urandom(16)
        body = {"handoff": self.id.hex(), "tokens": tokens, "start": start, "codecs": [0], "fingerprint": FINGERPRINT, **more}
        offer = "connection: upgrade\r\nupgrade: baton-kv\r\n" if upgrade else ""
        self.connection = scripted.open()
        self.connection.sendall(request("POST", "/prefill", json.dumps(body).encode(), headers=offer))
        self._data = b""
        while b"\r\n\r\n" not in self._data:
            self._read()
        self.head, _, self._data = self._data.partition(b"\r\n\r\n")

    def _read(self):
        piece = self.connection.recv(1 << 16)
        self._data += piece
        return bool(piece)

    def n_bytes(self, seconds=0.3):
        """How many bytes have come, after waiting so long for more."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                self._read()
        self.connection.settimeout(10)
        return len(self._data)

    def reaches(self, n):
        """Waits until so many bytes have come."""
        while len(self._data) < n:
            assert self._read(), f"the stream ended after {len(self._data)} bytes"
        return True

    def events(self):
        """All records, once the node has closed the connection. Of a stream that was cut: None at the end."""
        while self._read():
            pass
        self.connection.close()
        return self._records()

    def has_whole(self, kind):
        """Waits until a record of this kind has come, to its last byte."""
        while kind not in kinds(self._records()):
            assert self._read(), f"the stream ended after {len(self._data)} bytes"

    def _records(self):
        events = []
        try:
            for event in kv_reader.read(self._data, KEY.encode(), self.id, self.tokens):
                events.append(event)
        except (struct.error, ValueError):
            events.append(None)
        return events

    def leave(self):
        self.connection.close()


def eventually(holds, seconds=10):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return found


def kinds(events):
    """The kinds of records, without signs of life."""
    return [event and event[0] for event in events if not event or event[0] != "wait"]


def positions(events):
    return [(frame.p0, frame.p1) for kind, frame in events if kind == "frame"]


def holds_right_rows(events):
    for kind, frame in events:
        if kind == "frame":
            for layer, tensors in enumerate(frame.tensors[0]):
                for is_v, rows in enumerate(tensors):
                    wanted = [value(layer, is_v, p) for p in range(frame.p0, frame.p1)]
                    assert (rows == np.array(wanted)[:, None]).all()
    return True
