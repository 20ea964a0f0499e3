"""The prompts that vLLM computes for other nodes, and how far each one is.

Two threads meet here. vLLM's thread reports which blocks a prompt has and which layers of which positions are in them; it never
waits, except for the copy of one layer. The node's event loop sends the rows. A prompt's blocks stay allocated until its
handoff is closed, so rows are copied when the socket has room for them and need no memory of their own. Layers are counted that
keep rows; the states of those between them are in blocks, too.
"""

import asyncio
import contextlib
import threading
import time

from .errors import NodeError, unavailable


class Progress:
    """The positions before `whole` have all layers; those from there to before `step` have the first `n_layers` ones."""

    def __init__(self, whole=0, step=0, n_layers=0):
        self.whole, self.step, self.n_layers = whole, step, n_layers

    def has(self, layer, p1):
        return p1 <= self.whole or (p1 <= self.step and layer < self.n_layers)


class Handoff:
    """One prompt. vLLM's thread calls `begin_step`, `layer_done`, `end_step` and `fail`; the event loop everything else."""

    def __init__(self, handoff, n_tokens, gives_way, loop):
        self.id, self.n_tokens, self.gives_way = handoff, n_tokens, gives_way
        self.blocks, self.progress = [], Progress()
        self.n_cached, self.began, self.computed = 0, None, None
        # The decode node knows that it has begun.
        self.told = False
        self.created, self.export_seconds, self.mac_seconds = time.monotonic(), 0.0, 0.0
        # What the device must have done before the rows of a layer may be copied.
        self.ready = None
        self.error = None
        self.closed = False
        # Held while rows are copied out of the blocks.
        self.copying = threading.Lock()
        self._loop, self._changed = loop, asyncio.Event()
        self._layer_times = []

    def begin_step(self, computed, scheduled, blocks):
        """A step computes `scheduled` positions after the first `computed` ones. `blocks` has a list for each of vLLM's groups."""
        if self.began is None:
            self.began, self.n_cached = time.monotonic(), min(computed, self.n_tokens)
        self.blocks = blocks
        self._layer_times = []
        self.progress = Progress(min(computed, self.n_tokens), min(computed + scheduled, self.n_tokens))
        self._wake()

    def layer_done(self, n_layers, ready):
        """The step has written the first `n_layers` layers; on a device once `ready` is over."""
        self.ready = ready
        if n_layers <= 2:
            self._layer_times.append(time.monotonic())
        self._step_reaches(n_layers)

    def end_step(self, n_layers, ready):
        self.ready = ready
        self._step_reaches(n_layers)
        self.progress = Progress(self.progress.step, self.progress.step)
        self._wake()

    def _step_reaches(self, n_layers):
        progress = self.progress
        if n_layers > progress.n_layers:
            self.progress = Progress(progress.whole, progress.step, n_layers)
            self._wake()

    def note_computed(self):
        """All layers of all positions are there."""
        if self.computed is None and self.progress.step >= self.n_tokens:
            self.computed = time.monotonic()

    def fail(self, error):
        """The blocks are about to be given to others: no row is copied any more."""
        with self.copying:
            if self.error is None and not self.closed:
                self.error = error
        self._wake()

    def close(self):
        """Nothing is copied after this, so that the blocks can be freed."""
        with self.copying:
            self.closed = True

    def layer_seconds(self):
        """How long the second layer of the running step took; `None` before it is done."""
        times = self._layer_times
        return times[1] - times[0] if len(times) > 1 else None

    async def change(self, seconds):
        """Waits until vLLM has reported something, for so long at most. Returns whether it has."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        self._changed.clear()
        return True

    def _wake(self):
        # The loop ends with the node, while vLLM may still compute.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)


class Handoffs:
    """All handoffs of a node, by their ids. Bounded: further ones are refused, and the decode node computes its prompt."""

    def __init__(self, limit):
        self._limit = limit
        self._by_id = {}
        self._lock = threading.Lock()

    def open(self, handoff, n_tokens, gives_way, loop):
        with self._lock:
            if handoff in self._by_id:
                raise NodeError("invalid_request", message="this handoff runs already")
            if gives_way and any(not other.gives_way for other in self._by_id.values()):
                raise NodeError("gave_way")
            if len(self._by_id) >= self._limit:
                raise NodeError("queue_full", limit=self._limit)
            opened = Handoff(handoff, n_tokens, gives_way, loop)
            yielding = [] if gives_way else [other for other in self._by_id.values() if other.gives_way]
            self._by_id[handoff] = opened
        for other in yielding:
            other.fail(NodeError("gave_way"))
        return opened

    def close(self, handoff):
        handoff.close()
        with self._lock:
            self._by_id.pop(handoff.id, None)

    def find(self, handoff):
        with self._lock:
            return self._by_id.get(handoff)

    def load(self):
        """Those that vLLM computes, those that wait for it, and the positions that are missing."""
        with self._lock:
            all_ = list(self._by_id.values())
        running = [one for one in all_ if one.began is not None]
        missing = sum(max(0, one.n_tokens - one.progress.whole) for one in all_)
        return len(running), len(all_) - len(running), missing

    def fail_all(self, reason):
        with self._lock:
            all_ = list(self._by_id.values())
        for one in all_:
            one.fail(unavailable(reason))
