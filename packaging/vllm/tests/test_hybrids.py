"""Models with layers of several kinds. States leave once they are those of the whole prompt; of windows leaves what is needed.

A scripted engine plays vLLM's.
"""

import socket
from dataclasses import replace

import numpy as np
import pytest

from baton_vllm.errors import unavailable
from baton_vllm.frames import Window
from baton_vllm.handoffs import Handoffs
from baton_vllm.ranks import Gathered, RankServer
from scripted import (SHAPE, HYBRID, LAYOUT, N_CTX, Rows, Scripted, end_step, eventually, holds_right_rows, kinds, positions, step,
                      value)

TOKENS = list(range(100))
# A prompt of so few tokens has fewer bytes of rows than of states.
FEW = TOKENS[:3]


@pytest.fixture(scope="module")
def node():
    return Scripted(layout=HYBRID)


def started(node, tokens):
    n = len(node.api.prompts)
    pull = node.prefill(tokens)
    return pull, node.handoff(node.api.prompt(n + 1))


def right_states(events):
    [state] = [event for kind, event in events if kind == "state"]
    values = [np.unique(tensor).tolist() for tensor in state.tensors]
    assert values == [[number] for number in (1, 1, 2, 2, 3, 3)]
    return state.position


def test_states_follow_the_rows_that_have_more_bytes(node):
    pull, handoff = started(node, TOKENS)
    step(handoff, 0, 64)
    step(handoff, 64, 36)
    events = pull.events()
    assert kinds(events)[-2:] == ["state", "end"] and set(kinds(events)[1:-2]) == {"frame"}
    assert right_states(events) == 100 and holds_right_rows(events) and positions(events)[-1][1] == 100
    eventually(lambda: handoff.closed)


def test_states_that_have_more_bytes_leave_first_each_once_it_is_computed(node):
    pull, handoff = started(node, FEW)
    state_bytes = HYBRID.linear[0].n_bytes
    handoff.begin_step(0, 3, [])
    handoff.layer_done(1, None)
    before = pull.n_bytes()
    handoff.layer_done(2, None)
    # Beside its values, a record of states has 100 bytes.
    assert pull.reaches(before + state_bytes)
    one = pull.n_bytes()
    assert one - before < 2 * state_bytes, "the state of the layer before the third one with rows is not there yet"
    handoff.layer_done(3, None)
    assert pull.reaches(one + state_bytes)
    assert pull.n_bytes() - one < 2 * state_bytes, "the last layer has nothing after it, so its state waits for the step's end"
    end_step(handoff)
    events = pull.events()
    assert kinds(events) == ["head", "state", "frame", "end"]
    assert right_states(events) == 3 and holds_right_rows(events)


def test_an_earlier_steps_states_are_not_sent(node):
    """They are of position 2, and the reader wants those of position 3."""
    pull, handoff = started(node, FEW)
    before = pull.n_bytes()
    step(handoff, 0, 2)
    assert pull.reaches(before + 2 * LAYOUT.position_bytes)
    assert pull.n_bytes() - before < 2 * LAYOUT.position_bytes + 500, "signs of life at most, beside two positions"
    step(handoff, 2, 1)
    events = pull.events()
    assert kinds(events) == ["head", "frame", "state", "frame", "end"] and right_states(events) == 3


def test_a_prompt_that_is_lost_before_its_states_ends_with_the_reason(node):
    pull, handoff = started(node, TOKENS)
    step(handoff, 0, 100, ends=False)
    # In the middle of a frame the stream would be cut.
    pull.has_whole("frame")
    handoff.fail(unavailable("vLLM needed the prompt's memory for another one"))
    events = pull.events()
    assert kinds(events) == ["head", "frame", "error"] and events[-1][1]["kind"] == "unavailable"


def test_a_state_of_another_size_cuts_the_stream():
    class Short(Rows):
        def copy_states(self, handoff, number):
            return [piece[4:] for piece in super().copy_states(handoff, number)]

    node = Scripted(rows=Gathered(Short(), HYBRID, shape=SHAPE), layout=HYBRID)
    pull, handoff = started(node, TOKENS)
    step(handoff, 0, 100)
    assert "end" not in kinds(pull.events())
    eventually(lambda: handoff.closed and handoff.id in node.api.left)


class RankRows(Rows):
    """Those of one of two ranks, which have copies of the heads of rows and one K head each of linear layers."""

    def __init__(self, rank):
        self._rank = rank

    def copy_states(self, handoff, number):
        sizes = SHAPE.of_rank(2).part_bytes
        return [np.full(n_bytes // 4, 10 * self._rank + piece, np.float32).tobytes() for piece, n_bytes in enumerate(sizes)]


def test_each_rank_adds_its_heads_of_states():
    connection, rank_0 = socket.socketpair()
    handoffs = Handoffs(8)
    RankServer(rank_0, HYBRID, N_CTX, RankRows(1), handoffs).start()
    node = Scripted(rows=Gathered(RankRows(0), HYBRID, [(connection, False)], SHAPE), layout=HYBRID)
    pull, handoff = started(node, TOKENS)
    theirs = handoffs.find(handoff.id)
    step(handoff, 0, 100)
    step(theirs, 0, 100)
    events = pull.events()
    assert kinds(events) == ["head", "frame", "state", "end"] and holds_right_rows(events)
    [state] = [event for kind, event in events if kind == "state"]
    for inputs, memory in zip(state.tensors[::2], state.tensors[1::2], strict=True):
        # The order of heads: Q and K, then V in llama.cpp's order: the first V head of each rank, then the second.
        of_head = SHAPE.size * SHAPE.n_inputs
        assert inputs.reshape(-1, of_head).tolist() == [[n] * of_head for n in (0, 10, 1, 11, 2, 12, 2, 12)]
        assert memory.reshape(4, -1)[:, 0].tolist() == [3, 13, 3, 13]
    eventually(lambda: theirs.closed)


def test_of_layers_with_a_window_leaves_what_the_end_looks_back_to():
    node = Scripted(layout=replace(LAYOUT, window=Window(40, (0, 2))))
    pull, handoff = started(node, TOKENS)
    step(handoff, 0, 64)
    step(handoff, 64, 36)
    events = pull.events()
    frames = [frame for kind, frame in events if kind == "frame"]
    assert kinds(events)[-1] == "end" and positions(events)[-1][1] == 100
    n_windowed = 0
    for frame in frames:
        # The token at position 100 looks back to 61.
        assert frame.starts == (frame.p0, max(frame.p0, min(frame.p1, 61)))
        for layers, start, section in zip(((1,), (0, 2)), frame.starts, frame.tensors):
            for layer, tensors in zip(layers, section, strict=True):
                for is_v, rows in enumerate(tensors):
                    assert rows[:, 0].tolist() == [value(layer, is_v, p) for p in range(start, frame.p1)]
        n_windowed += len(frame.tensors[1][0][0])
    assert n_windowed == 39
