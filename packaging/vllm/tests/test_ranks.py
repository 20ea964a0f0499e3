"""Tensor parallelism without vLLM: ranks on real sockets, each with some values of every row and its own progress."""

import contextlib
import json
import os
import socket
import stat
import threading
import time

import numpy as np
import pytest

from baton_vllm import ranks
from baton_vllm.errors import Unsupported, unavailable
from baton_vllm.frames import Layout
from baton_vllm.handoffs import Handoffs
from baton_vllm.ranks import (ASK, HELLO, IS_OPEN, LENGTH, OPEN, Gathered, Meeting, RankServer, Wanted, connect,
                              ranks_with_heads)
from scripted import FINGERPRINT, LAYOUT, N_CTX, Scripted, end_step, eventually, kinds, positions, step

TOKENS = list(range(100))
# Every value of the model's rows, [layers, K and V, positions, values], differs from its neighbours.
WHOLE = np.random.default_rng(1).random((LAYOUT.n_layers, 2, len(TOKENS), LAYOUT.n_values), np.float32).astype(np.float16)


class Part:
    """The rows of one of so many ranks."""

    n_positions = 1000

    def __init__(self, part, n_parts):
        n = LAYOUT.n_values // n_parts
        self._mine = WHOLE[..., part * n : (part + 1) * n]

    def copy(self, handoff, layer, p0, p1):
        return [np.ascontiguousarray(rows[p0:p1]).tobytes() for rows in self._mine[layer]]


class Rank:
    """Another rank than 0. `connection` is what rank 0 has of it."""

    def __init__(self, part, n_parts):
        self.handoffs = Handoffs(8)
        self.connection, rank_0 = socket.socketpair()
        here = Layout(LAYOUT.rope, LAYOUT.n_layers, LAYOUT.n_values // n_parts, LAYOUT.dtype)
        RankServer(rank_0, here, N_CTX, Part(part, n_parts), self.handoffs).start()

    def connect(self):
        """A handoff's connection."""
        near, far = socket.socketpair()
        near.settimeout(10)
        with far:
            socket.send_fds(self.connection, [b"\0"], [far.fileno()])
        return contextlib.closing(near)


class Cluster:
    """A node of several ranks; another rank may be an impostor behind this connection."""

    def __init__(self, n_ranks=2, impostor=None):
        self.others = [] if impostor else [Rank(rank, n_ranks) for rank in range(1, n_ranks)]
        connections = [impostor] if impostor else [other.connection for other in self.others]
        ranks = [(connection, True) for connection in connections]
        self.node = Scripted(rows=Gathered(Part(0, n_ranks), LAYOUT, ranks))

    def started(self):
        """A pull, its handoff on rank 0, and those on the other ranks."""
        n = len(self.node.api.prompts)
        pull = self.node.prefill(TOKENS)
        handoff = self.node.handoff(self.node.api.prompt(n + 1))
        # The other ranks know it before vLLM does.
        theirs = [other.handoffs.find(handoff.id) for other in self.others]
        assert all(theirs)
        return pull, handoff, theirs


@pytest.fixture
def two():
    return Cluster()


def all_rows(events):
    """The rows of all frames, as WHOLE has them."""
    frames = [frame.tensors[0] for kind, frame in events if kind == "frame"]
    return np.concatenate([np.array(tensors) for tensors in frames], axis=2)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_rows_are_the_same_of_any_number_of_ranks(n_ranks):
    cluster = Cluster(n_ranks)
    pull, handoff, theirs = cluster.started()
    for one in (handoff, *theirs):
        step(one, 0, 64)
        step(one, 64, 36)
    events = pull.events()
    assert kinds(events)[-1] == "end" and np.array_equal(all_rows(events), WHOLE)
    eventually(lambda: all(one.closed for one in (handoff, *theirs)))
    assert not any(other.handoffs.find(handoff.id) for other in cluster.others)


def test_a_late_rank_is_waited_for(two):
    pull, handoff, [theirs] = two.started()
    step(handoff, 0, 100)
    before = pull.n_bytes()
    assert before < 2 * LAYOUT.row_bytes * 100, "no layer leaves without the other rank's heads"
    theirs.begin_step(0, 100, [])
    for layer in range(LAYOUT.n_layers):
        theirs.layer_done(layer + 1, None)
        pull.reaches((layer + 1) * 2 * LAYOUT.row_bytes * 100)
        assert pull.n_bytes(0.1) < (layer + 2) * 2 * LAYOUT.row_bytes * 100
    end_step(theirs)
    assert np.array_equal(all_rows(pull.events()), WHOLE)


def test_a_rank_ahead_is_waited_for_by_the_node(two):
    pull, handoff, [theirs] = two.started()
    step(theirs, 0, 50)
    step(theirs, 50, 50)
    step(handoff, 0, 50)
    assert pull.reaches(50 * LAYOUT.position_bytes)
    step(handoff, 50, 50)
    assert np.array_equal(all_rows(pull.events()), WHOLE)


def test_several_handoffs_run_beside_each_other(two):
    runs = [two.started() for _ in range(4)]
    for pull, handoff, [theirs] in reversed(runs):
        step(handoff, 0, 100)
        step(theirs, 0, 100)
        assert np.array_equal(all_rows(pull.events()), WHOLE)
    eventually(lambda: all(theirs.closed for _, _, [theirs] in runs))


def test_a_prompt_that_another_rank_lost_is_cut(two):
    pull, handoff, [theirs] = two.started()
    step(handoff, 0, 50)
    step(theirs, 0, 50)
    assert pull.reaches(50 * LAYOUT.position_bytes)
    theirs.fail(unavailable("vLLM needed the prompt's memory for another one"))
    step(handoff, 50, 50)
    events = pull.events()
    assert kinds(events) == ["head", "frame", None] and positions(events[:-1]) == [(0, 50)]
    eventually(lambda: handoff.closed and theirs.closed)


def test_a_rank_that_is_too_late_costs_the_handoff_alone(two, monkeypatch):
    monkeypatch.setattr(ranks, "RANK_SECONDS", 0.3)
    pull, handoff, [theirs] = two.started()
    step(handoff, 0, 100)
    assert kinds(pull.events()) == ["head", None]
    eventually(lambda: handoff.closed and theirs.closed)
    pull, handoff, [theirs] = two.started()
    step(theirs, 0, 100)
    step(handoff, 0, 100)
    assert np.array_equal(all_rows(pull.events()), WHOLE)


def test_a_reader_that_leaves_closes_the_handoff_on_all_ranks(two):
    pull, handoff, [theirs] = two.started()
    # The node waits for the other rank.
    step(handoff, 0, 100)
    pull.n_bytes()
    pull.leave()
    began = time.monotonic()
    eventually(lambda: handoff.closed)
    assert time.monotonic() - began < ranks.RANK_SECONDS / 2
    eventually(lambda: theirs.closed)
    eventually(lambda: handoff.id in two.node.api.left)


def test_nothing_waits_while_a_copy_waits_for_another_rank(two):
    pull, handoff, [theirs] = two.started()
    step(handoff, 0, 100)
    pull.n_bytes()
    began = time.monotonic()
    handoff.fail(unavailable("preempted"))
    assert two.node.call("GET", "/load")[0] == 200
    assert time.monotonic() - began < ranks.RANK_SECONDS / 2
    step(theirs, 0, 100)
    assert kinds(pull.events())[-1] is None


def test_without_the_other_rank_nothing_is_promised(two):
    [other] = two.others
    other.connection.shutdown(socket.SHUT_RDWR)
    body = {"handoff": "00" * 16, "tokens": TOKENS, "start": 0, "codecs": [0], "fingerprint": FINGERPRINT}
    status, reply = two.node.call("POST", "/prefill", json.dumps(body).encode())
    assert (status, reply["error"]["kind"]) == (503, "unavailable")
    assert not two.node.api.prompts and two.node.call("GET", "/load")[1]["queued"] == 0


def test_the_end_of_rank_0_closes_its_handoffs(two):
    pull, handoff, [theirs] = two.started()
    two.others[0].connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: theirs.closed)
    step(handoff, 0, 100)
    assert kinds(pull.events()) == ["head", None]


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0", LENGTH.pack(1 << 31) + bytes(100), LENGTH.pack(2) + b"xy", LENGTH.pack(2 * 50 * 100 * 8)[:3]],
    ids=["dies", "dies_within", "too_long", "too_short", "half_a_length"],
)
def test_a_rank_that_answers_wrongly_cuts_the_stream(answer):
    rank_0, itself = socket.socketpair()

    def impostor():
        _, [file], _, _ = socket.recv_fds(itself, 1, 1)
        with socket.socket(fileno=file) as connection:
            connection.recv(OPEN.size)
            connection.sendall(IS_OPEN)
            connection.recv(ASK.size)
            connection.sendall(answer)

    threading.Thread(target=impostor, daemon=True).start()
    cluster = Cluster(impostor=rank_0)
    pull, handoff, _ = cluster.started()
    step(handoff, 0, 100)
    assert kinds(pull.events()) == ["head", None]
    eventually(lambda: handoff.closed and handoff.id in cluster.node.api.left)


ID = bytes(range(16))


@pytest.mark.parametrize("n_tokens", [0, N_CTX + 1])
def test_a_prompt_of_an_impossible_length_is_not_opened(n_tokens):
    rank = Rank(1, 2)
    with rank.connect() as connection:
        connection.sendall(OPEN.pack(ID, n_tokens))
        assert connection.recv(1) == b""
    assert rank.handoffs.find(ID.hex()) is None


def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(ranks, "RANK_SECONDS", 0.2)
    rank = Rank(1, 2)
    with rank.connect() as connection:
        connection.sendall(OPEN.pack(ID, 100)[:10])
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "wanted",
    [*((Wanted.ROWS, *rows) for rows in ((3, 0, 10), (0, 10, 10), (0, 11, 10), (0, 0, 101), (0, 0, 1 << 31), (1 << 31, 0, 1))),
     (Wanted.STATES, 0, 0, 0), (2, 0, 0, 1)],
    ids=str,
)
def test_what_does_not_exist_ends_the_handoff(wanted):
    rank = Rank(1, 2)
    with rank.connect() as connection:
        connection.sendall(OPEN.pack(ID, 100))
        assert connection.recv(1) == IS_OPEN
        handoff = rank.handoffs.find(ID.hex())
        step(handoff, 0, 100)
        connection.sendall(ASK.pack(*wanted))
        assert connection.recv(1) == b""
    eventually(lambda: handoff.closed and rank.handoffs.find(ID.hex()) is None)


def test_a_handoff_is_opened_once():
    rank = Rank(1, 2)
    with rank.connect() as first, rank.connect() as second:
        first.sendall(OPEN.pack(ID, 100))
        assert first.recv(1) == IS_OPEN
        second.sendall(OPEN.pack(ID, 100))
        assert second.recv(1) == b""
        assert rank.handoffs.find(ID.hex()) is not None


def test_ranks_meet_where_only_this_user_can_enter():
    with Meeting() as meeting:
        folder = os.path.dirname(meeting.place[0])
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        # They come in any order.
        theirs = {rank: connect(meeting.place, rank) for rank in (2, 1)}
        for rank, connection in zip((1, 2), meeting.wait([1, 2])):
            connection.sendall(b"x")
            assert theirs[rank].recv(1) == b"x"
    assert not os.path.exists(folder)


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused_in_words(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(Unsupported, match="TMPDIR names another folder"):
        Meeting()
    assert not list(long.iterdir())


@pytest.mark.parametrize("hello", [HELLO.pack(bytes(32), 1), b"GET / HTTP/1.1\r\n\r\n" + bytes(99), b"short"], ids=str)
def test_a_stranger_is_no_rank(hello, monkeypatch):
    monkeypatch.setattr(ranks, "RANK_SECONDS", 0.2)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(10)
    with Meeting() as meeting:
        stranger.connect(meeting.place[0])
        stranger.sendall(hello)
        rank = connect(meeting.place, 1)
        [connection] = meeting.wait([1])
    connection.sendall(b"x")
    assert rank.recv(1) == b"x"
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""


def test_a_rank_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(ranks, "MEET_SECONDS", 0.2)
    with Meeting() as meeting:
        rank = connect(meeting.place, 2)
        with pytest.raises(TimeoutError, match=r"of vLLM's ranks \[1, 2\] only \[2\] have connected"):
            meeting.wait([1, 2])
    assert not os.path.exists(os.path.dirname(meeting.place[0]))
    rank.close()


def test_each_head_is_taken_once():
    assert list(ranks_with_heads(1, 192, 192)) == [0]
    assert list(ranks_with_heads(3, 192, 64)) == [0, 1, 2]
    # Copies of a head are not sent.
    assert list(ranks_with_heads(8, 512, 128)) == [0, 2, 4, 6]
    assert list(ranks_with_heads(4, 64, 64)) == [0]
    for n_ranks, n_values, each in ((1, 192, 64), (2, 192, 64), (3, 192, 128), (2, 64, 128)):
        with pytest.raises(Unsupported):
            ranks_with_heads(n_ranks, n_values, each)
