"""The states of linear layers, from vLLM's order into that of llama.cpp, which Baton's nodes exchange.

A layer keeps the last inputs of its convolution and the memory of each of its heads. The channels of the convolution are three
parts. Ranks share the heads, so each has some channels of each part. llama.cpp has the inputs of a channel side by side.
"""

from dataclasses import dataclass, replace

import numpy as np

from .errors import Unsupported


class LinearShape:
    """The shape of a linear layer, or of a rank's part of one.

    `n_inputs` are those that the convolution keeps of a channel, `channels` the channels of its parts, and `memory` is [heads,
    elements, elements].
    """

    @property
    def n_convolution(self):
        return sum(self.channels) * self.n_inputs

    @property
    def n_recurrence(self):
        return int(np.prod(self.memory, dtype=object))

    @property
    def part_bytes(self):
        """The lengths of the pieces of a layer's states: the inputs of each part, and the memory. All are f32."""
        return [4 * n * self.n_inputs for n in self.channels] + [4 * self.n_recurrence]

    def check(self, convolution, recurrence):
        """Errors: these are no shapes of a sequence's states in vLLM's caches."""
        n_channels = sum(self.channels)
        inputs = {(self.n_inputs, n_channels), (n_channels, self.n_inputs)}
        if tuple(convolution) not in inputs or tuple(recurrence) != tuple(self.memory):
            raise Unsupported(f"vLLM keeps states of the shapes {tuple(convolution)} and {tuple(recurrence)} for {self}")

    def pieces(self, convolution, recurrence, is_transposed=False):
        """A layer's states in vLLM's order of heads. `convolution` is [inputs, channels] or [channels, inputs]; `recurrence` is
        `memory`, or each head's is transposed."""
        n_channels = sum(self.channels)
        channels = convolution.T if convolution.shape == (self.n_inputs, n_channels) else convolution
        parts = np.split(channels, np.cumsum(self.channels)[:-1])
        return [contiguous(part) for part in (*parts, recurrence.swapaxes(1, 2) if is_transposed else recurrence)]

    def joined(self, ranks):
        """The bytes of both states of a layer in llama.cpp's order, from the pieces of all ranks."""
        first, second, third, memory = (
            np.concatenate([np.frombuffer(piece, "<f4") for piece in pieces]) for pieces in zip(*ranks))
        first, second, third, memory = self.for_llama(first, second, third, memory)
        return [contiguous(np.concatenate([first, second, third])), contiguous(memory)]


@dataclass(frozen=True)
class DeltaNet(LinearShape):
    """Of a gated delta net: the channels are those of Q, of K and of V, and the memory is [V heads, V elements, K elements].

    vLLM counts all V heads of a K head first, as the Hugging Face format does, and llama.cpp the first V head of each K head.
    """

    n_k: int
    n_v: int
    size: int
    n_inputs: int

    @property
    def channels(self):
        return self.n_k * self.size, self.n_k * self.size, self.n_v * self.size

    @property
    def memory(self):
        return self.n_v, self.size, self.size

    def of_rank(self, n_ranks):
        """The part of one of so many ranks. Errors: vLLM cannot divide the heads."""
        if self.n_k % n_ranks or self.n_v % n_ranks:
            raise Unsupported(f"{n_ranks} ranks cannot share {self.n_k} heads of K and {self.n_v} of V in linear layers")
        return replace(self, n_k=self.n_k // n_ranks, n_v=self.n_v // n_ranks)

    def for_llama(self, q, k, v, memory):
        return q, k, self._in_order(v), self._in_order(memory)

    def _in_order(self, of_heads):
        return of_heads.reshape(self.n_k, self.n_v // self.n_k, -1).swapaxes(0, 1).reshape(-1)


@dataclass(frozen=True)
class Mamba2(LinearShape):
    """Of a state-space layer: the channels are those of its heads, of B and of C, and the memory is [heads, elements, states]."""

    n_heads: int
    size: int
    n_states: int
    n_groups: int
    n_inputs: int

    @property
    def channels(self):
        return self.n_heads * self.size, self.n_groups * self.n_states, self.n_groups * self.n_states

    @property
    def memory(self):
        return self.n_heads, self.size, self.n_states

    def of_rank(self, n_ranks):
        """The part of one of so many ranks. Errors: vLLM cannot divide the heads, or copies groups."""
        if self.n_heads % n_ranks or self.n_groups % n_ranks:
            raise Unsupported(f"{n_ranks} ranks cannot share {self.n_heads} heads and {self.n_groups} groups in Mamba layers")
        return replace(self, n_heads=self.n_heads // n_ranks, n_groups=self.n_groups // n_ranks)

    def for_llama(self, x, b, c, memory):
        return x, b, c, memory


def contiguous(values):
    return np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8).data


class States:
    """A rank's states of all linear layers of a model, copied out of vLLM's caches.

    `read(number, block, ready)` returns both states of a layer in a block as arrays of f32. `groups` has the group of each layer:
    the blocks of a sequence are counted in each group apart. vLLM keeps a state for each so many positions, `block_size`, or one
    in all; the last one is that of the last position.
    """

    def __init__(self, read, shape, groups, block_size, is_transposed=False):
        self._read, self._shape, self._groups, self._block_size = read, shape, groups, block_size
        self._is_transposed = is_transposed

    def copy(self, handoff, number):
        """The pieces of a layer's states after the whole prompt. vLLM must have computed them, and must keep their block."""
        block = handoff.blocks[self._groups[number]][(handoff.n_tokens - 1) // self._block_size]
        return self._shape.pieces(*self._read(number, block, handoff.ready), self._is_transposed)
