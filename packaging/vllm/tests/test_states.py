"""The order of states, shown with values that say where they belong."""

from types import SimpleNamespace

import numpy as np
import pytest

from baton_vllm.errors import Unsupported
from baton_vllm.states import DeltaNet, Mamba2, States

# Two V heads for each of two K heads, of three elements; the convolution keeps two inputs.
SHAPE = DeltaNet(2, 4, 3, 2)
# llama.cpp has the first V head of each K head first, then the second one of each.
IN_LLAMA = [0, 2, 1, 3]


def convolution(inputs_first):
    """1000 times the channel and the input's number, as vLLM has them."""
    values = 1000 * np.arange(sum(SHAPE.channels))[:, None] + np.arange(SHAPE.n_inputs)
    return (values.T if inputs_first else values).astype(np.float32)


def recurrence(k_first):
    """V head, V element and K element as digits."""
    heads, v, k = np.meshgrid(np.arange(SHAPE.n_v), np.arange(SHAPE.size), np.arange(SHAPE.size), indexing="ij")
    values = (100 * heads + 10 * v + k).astype(np.float32)
    return values.swapaxes(1, 2) if k_first else values


@pytest.mark.parametrize("inputs_first", [True, False])
@pytest.mark.parametrize("k_first", [True, False])
def test_states_come_in_llama_cpps_order(inputs_first, k_first):
    states = SHAPE.joined([SHAPE.pieces(convolution(inputs_first), recurrence(k_first), k_first)])
    inputs, memory = (np.frombuffer(state, "<f4") for state in states)
    of_qk = list(range(2 * 2 * 3))
    of_v = [12 + 3 * head + element for head in IN_LLAMA for element in range(3)]
    assert inputs.tolist() == [1000 * channel + number for channel in of_qk + of_v for number in range(2)]
    assert memory.tolist() == [100 * head + 10 * v + k for head in IN_LLAMA for v in range(3) for k in range(3)]


def test_the_last_block_of_the_layers_group_is_read():
    read = []

    def reader(number, block, ready):
        read.append((number, block))
        return convolution(True), recurrence(False)

    for block_size, n_tokens, block in ((16, 33, 30), (16, 32, 20), (4096, 33, 10)):
        states = States(reader, SHAPE, [1, 0], block_size, False)
        states.copy(SimpleNamespace(blocks=[[9], [10, 20, 30]], n_tokens=n_tokens, ready=None), 0)
        assert read.pop() == (0, block)


@pytest.mark.parametrize("shapes", [((2, 23), (4, 3, 3)), ((3, 24), (4, 3, 3)), ((2, 24), (2, 3, 3)), ((2, 24), (4, 3, 4))])
def test_caches_of_other_shapes_are_refused(shapes):
    SHAPE.check((2, 24), (4, 3, 3)), SHAPE.check((24, 2), (4, 3, 3))
    with pytest.raises(Unsupported):
        SHAPE.check(*shapes)


def test_the_states_of_ranks_are_those_of_one():
    whole = SHAPE.pieces(convolution(True), recurrence(False), False)
    half = SHAPE.of_rank(2)
    ranks = []
    for rank in range(2):
        def mine(values, n):
            return values[rank * n : (rank + 1) * n]

        q, k, v = np.split(convolution(False), [6, 12])
        channels = np.concatenate([mine(q, 3), mine(k, 3), mine(v, 6)])
        ranks.append(half.pieces(channels.T, mine(recurrence(False), 2), False))
        assert [len(piece) for piece in ranks[-1]] == half.part_bytes
    assert [bytes(state) for state in SHAPE.joined(ranks)] == [bytes(state) for state in SHAPE.joined([whole])]
    with pytest.raises(Unsupported):
        SHAPE.of_rank(3)


def test_states_of_mamba_keep_their_order_and_ranks_have_parts_of_each():
    """Four heads of three elements, two groups of five states; the convolution keeps three inputs."""
    shape = Mamba2(4, 3, 5, 2, 3)
    channels = np.arange(12 + 10 + 10)
    inputs = (1000 * channels[:, None] + np.arange(3)).astype(np.float32)
    memory = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
    whole = shape.joined([shape.pieces(inputs.T, memory)])
    assert [bytes(state) for state in whole] == [inputs.tobytes(), memory.tobytes()]
    assert shape.of_rank(2).channels == (6, 5, 5)
    parts = [[range(6), range(12, 17), range(22, 27)], [range(6, 12), range(17, 22), range(27, 32)]]
    ranks = [shape.of_rank(2).pieces(inputs[np.concatenate(part)].T, memory[2 * rank : 2 * rank + 2])
             for rank, part in enumerate(parts)]
    assert [bytes(state) for state in shape.joined(ranks)] == [bytes(state) for state in whole]
    with pytest.raises(Unsupported):
        shape.of_rank(4)
