"""Computes an mlx-lm model for Baton's mlx engine, which starts this program (engines/src/mlx/worker/).

Standard input is a socket. Baton sends requests and this program answers each one, in order:

    frame:    u32 bytes of the head, u64 bytes of the payload (little-endian), the head (JSON), the payload
    request:  {"op": ...} and what the operation needs
    reply:    {"ok": true, ...}, {"error": text}, or, once a second while it works, {"busy": true}

KV crosses the socket as Baton hands it over: section by section, for each layer K, then V, each
[positions][KV heads * head size] in f16. A section is the layers that have the same window and the same heads; its positions
begin at its start. Layers that use the KV of others have none.
States of linear layers cross it as llama.cpp keeps them, layer by layer, in f32: of the convolution [channels][inputs], then
[V heads][V elements][K elements]. Their V heads are in llama.cpp's order: it counts K heads first, and mlx-lm V heads of a K head.
The program ends when the socket is closed, so it cannot outlive the process that started it.
"""

import json
import os
import select
import socket
import struct
import sys
import threading
import time

HEAD = struct.Struct("<IQ")
MAX_HEAD = 1 << 20
MAX_PAYLOAD = 1 << 34
BEAT_SECONDS = 1.0

# What libraries print must not reach the socket, which inherits the number of standard input.
wire = socket.socket(fileno=os.dup(0))
sending = threading.Lock()


def die_with_parent():
    """Ends this program when the other end of the socket is closed, even in the middle of an operation."""
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG, SIGKILL: reaches this process even if it is stopped.
        ctypes.CDLL(None).prctl(1, 9)

    def watch():
        if hasattr(select, "kqueue"):
            # macOS: poll() without events does not report the end of a connection there.
            queue = select.kqueue()
            queue.control([select.kevent(wire.fileno(), select.KQ_FILTER_READ, select.KQ_EV_ADD | select.KQ_EV_CLEAR)], 0)
            while not any(event.flags & select.KQ_EV_EOF for event in queue.control(None, 1)):
                pass
            os._exit(0)
        poll = select.poll()
        # No events: only the end of the connection is reported.
        poll.register(wire.fileno(), 0)
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def receive(n):
    data = bytearray(n)
    view = memoryview(data)
    while n:
        got = wire.recv_into(view[-n:])
        if got == 0:
            os._exit(0)
        n -= got
    return data


def send_frame(head, payload=()):
    """Sends a frame. `payload` is a list of byte strings. The caller holds `sending`."""
    head = json.dumps(head).encode()
    wire.sendall(HEAD.pack(len(head), sum(len(part) for part in payload)) + head)
    for part in payload:
        wire.sendall(part)


class Beat:
    """Sends signs of life while an operation runs. A stopped process sends none."""

    def __init__(self):
        self.working = False
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            time.sleep(BEAT_SECONDS)
            with sending:
                if self.working:
                    send_frame({"busy": True})

    def begin(self):
        self.working = True

    def reply(self, head, payload=()):
        with sending:
            self.working = False
            send_frame(head, payload)


class Worker:
    """A model, and the KV and states of its slots: for each slot a list with a cache for each layer."""

    def load(self, head, _):
        import mlx.core as mx
        import numpy as np
        from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
        from mlx_lm.utils import load_model
        from pathlib import Path

        self.mx, self.np = mx, np
        if head["device"] == "cpu":
            mx.set_default_device(mx.cpu)
        mx.set_cache_limit(head["cache_bytes"])
        if mx.default_device() == mx.cpu:
            # Compiling for a processor runs a C++ compiler, if there is one, in the middle of a request.
            mx.disable_compile()
        elif mx.metal.is_available():
            # As mlx-lm does: macOS would page out a model that is not wired.
            mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
        self.model, _ = load_model(Path(head["model"]), model_config=head["model_config"])
        self.interleaved, self.sections = head["interleaved"], head["sections"]
        # The layers that keep a state: of each K heads, V heads, elements of a head, and inputs of the convolution.
        states = head["states"] or {"layers": [], "n_k_heads": 1, "n_v_heads": 1, "head_size": 0, "n_inputs": 0}
        self.linear, self.heads = states["layers"], (states["n_k_heads"], states["n_v_heads"])
        self.state_head_size, self.n_inputs = states["head_size"], states["n_inputs"]
        # Wherever positions are counted, in the first layer that keeps KV.
        self.counted = min(layer for section in self.sections for layer in section["layers"])
        # Models with images have one that reads text.
        self.text = getattr(self.model, "language_model", self.model)
        self.logit_cap = getattr(self.text, "final_logit_softcapping", None)

        class SlotCache(KVCache):
            """Keeps every value as f16 would: then KV that was handed over equals KV that was computed here."""

            def update_and_fetch(self, keys, values):
                keys, values = (x.astype(mx.float16).astype(x.dtype) for x in (keys, values))
                return super().update_and_fetch(keys, values)

        made = self.model.make_cache() if hasattr(self.model, "make_cache") else [KVCache() for _ in self.model.layers]
        # mlx-lm keeps only the last positions of a layer with a window. A handoff and a prefix that is used again need others,
        # too. So these layers keep all of them, and the mask that the model asks for hides those outside of the window.
        windows = {KVCache: lambda cache: None, RotatingKVCache: lambda cache: cache.max_size}
        if self.linear:
            windows[ArraysCache] = lambda cache: "state" if len(cache.cache) == 2 else "states"
        other = {type(cache).__name__ for cache in made if type(cache) not in windows}
        if other:
            raise ValueError(f"its layers keep their state in {', '.join(sorted(other))}, which is not handed over")
        found = [windows[type(cache)](cache) for cache in made]
        expected = {layer: section["window"] for section in self.sections for layer in section["layers"]}
        expected |= {layer: "state" for layer in self.linear}
        if found != [expected[layer] for layer in sorted(expected)]:
            raise ValueError(f"its layers have the windows {found}, which its config.json does not say")
        self.new_cache = lambda: [ArraysCache(2) if layer in self.linear else SlotCache() for layer in range(len(made))]
        # One more for texts that become vectors.
        self.slots = [self.new_cache() for _ in range(head["n_slots"] + 1)]
        # The type of K follows from the weights; one token shows it, and that the model can be computed.
        cache = self.new_cache()
        logits = self.logits(self.text.model(mx.array([[0]]), cache=cache))
        for section in self.sections:
            heads = (section["n_kv_heads"], section["head_size"])
            for kv in (kv for layer in section["layers"] for kv in cache[layer].keys_and_values()):
                if (kv.shape[1], kv.shape[3]) != heads:
                    raise ValueError(f"its K or V has the shape {kv.shape}, which its config.json does not say")
        keys, _ = cache[self.counted].keys_and_values()
        mx.eval(logits, keys)
        self.dtype = keys.dtype
        device = "cpu" if mx.default_device() == mx.cpu else "gpu"
        return {"n_vocab": logits.shape[-1], "device": device}, []

    def logits(self, states):
        head = self.text.lm_head if hasattr(self.text, "lm_head") else self.text.model.embed_tokens.as_linear
        logits = head(states)
        return logits if self.logit_cap is None else self.mx.tanh(logits / self.logit_cap) * self.logit_cap

    def arrays(self, cache):
        """What the layers keep of a sequence."""
        for layer in cache:
            yield from (layer.cache if hasattr(layer, "cache") else (layer.keys, layer.values))

    def offset(self, cache):
        """The positions that a slot holds."""
        return cache[self.counted].offset

    def states(self, part, tokens):
        """The states after the tokens of a slot's part of a batch: [1, tokens, embedding]."""
        cache = self.slots[part["slot"]]
        if self.offset(cache) != part["from"]:
            raise ValueError(f"position {part['from']} does not follow a slot that holds {self.offset(cache)}")
        if part["from"] > 0 and any(cache[layer][0] is None for layer in self.linear):
            raise ValueError(f"position {part['from']} needs states that the slot does not have")
        return self.text.model(self.mx.array(tokens)[None], cache=cache)

    def compute(self, head, payload):
        """Computes a batch: the parts' tokens one after another in the payload, u32. Returns the wanted logits, f32."""
        tokens = self.np.frombuffer(payload, dtype="<u4").astype(self.np.int32)
        at, results, caches = 0, [], []
        for part in head["parts"]:
            states = self.states(part, tokens[at : at + part["n"]])
            at += part["n"]
            caches += self.arrays(self.slots[part["slot"]])
            if part["wanted"]:
                wanted = states[0, self.mx.array(part["wanted"])]
                results.append(self.logits(wanted).astype(self.mx.float32))
        self.mx.eval(results, caches)
        return {}, [self.bytes(result, "<f4") for result in results]

    def embed(self, head, payload):
        """Computes a piece of a text in the last slot, from token `from` on. Returns the state of its last token, f32."""
        tokens = self.np.frombuffer(payload, dtype="<u4").astype(self.np.int32)
        slot = len(self.slots) - 1
        if head["from"] == 0:
            self.slots[slot] = self.new_cache()
        states = self.states({"slot": slot, "from": head["from"]}, tokens)[0].astype(self.mx.float32)
        self.mx.eval(states, list(self.arrays(self.slots[slot])))
        return {}, [self.bytes(states[-1], "<f4")]

    def cut(self, head, _):
        """Keeps the first `n` positions of a slot, and its states only if that is all."""
        n = head["n"]
        cache = self.slots[head["slot"]]
        if n > self.offset(cache):
            raise ValueError(f"a slot that holds {self.offset(cache)} positions cannot keep {n}")
        self.slots[head["slot"]] = self.prefix(cache, n)
        return {}, []

    def fork(self, head, _):
        """Gives a slot a copy of the first `n` positions of another one."""
        self.slots[head["slot"]] = self.prefix(self.slots[head["source"]], head["n"])
        return {}, []

    def prefix(self, cache, n):
        """The first `n` positions, in memory of their own. States are those of the last position, so they come with all only."""
        new = self.new_cache()
        if n == 0:
            return new
        for i, (to, layer) in enumerate(zip(new, cache)):
            if i in self.linear:
                # Arrays are replaced and never changed.
                to.cache = list(layer.cache) if n == self.offset(cache) else [None, None]
                continue
            if layer.offset < n:
                raise ValueError(f"a slot holds {layer.offset} positions, not {n}")
            to.keys, to.values = (self.mx.contiguous(x[..., :n, :]) for x in (layer.keys, layer.values))
            to.offset = n
        self.mx.eval([array for array in self.arrays(new) if array is not None])
        return new

    def overwrite(self, _head, _):
        self.slots = [self.new_cache() for _ in self.slots]
        return {}, []

    def export(self, head, _):
        """The KV of a slot, of each section the positions from its start to before p1."""
        p1 = head["p1"]
        cache = self.slots[head["slot"]]
        if not all(0 <= start <= p1 <= self.offset(cache) for start in head["starts"]):
            raise ValueError(f"a slot holds {self.offset(cache)} positions, not those to {p1} from {head['starts']}")
        rows = []
        for section, start in zip(self.sections, head["starts"]):
            for layer in section["layers"] if start < p1 else []:
                for is_key, values in ((True, cache[layer].keys), (False, cache[layer].values)):
                    # [1, heads, positions, size] -> [positions, heads, size]
                    values = values[0, :, start:p1, :].transpose(1, 0, 2).astype(self.mx.float16)
                    if is_key and self.interleaved:
                        halves = values.reshape(p1 - start, section["n_kv_heads"], 2, section["head_size"] // 2)
                        values = halves.transpose(0, 1, 3, 2)
                    rows.append(values.reshape(-1))
        self.mx.eval(rows)
        return {}, [self.bytes(row, "<f2") for row in rows]

    def add(self, head, payload):
        """Adds the KV of the positions [p0, p1) to a slot that ends at p0, and takes its states away, which are those of p0. The
        rows of a section that begins later are zeros until there: no later position attends to them."""
        p0, p1 = head["p0"], head["p1"]
        cache = self.slots[head["slot"]]
        if self.offset(cache) != p0:
            raise ValueError(f"positions {p0}..{p1} do not continue a slot that holds {self.offset(cache)}")
        for layer in self.linear:
            cache[layer].cache = [None, None]
        n = p1 - p0
        received, at = self.np.frombuffer(payload, dtype="<f2"), 0
        for section, start in zip(self.sections, head["starts"]):
            heads, size = section["n_kv_heads"], section["head_size"]
            n_values = 2 * (p1 - start) * heads * size
            for layer in section["layers"]:
                rows = received[at : at + n_values].reshape(2, p1 - start, heads * size)
                at += n_values
                if start > p0:
                    rows = self.np.pad(rows, ((0, 0), (start - p0, 0), (0, 0)))
                keys, values = (self.mx.array(tensor) for tensor in rows)
                if self.interleaved:
                    keys = keys.reshape(n, heads, size // 2, 2).transpose(0, 1, 3, 2)
                kv = (x.reshape(n, heads, size).transpose(1, 0, 2)[None].astype(self.dtype) for x in (keys, values))
                cache[layer].update_and_fetch(*kv)
        self.mx.eval([array for array in self.arrays(cache) if array is not None])
        return {}, []

    def in_order(self, values, to_llama):
        """Values of V heads, along the first axis, in the other order: [K heads][V heads of each] here, the reverse there."""
        n_k, n_v = self.heads
        shape = (n_k, n_v // n_k) if to_llama else (n_v // n_k, n_k)
        return values.reshape(*shape, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    def export_state(self, head, _):
        """The states of a slot's last position."""
        cache, rows = self.slots[head["slot"]], []
        (n_k, n_v), size = self.heads, self.state_head_size
        first = 2 * n_k * size
        for layer in self.linear:
            inputs, memory = cache[layer].cache
            if inputs is None or memory is None:
                raise ValueError("the slot has no states")
            # [1, inputs, channels] -> [channels, inputs]: those of Q and K, then those of V by head.
            inputs = inputs[0].astype(self.mx.float32).transpose(1, 0)
            of_heads = self.in_order(inputs[first:].reshape(n_v, size, -1), True)
            rows.append(self.mx.concatenate([inputs[:first], of_heads.reshape(n_v * size, -1)]).reshape(-1))
            rows.append(self.in_order(memory[0].astype(self.mx.float32), True).reshape(-1))
        self.mx.eval(rows)
        return {}, [self.bytes(row, "<f4") for row in rows]

    def import_state(self, head, payload):
        """Gives a slot the states of its last position."""
        received, at = self.np.frombuffer(payload, dtype="<f4"), 0
        cache = self.slots[head["slot"]]
        (n_k, n_v), size = self.heads, self.state_head_size
        first, of_v, n_memory = 2 * n_k * size, n_v * size, n_v * size * size
        n_layer = (first + of_v) * self.n_inputs + n_memory
        if len(received) != n_layer * len(self.linear):
            raise ValueError(f"{len(received)} values of states, not {n_layer} for each of {len(self.linear)} layers")
        for layer in self.linear:
            values = self.mx.array(received[at : at + n_layer])
            at += n_layer
            inputs, memory = values[:-n_memory].reshape(-1, self.n_inputs), values[-n_memory:].reshape(n_v, size, size)
            of_heads = self.in_order(inputs[first:].reshape(n_v, size, -1), False).reshape(of_v, -1)
            inputs = self.mx.concatenate([inputs[:first], of_heads]).transpose(1, 0)[None].astype(self.dtype)
            cache[layer].cache = [self.mx.contiguous(inputs), self.in_order(memory, False)[None]]
        self.mx.eval(list(self.arrays(cache)))
        return {}, []

    def bytes(self, array, dtype):
        return self.np.ascontiguousarray(self.np.array(array), dtype=dtype).data.cast("B")


OPERATIONS = {
    "load": Worker.load,
    "compute": Worker.compute,
    "embed": Worker.embed,
    "cut": Worker.cut,
    "fork": Worker.fork,
    "overwrite": Worker.overwrite,
    "export": Worker.export,
    "import": Worker.add,
    "export_state": Worker.export_state,
    "import_state": Worker.import_state,
}


def main():
    die_with_parent()
    beat = Beat()
    worker = Worker()
    while True:
        n_head, n_payload = HEAD.unpack(receive(HEAD.size))
        if n_head > MAX_HEAD or n_payload > MAX_PAYLOAD:
            sys.exit("a request of Baton is too long")
        head, payload = json.loads(receive(n_head)), receive(n_payload)
        beat.begin()
        if head["op"] not in OPERATIONS:
            sys.exit(f"Baton wants the unknown operation {head['op']!r}")
        try:
            reply, rows = OPERATIONS[head["op"]](worker, head, payload)
        except Exception as error:
            # The message goes into Baton's log, and decides nothing there.
            beat.reply({"error": f"{type(error).__name__}: {error}"[:2000]})
            continue
        beat.reply({"ok": True, **reply}, rows)


main()
