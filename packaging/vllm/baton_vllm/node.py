"""The node protocol's server (schemas/src/node.rs): the calls that a prefill node must answer.

`info` and `load`, the stream of loads, `prefill`, and `noise` for measuring the link. Other calls are refused with a reason;
endpoints make them to nodes that decode.
"""

import asyncio
import hmac
import json
import logging
import os
import re
import time

from blake3 import blake3

from . import frames, http, streams
from .errors import NodeError, invalid, unavailable, unsupported
from .frames import Writer
from .loops import run_on_thread

log = logging.getLogger("vllm.baton")

BASE = "/node/v1"
KV_UPGRADE = "baton-kv"
STREAMS_UPGRADE = "baton-streams"
CONTENT_TYPE = "application/x-baton-kv"
SIGN_OF_LIFE_SECONDS = 1
HEALTH_SECONDS = 1
# Missed answers in a row until vLLM counts as gone. On a busy machine it may miss one or two.
MAX_MISSES = 3
# Rows that are there leave in frames of this size, so that the reader imports one while the next is on its way.
FRAME_BYTES = 6 << 20
# If a layer takes longer, a frame begins only when all its layers are there. In a frame there is no sign of life, and the reader
# gives up after 5 s of silence.
SLOW_LAYER_SECONDS = 1.0
# The longest wait for a layer within a frame, below those 5 s.
LAYER_SECONDS = 4.0
MAX_NOISE_BYTES = 64 << 20
NOISE = os.urandom(256 << 10)


class Node:
    """One node, which sends what `rows` gathers (ranks.py)."""

    def __init__(self, key, layout, info, rows, handoffs, api, overlap=True):
        self._key, self._layout, self._rows, self._handoffs, self._api = key.encode(), layout, rows, handoffs, api
        self._info = {**info, "process": int.from_bytes(os.urandom(8), "little") >> 1 or 1,
                      "streams": {"oldest": streams.VERSION, "newest": streams.VERSION}}
        self._fingerprint, self._n_ctx = info["fingerprint"], info["n_ctx"]
        self._overlap = overlap
        self._healthy = False
        self._rate = 0.0

    # Life

    def start(self, host, port, tls=None):
        """Serves on a thread of its own. Errors: the address cannot be listened on."""
        run_on_thread("baton-node", lambda started: self._run(host, port, tls, started))

    async def _run(self, host, port, tls, started):
        server = await http.Server(self.answer, self.admit).listen(host, port, tls)
        started.set()
        async with server:
            await self._watch()

    async def _watch(self):
        """vLLM takes requests only a while after its workers are there."""
        n_missed = MAX_MISSES
        while True:
            n_missed = 0 if await self._api.is_healthy() else n_missed + 1
            healthy = n_missed < MAX_MISSES
            if healthy != self._healthy:
                log.info("Baton: vLLM %s", "takes prompts" if healthy else "does not answer")
            self._healthy = healthy
            await asyncio.sleep(HEALTH_SECONDS)

    # Calls

    def admit(self, headers):
        """Errors: the caller does not present the cluster key."""
        presented = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if not hmac.compare_digest(blake3(presented).digest(), blake3(self._key).digest()):
            raise NodeError("unauthorized")

    async def answer(self, request, peer):
        """Replies to a request. Returns whether the connection may be used again."""
        call = (request.method, request.path.removeprefix(BASE))
        if call == ("GET", "/load"):
            await peer.reply(200, json.dumps(self.load()).encode())
            return True
        if call == ("GET", "/noise"):
            return await self._noise(request, peer)
        if call == ("GET", "/streams"):
            return await self._streams(request, peer)
        if not self._healthy:
            raise unavailable("the model is loading")
        if call == ("GET", "/info"):
            await peer.reply(200, json.dumps(self._info).encode())
            return True
        if call == ("POST", "/prefill"):
            return await self._prefill(request, peer)
        raise unsupported("this call: the node is a vLLM server, which computes prompts for others")

    def load(self):
        """`NodeLoad` in schemas/src/node.rs."""
        active, queued, backlog = self._handoffs.load()
        phase = "serving" if self._healthy else "starting"
        return {"phase": phase, "active_slots": active, "queued": queued, "prefill_backlog": backlog,
                "free_cells": self._rows.n_positions, "prefill_tps": round(self._rate, 3)}

    async def _noise(self, request, peer):
        wanted = re.fullmatch(r"bytes=(\d{1,9})", request.query)
        if not wanted or int(wanted[1]) > MAX_NOISE_BYTES:
            raise invalid(f"at most {MAX_NOISE_BYTES} bytes can be requested")
        left = int(wanted[1])
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {left}\r\n\r\n"
        await peer.send(head.encode())
        while left:
            piece = NOISE[:left]
            left -= len(piece)
            await peer.send(piece)
        return True

    async def _streams(self, request, peer):
        offered = request.headers.get("baton-streams-versions", "")
        version = streams.common_version(offered)
        if version is None or not request.offers(STREAMS_UPGRADE):
            raise invalid("the connection offers no version of the stream protocol that this node speaks")
        await peer.switch(STREAMS_UPGRADE, f"baton-streams-version: {version}\r\n")
        try:
            await streams.serve(peer, self.load)
        except streams.Fault as fault:
            log.warning("Baton: an endpoint's connection ends: %s", fault)
        return False

    # Prefill

    async def _prefill(self, request, peer):
        wanted = parse_prefill(request.json(), self._fingerprint, self._n_ctx, self._info["n_vocab"])
        loop = asyncio.get_running_loop()
        handoff = self._handoffs.open(wanted["id"], len(wanted["tokens"]), wanted["gives_way"], loop)
        watch = None
        try:
            await loop.run_in_executor(None, self._rows.open, handoff)
            upgraded = request.offers(KV_UPGRADE)
            if upgraded:
                await peer.switch(KV_UPGRADE)
            else:
                head = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\nconnection: close\r\n\r\n"
                await peer.send(head.encode())
            work = asyncio.ensure_future(self._compute_and_send(wanted, handoff, peer))
            watch = asyncio.ensure_future(peer.left())
            done, _ = await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            if work not in done:
                log.info("Baton: a decode node has left a handoff after %.1f s", time.monotonic() - handoff.created)
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if work in done and work.exception():
                raise work.exception()
        except asyncio.TimeoutError:
            log.warning("Baton: a handoff ends: its reader has taken nothing for %d s", http.READ_SECONDS)
        except ConnectionError as error:
            log.warning("Baton: a handoff ends: %s", error or type(error).__name__)
        finally:
            if watch:
                watch.cancel()
            self._rows.close(handoff)
            self._handoffs.close(handoff)
        return False

    async def _compute_and_send(self, wanted, handoff, peer):
        """Sends the rows while vLLM computes them. Cancelling this aborts the prompt."""
        writer = Writer(self._key, bytes.fromhex(wanted["id"]), wanted["tokens"], wanted["start"], self._layout,
                        self._fingerprint)
        computing = asyncio.ensure_future(self._api.compute(wanted["id"], wanted["tokens"], wanted["cache_salt"]))
        computing.add_done_callback(lambda done: fail_with(handoff, done))
        try:
            await peer.send(writer.head())
            while writer.position < writer.end_position:
                p1 = await self._next_positions(handoff, writer, peer)
                if p1 == writer.end_position and states_go_first(self._layout, p1 - writer.position):
                    await self._send_states(handoff, writer, peer)
                await self._send_frame(handoff, writer, p1, peer)
            await self._send_states(handoff, writer, peer)
            await peer.send(writer.end(self._timings(handoff)))
        except NodeError as error:
            log.warning("Baton: a handoff failed at position %d: %s", writer.position, error)
            await peer.send(writer.error(error))
        finally:
            computing.cancel()

    async def _next_positions(self, handoff, writer, peer):
        """Waits until rows are there. Returns up to where the next frame goes."""
        return await self._awaited(
            handoff, writer, peer, lambda: next_frame(handoff, writer.position, self._layout, self._overlap))

    async def _awaited(self, handoff, writer, peer, found):
        """Waits for what `found` returns, with a sign of life each second. Errors: the prompt is lost."""
        last_sign = time.monotonic()
        while True:
            if handoff.error:
                raise handoff.error
            if handoff.began is not None and not handoff.told:
                handoff.told = True
                await peer.send(writer.wait(has_begun=True))
            if result := found():
                return result
            if time.monotonic() - last_sign >= SIGN_OF_LIFE_SECONDS:
                await peer.send(writer.wait(handoff.told))
                last_sign = time.monotonic()
            await handoff.change(SIGN_OF_LIFE_SECONDS / 2)

    async def _send_states(self, handoff, writer, peer):
        """Sends the states that are not sent yet, those of each layer once it is computed for the whole prompt."""
        loop, end = asyncio.get_running_loop(), writer.end_position
        for number in range(writer.n_linear, len(self._layout.linear)):
            layer = self._layout.linear[number]
            await self._awaited(handoff, writer, peer, lambda: handoff.progress.has(layer.n_before, end))
            try:
                record = await loop.run_in_executor(None, self._states, handoff, writer, number)
            except ConnectionAbortedError:
                if handoff.error is None:
                    raise
                # Nothing of this record has left, so the reader is told why.
                raise handoff.error from None
            await peer.send(*record)

    def _states(self, handoff, writer, number):
        """The record of a layer's states, in pieces."""
        began = time.monotonic()
        states = self._rows.copy_states(handoff, number, began + LAYER_SECONDS)
        copied = time.monotonic()
        record, head = writer.states()
        pieces = [head, *map(record.add, states), record.mac()]
        handoff.export_seconds += copied - began
        handoff.mac_seconds += time.monotonic() - copied
        return pieces

    async def _send_frame(self, handoff, writer, p1, peer):
        """Sends a frame's layers as they are computed. A failure cuts the stream: the record cannot be taken back."""
        record, head, starts = writer.frame(p1)
        await peer.send(head)
        loop = asyncio.get_running_loop()
        for layer, p0 in self._layout.layers(starts):
            if p0 == p1:
                continue
            deadline = time.monotonic() + LAYER_SECONDS
            while not handoff.progress.has(layer, p1):
                if handoff.error:
                    raise ConnectionAbortedError(f"a prompt was lost in the middle of a frame: {handoff.error}")
                if not await handoff.change(max(0, deadline - time.monotonic())):
                    raise ConnectionAbortedError(f"vLLM took more than {LAYER_SECONDS} s for a layer in the middle of a frame")
            await peer.send(*await loop.run_in_executor(None, self._layer, handoff, record, layer, p0, p1, deadline))
        await peer.send(record.mac())

    def _layer(self, handoff, record, layer, p0, p1, deadline):
        """K and V of a layer, added to their record."""
        began = time.monotonic()
        rows = self._rows.copy(handoff, layer, p0, p1, deadline)
        copied = time.monotonic()
        for piece in rows:
            record.add(piece)
        handoff.export_seconds += copied - began
        handoff.mac_seconds += time.monotonic() - copied
        return rows

    def _timings(self, handoff):
        began, computed = handoff.began, handoff.computed or time.monotonic()
        n_computed = handoff.n_tokens - handoff.n_cached
        if n_computed > 0 and computed > began:
            rate = n_computed / (computed - began)
            self._rate = rate if self._rate == 0 else 0.7 * self._rate + 0.3 * rate
        return {
            "queue_ms": 1e3 * (began - handoff.created),
            "prefill_ms": 1e3 * (computed - began),
            "export_ms": 1e3 * handoff.export_seconds,
            "encode_ms": 1e3 * handoff.mac_seconds,
            "n_computed": n_computed,
            "n_cached": handoff.n_cached,
        }


def fail_with(handoff, computing):
    """vLLM's call has ended: if it failed, so does the handoff."""
    if computing.cancelled():
        return
    error = computing.exception()
    if error is not None:
        handoff.fail(error if isinstance(error, NodeError) else NodeError("internal", detail=type(error).__name__))
    elif handoff.began is None:
        handoff.fail(NodeError("internal", detail="vLLM answered without computing the prompt"))


def states_go_first(layout, n_positions):
    """What has more bytes travels while the last step is computed: the states, or the rows of its positions."""
    return layout.state_bytes > n_positions * layout.position_bytes


def next_frame(handoff, p0, layout, overlap):
    """One past the last position of the frame that can begin at `p0`; 0 if none can."""
    progress, end = handoff.progress, handoff.n_tokens
    if not overlap and progress.whole < end:
        return 0
    if progress.whole > p0:
        return min(progress.whole, p0 + max(1, min(layout.max_frame_positions, FRAME_BYTES // layout.position_bytes)))
    seconds = handoff.layer_seconds()
    if progress.step > p0 and seconds is not None and seconds * layout.longest_wait < SLOW_LAYER_SECONDS:
        return min(progress.step, p0 + layout.max_frame_positions)
    return 0


def parse_prefill(body, fingerprint, n_ctx, n_vocab):
    """A `PrefillRequest` (schemas/src/handoff.rs), checked."""
    handoff, tokens, start = body.get("handoff"), body.get("tokens"), body.get("start")
    if not isinstance(handoff, str) or not re.fullmatch("[0-9a-f]{32}", handoff):
        raise invalid("the handoff's id is malformed")
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < n_vocab for t in tokens):
        raise invalid("the tokens are no list of this model's tokens")
    if type(start) is not int or not 0 <= start < len(tokens):
        raise invalid(f"KV is wanted from position {start} on, and there are {len(tokens)} tokens")
    if len(tokens) >= n_ctx:
        raise NodeError("context_overflow", n_prompt=len(tokens), n_ctx=n_ctx)
    theirs = body.get("fingerprint")
    if not isinstance(theirs, dict) or theirs.get("vocabulary") != fingerprint["vocabulary"]:
        raise invalid("the two nodes run models with different vocabularies")
    codecs = body.get("codecs")
    if not isinstance(codecs, list) or frames.NO_CODEC not in codecs:
        raise invalid("this node sends KV without a codec, which the decode node's kv_codecs do not allow")
    scope = body.get("cache_scope")
    return {
        "id": handoff,
        "tokens": tokens,
        "start": start,
        "gives_way": body.get("gives_way") is True,
        "cache_salt": f"baton {json.dumps(scope)}"[:1024] if scope else None,
    }
