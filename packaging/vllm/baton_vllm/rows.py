"""Copies rows and states out of vLLM's paged KV cache; the rows in the order in which Baton's nodes exchange them.

A row of a frame is one position's values, head after head, K after the rotation, as f16, bf16 or f32. vLLM has blocks of
positions; FP8 caches are scaled; and on a processor the kernels keep K in an order of their own, which is found by having them
store known numbers.
"""

import contextlib

import torch

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rope_order(head_size, rope):
    """Where each element of a K head comes from: vLLM's order is half-split."""
    order = torch.arange(head_size)
    return order.view(2, -1).T.reshape(-1) if rope == "interleaved" else order


class DeviceRows:
    """Caches of the shape [blocks, heads, positions, K and V], as vLLM shows every device's."""

    def __init__(self, caches, layout, order):
        self._caches, self._dtype, self._order = caches, DTYPES[layout.dtype], order
        self._stream = torch.cuda.Stream() if caches[0].is_cuda else None
        self.block_size = caches[0].shape[2]

    def gather(self, layer, blocks, p0, p1, scales, stored, ready):
        """K and V of these positions, each [positions, heads, elements], on the processor."""
        cache = self._caches[layer]
        positions = torch.arange(p0, p1)
        table = torch.tensor(blocks)
        # A thread's current device is the first one, and each rank has another.
        with torch.inference_mode(), on_device(cache), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            block = table[positions // self.block_size].to(cache.device, non_blocking=True)
            offset = (positions % self.block_size).to(cache.device, non_blocking=True)
            rows = cache[block, :, offset]
            if stored is not None:
                rows = rows.view(stored)
            k, v = rows.chunk(2, dim=-1)
            k = k[..., self._order.to(k.device)]
            return [converted(values, scale, self._dtype).cpu() for values, scale in zip((k, v), scales)]


def on_device(cache):
    return torch.cuda.device(cache.device) if cache.is_cuda else contextlib.nullcontext()


class CpuRows:
    """The caches of vLLM's processor kernels: [blocks, heads, 2 * positions, elements], K in an order of its own."""

    def __init__(self, caches, layout, order, store, stored=None):
        self._dtype = DTYPES[layout.dtype]
        n_blocks, n_heads, self.block_size, width = caches[0].shape
        self._head_size = width // 2
        self._flat = [cache.view(n_blocks, n_heads, -1) for cache in caches]
        places = cpu_places(caches[0], store, stored)
        self._k = places[0][:, order].contiguous()
        self._v = places[1]

    def gather(self, layer, blocks, p0, p1, scales, stored, ready):
        parts = ([], [])
        with torch.inference_mode():
            for at in range(p0 - p0 % self.block_size, p1, self.block_size):
                begin, end = max(p0, at) - at, min(p1, at + self.block_size) - at
                block = self._flat[layer][blocks[at // self.block_size]]
                if stored is not None:
                    block = block.view(stored)
                for part, places in zip(parts, (self._k, self._v)):
                    rows = block[:, places[begin:end].reshape(-1)]
                    part.append(rows.view(-1, end - begin, self._head_size).transpose(0, 1))
            return [converted(torch.cat(part), scale, self._dtype) for part, scale in zip(parts, scales)]


def converted(values, scale, dtype):
    if values.dtype in FP8.values():
        values = values.to(torch.float32) * scale
    return values.to(dtype).contiguous()


def cpu_places(cache, store, stored):
    """Where the kernels keep each element of K and of V within a block of a head: two tables [positions][elements].

    They store the digits of each element's number, which every type holds exactly.
    """
    n_heads, block_size, width = cache.shape[1:]
    head_size = width // 2
    n = block_size * head_size
    base = 8
    numbers = torch.arange(n).view(block_size, 1, head_size).expand(-1, n_heads, -1)
    found = [torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)]
    weight = 1
    while weight < n:
        digits = (numbers // weight % base).to(torch.float32)
        scratch = torch.zeros((1, n_heads, block_size, width), dtype=cache.dtype)
        halves = scratch.view(1, n_heads, 2 * block_size, head_size).chunk(2, dim=2)
        store(digits, digits, *halves)
        for total, half in zip(found, halves):
            half = half[0, 0].reshape(-1)
            half = half if stored is None else half.view(stored)
            total += weight * half.to(torch.float32).to(torch.long)
        weight *= base
    tables = []
    for half, total in enumerate(found):
        if not torch.equal(total.sort().values, torch.arange(n)):
            raise RuntimeError("the kernels of this processor keep KV in an order that cannot be read back")
        tables.append((half * n + total.argsort()).view(block_size, head_size))
    return tables


def state_reader(caches):
    """What copies both states of a linear layer out of a block, as arrays of f32. `caches` has both tensors of each layer."""
    is_cuda = bool(caches) and caches[0][0].is_cuda
    stream = torch.cuda.Stream() if is_cuda else None

    def read(number, block, ready):
        states = caches[number]
        with torch.inference_mode(), on_device(states[0]), torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            return [state[block].to(torch.float32).cpu().numpy() for state in states]

    return read


class Rows:
    """What the node sends of a handoff. `groups` has the group of each layer: a sequence's blocks are counted in each apart."""

    def __init__(self, source, layout, block_size, n_positions, scales, stored, groups, states=None):
        if block_size % source.block_size:
            raise RuntimeError(f"blocks of {block_size} positions are stored in parts of {source.block_size}")
        self._source, self._split = source, block_size // source.block_size
        self._scales, self._stored = scales, stored
        self._row_bytes = layout.row_bytes
        self._groups, self._states = groups, states
        self.n_positions = n_positions

    def copy(self, handoff, layer, p0, p1):
        """The bytes of K and of V of a layer's positions. vLLM must have computed them, and must keep their blocks."""
        blocks = handoff.blocks[self._groups[layer]]
        if self._split > 1:
            blocks = [block * self._split + part for block in blocks for part in range(self._split)]
        tensors = self._source.gather(layer, blocks, p0, p1, self._scales[layer], self._stored, handoff.ready)
        pieces = [memoryview(tensor.view(torch.uint8).numpy()).cast("B") for tensor in tensors]
        if any(len(piece) != (p1 - p0) * self._row_bytes for piece in pieces):
            raise RuntimeError("the cache holds rows of another size than the layout says")
        return pieces

    def copy_states(self, handoff, number):
        """The pieces of a linear layer's states after the whole prompt."""
        return self._states.copy(handoff, number)
