"""The connection that carries a node's loads to an endpoint, as docs/node-streams.md describes it.

This node generates nothing, so it refuses the other work of streams.
"""

import asyncio
import json
import struct

from .errors import unsupported

VERSION = 1
START, BODY, CREDIT, CANCEL = 1, 2, 3, 4
ACCEPTED, EVENT, ERROR, END, ALIVE = 17, 18, 20, 21, 22
LOADS = 3
HEAD_BYTES = 12
MAX_PAYLOAD = 66_048
MAX_CREDIT = 1 << 16
MAX_STREAMS = 64
# Answers that wait for an endpoint that does not read. Its next frames are read when these have left.
MAX_UNSENT = 64
# A load is sent when it changes, looked at so often, and at least twice a second.
TICK_SECONDS = 0.1
HEARTBEAT_TICKS = 5


def common_version(offered):
    """The version to speak with an endpoint that offers `1-2`. `None`: there is none."""
    oldest, dash, newest = offered.partition("-")
    if not (dash and oldest.isascii() and oldest.isdigit() and newest.isascii() and newest.isdigit()):
        return None
    return VERSION if int(oldest) <= VERSION <= int(newest) else None


def frame(kind, stream, payload=b""):
    return struct.pack("<IB3xI", len(payload), kind, stream) + payload


class Fault(Exception):
    """The endpoint broke the protocol; the connection ends."""


class Streams:
    """What runs on one connection. `receive` takes an endpoint's frame, `tick` gives the bytes that are due."""

    def __init__(self):
        self._credits, self._sent, self._out = {}, {}, []
        self._n_ticks = 0

    def receive(self, kind, stream, payload):
        if stream == 0:
            raise Fault("a frame without a stream")
        if kind == START:
            self._start(stream, payload)
        elif kind == CREDIT:
            if len(payload) != 4:
                raise Fault("a credit of another length")
            if stream in self._credits:
                self._credits[stream] += struct.unpack("<I", payload)[0]
                if self._credits[stream] > MAX_CREDIT:
                    raise Fault("too much credit")
        elif kind == CANCEL:
            self._credits.pop(stream, None)
            self._sent.pop(stream, None)
        elif kind != BODY:
            raise Fault(f"a frame of the kind {kind}")

    def is_full(self):
        """Whether further frames must wait until the answers to the last ones are sent."""
        return len(self._out) >= MAX_UNSENT

    def _start(self, stream, payload):
        if len(payload) < 12:
            raise Fault("a start that is too short")
        work, _, _, credit, _ = struct.unpack_from("<BBHII", payload)
        if credit > MAX_CREDIT:
            raise Fault("too much credit")
        if work != LOADS or len(self._credits) >= MAX_STREAMS:
            error = json.dumps({"error": unsupported("generating: this vLLM server computes prompts for others").body})
            self._out.append(frame(ERROR, stream, error.encode()))
            return
        self._credits[stream] = credit
        self._out.append(frame(ACCEPTED, stream))

    def tick(self, load):
        """The frames to send now: loads that changed, or a sign of life."""
        self._n_ticks += 1
        due, self._out = self._out, []
        for stream, credit in self._credits.items():
            at, sent = self._sent.get(stream, (-HEARTBEAT_TICKS, None))
            if credit and (sent != load or self._n_ticks - at >= HEARTBEAT_TICKS):
                due.append(frame(EVENT, stream, json.dumps(load).encode()))
                self._credits[stream] = credit - 1
                self._sent[stream] = (self._n_ticks, load)
        if not due and self._n_ticks % HEARTBEAT_TICKS == 0:
            due.append(frame(ALIVE, 0))
        return b"".join(due)


async def serve(peer, load):
    """Serves an upgraded connection until the endpoint closes it. `load` returns the node's load."""
    streams = Streams()

    async def read():
        while True:
            head = await peer.reader.readexactly(HEAD_BYTES)
            length, kind, stream = struct.unpack("<IB3xI", head)
            if length > MAX_PAYLOAD or any(head[5:8]):
                raise Fault("a malformed head")
            payload = await peer.reader.readexactly(length)
            while streams.is_full():
                await asyncio.sleep(TICK_SECONDS)
            streams.receive(kind, stream, payload)

    reading = asyncio.ensure_future(read())
    try:
        while not reading.done():
            if due := streams.tick(load()):
                await peer.send(due)
            await asyncio.wait([reading], timeout=TICK_SECONDS)
        reading.result()
    finally:
        reading.cancel()
