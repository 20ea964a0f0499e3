"""The node's calls over real sockets, with a scripted engine instead of vLLM."""

import json
import socket
import struct
import time

import pytest

from baton_vllm import http, node as node_module
from baton_vllm.errors import unavailable
from scripted import (FINGERPRINT, LAYOUT, N_CTX, Scripted, end_step, eventually, holds_right_rows, kinds, positions, received,
                      request, step)

TOKENS = list(range(100))
KEYED = b"authorization: Bearer a cluster key\r\n"


@pytest.fixture(scope="module")
def node():
    return Scripted()


@pytest.fixture
def fresh():
    return Scripted()


def started(node, tokens=TOKENS, **more):
    """A pull, and the handoff that vLLM computes for it."""
    n = len(node.api.prompts)
    pull = node.prefill(tokens, **more)
    prompt = node.api.prompt(n + 1)
    return pull, node.handoff(prompt), prompt


def test_without_the_key_nothing_is_told(node):
    for key in ("", "another key", "a cluster ke"):
        for path in ("/info", "/load", "/nothing"):
            status, reply = node.call("GET", path, key=key)
            assert (status, reply) == (401, {"error": {"kind": "unauthorized"}})


def test_a_strangers_body_is_not_awaited(node):
    with node.connect() as connection:
        connection.sendall(b"POST /node/v1/prefill HTTP/1.1\r\nauthorization: Bearer x\r\ncontent-length: 1000000\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 401 ")


def test_it_describes_itself_once_vllm_takes_prompts(fresh):
    status, info = fresh.call("GET", "/info")
    assert status == 200 and info["fingerprint"] == FINGERPRINT and info["process"] > 0
    assert info["streams"] == {"oldest": 1, "newest": 1}
    assert fresh.call("GET", "/load")[1]["active_slots"] == 0
    fresh.api.healthy = False
    eventually(lambda: fresh.call("GET", "/load")[1]["phase"] == "starting", 30)
    status, refused = fresh.call("GET", "/info")
    assert status == 503 and refused["error"]["kind"] == "unavailable"


def test_other_calls_are_refused_with_a_reason(node):
    status, reply = node.call("POST", "/render", b"{}")
    assert status == 501 and "vLLM" in reply["error"]["feature"]


def test_rows_are_sent_in_frames_and_vllm_gets_the_prompt(node):
    pull, handoff, prompt = started(node)
    assert pull.head.startswith(b"HTTP/1.1 101 ") and prompt["prompt"] == TOKENS and prompt["max_tokens"] == 1
    assert "cache_salt" not in prompt
    step(handoff, 0, 64)
    step(handoff, 64, 36)
    node.api.answer(handoff.id, 200)
    events = pull.events()
    assert kinds(events)[0] == "head" and kinds(events)[-1] == "end" and holds_right_rows(events)
    assert positions(events)[0][0] == 0 and positions(events)[-1][1] == 100
    timings = events[-1][1]["timings"]
    assert (timings["n_computed"], timings["n_cached"]) == (100, 0) and timings["prefill_ms"] > 0
    eventually(lambda: node.handoffs.find(handoff.id) is None)


def test_a_layer_leaves_before_the_next_one_is_computed(node):
    pull, handoff, _ = started(node)
    layer_bytes = 2 * LAYOUT.row_bytes * 100
    before = pull.n_bytes()
    step(handoff, 0, 100, n_layers=2, ends=False)
    pull.reaches(before + 2 * layer_bytes)
    two = pull.n_bytes()
    assert two - before < 2 * layer_bytes + 500, "a sign of life and a header at most, beside two layers"
    handoff.layer_done(3, None)
    assert pull.reaches(two + layer_bytes)
    end_step(handoff)
    events = pull.events()
    assert kinds(events) == ["head", "frame", "end"] and positions(events) == [(0, 100)]


def test_without_overlap_everything_is_sent_at_the_end():
    node = Scripted(overlap=False)
    pull, handoff, _ = started(node)
    before = pull.n_bytes()
    step(handoff, 0, 50)
    assert pull.n_bytes() - before < 500, "signs of life at most"
    step(handoff, 50, 50)
    assert kinds(pull.events())[-1] == "end"


def test_slow_layers_wait_for_the_whole_step_under_signs_of_life(node, monkeypatch):
    monkeypatch.setattr(node_module, "SLOW_LAYER_SECONDS", 0.05)
    pull, handoff, _ = started(node)
    handoff.begin_step(0, 100, [])
    handoff.layer_done(1, None)
    time.sleep(0.1)
    handoff.layer_done(2, None)
    before = pull.n_bytes(1.5)
    assert before < 2 * LAYOUT.row_bytes * 100, "no layer has left"
    handoff.layer_done(3, None)
    end_step(handoff)
    events = pull.events()
    assert "wait" in [kind for kind, _ in events] and kinds(events) == ["head", "frame", "end"]


def test_cached_positions_leave_at_once_and_only_the_missing_ones(node):
    pull, handoff, _ = started(node, start=40)
    step(handoff, 64, 36, n_layers=0, ends=False)
    assert pull.reaches(24 * LAYOUT.position_bytes)
    for layer in range(3):
        handoff.layer_done(layer + 1, None)
    end_step(handoff)
    events = pull.events()
    assert positions(events) == [(40, 64), (64, 100)] and holds_right_rows(events)
    assert events[-1][1]["timings"]["n_cached"] == 64


def test_an_older_reader_gets_the_records_as_a_body(node):
    pull, handoff, _ = started(node, upgrade=False)
    assert pull.head.startswith(b"HTTP/1.1 200 ") and b"application/x-baton-kv" in pull.head
    step(handoff, 0, 100)
    assert kinds(pull.events())[-1] == "end"


def test_a_scope_keeps_caches_apart(node):
    pull, handoff, prompt = started(node, cache_scope=77)
    assert prompt["cache_salt"]
    other, theirs, another = started(node, cache_scope=78)
    assert another["cache_salt"] != prompt["cache_salt"]
    for one, its in ((pull, handoff), (other, theirs)):
        step(its, 0, 100)
        assert kinds(one.events())[-1] == "end"


@pytest.mark.parametrize("status, kind", [(400, "invalid_request"), (500, "internal"), (None, "unavailable")])
def test_what_vllm_refuses_ends_with_the_reason(node, status, kind):
    pull, handoff, _ = started(node)
    node.api.answer(handoff.id, status)
    events = pull.events()
    assert kinds(events) == ["head", "error"] and events[-1][1]["kind"] == kind


def test_frames_before_a_loss_stay_valid(node):
    pull, handoff, _ = started(node)
    step(handoff, 0, 60)
    assert pull.reaches(60 * LAYOUT.position_bytes)
    handoff.fail(unavailable("vLLM needed the prompt's memory for another one"))
    events = pull.events()
    assert kinds(events) == ["head", "frame", "error"] and positions(events) == [(0, 60)]


def test_a_loss_within_a_frame_cuts_the_stream(node):
    pull, handoff, _ = started(node)
    step(handoff, 0, 100, n_layers=2, ends=False)
    assert pull.reaches(LAYOUT.row_bytes * 400)
    node.api.answer(handoff.id, None)
    assert kinds(pull.events()) == ["head", None]


def test_a_step_that_hangs_within_a_frame_cuts_the_stream(node, monkeypatch):
    monkeypatch.setattr(node_module, "LAYER_SECONDS", 0.2)
    pull, handoff, _ = started(node)
    step(handoff, 0, 100, n_layers=2, ends=False)
    assert kinds(pull.events()) == ["head", None]
    eventually(lambda: handoff.id in node.api.left)


def test_a_reader_that_leaves_aborts_the_prompt(node):
    pull, handoff, _ = started(node)
    step(handoff, 0, 60)
    pull.leave()
    eventually(lambda: handoff.id in node.api.left)
    eventually(lambda: handoff.closed and node.handoffs.find(handoff.id) is None)


def test_a_reader_that_takes_nothing_loses_its_handoff(node, monkeypatch):
    monkeypatch.setattr(http, "READ_SECONDS", 0.3)
    # More than the sockets' buffers hold.
    monkeypatch.setattr(node_module.Writer, "wait", lambda writer: bytes(64 << 20))
    pull, handoff, _ = started(node)
    eventually(lambda: handoff.closed)
    eventually(lambda: handoff.id in node.api.left)
    pull.leave()


def test_a_measurement_gives_way(fresh):
    measuring, _, _ = started(fresh, gives_way=True)
    pull, handoff, _ = started(fresh)
    events = measuring.events()
    assert events[-1] == ("error", {"kind": "gave_way"})
    assert fresh.call("POST", "/prefill", body(gives_way=True)) == (503, {"error": {"kind": "gave_way"}})
    step(handoff, 0, 100)
    assert kinds(pull.events())[-1] == "end"


def test_a_full_node_refuses_further_prompts():
    node = Scripted(limit=1)
    pull, handoff, _ = started(node)
    assert node.call("POST", "/prefill", body()) == (503, {"error": {"kind": "queue_full", "limit": 1}})
    eventually(lambda: node.call("GET", "/load")[1]["queued"] == 1)
    step(handoff, 0, 64)
    assert node.call("GET", "/load")[1]["active_slots"] == 1
    pull.leave()


def body(**changes):
    base = {"handoff": "00" * 16, "tokens": TOKENS, "start": 0, "codecs": [0], "fingerprint": FINGERPRINT}
    return json.dumps({**base, **changes}).encode()


@pytest.mark.parametrize(
    "wrong",
    [
        b"{",
        b"[]",
        body(handoff="00"),
        body(handoff=7),
        body(tokens=[1, "2"]),
        body(tokens=[True]),
        body(tokens=[1000]),
        body(tokens=[-1]),
        body(tokens=[]),
        body(start=100),
        body(start=-1),
        body(codecs=[1, 2]),
        body(fingerprint={**FINGERPRINT, "vocabulary": "bb" * 32}),
        body(fingerprint=None),
    ],
    ids=lambda b: b[:60].decode(),
)
def test_malformed_requests_are_refused_before_vllm_hears_of_them(node, wrong):
    n = len(node.api.prompts)
    status, reply = node.call("POST", "/prefill", wrong)
    assert (status, reply["error"]["kind"]) == (400, "invalid_request")
    assert len(node.api.prompts) == n


def test_a_prompt_without_room_for_a_token_is_an_overflow(node):
    status, reply = node.call("POST", "/prefill", body(tokens=[1] * N_CTX))
    assert status == 400 and reply["error"] == {"kind": "context_overflow", "n_prompt": N_CTX, "n_ctx": N_CTX}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /node/v1/info HTTP/1.1\r\nx: " + b"a" * (http.MAX_HEAD_BYTES + 10) + b"\r\n\r\n",
        b"POST /node/v1/prefill HTTP/1.1\r\n" + KEYED + b"content-length: 999999999\r\n\r\n",
        b"POST /node/v1/prefill HTTP/1.1\r\n" + KEYED + b"content-length: -1\r\n\r\n",
        b"POST /node/v1/prefill HTTP/1.1\r\n" + KEYED + b"transfer-encoding: chunked\r\n\r\n",
        b"GET /node/v1/info\r\n\r\n",
        b"GET /node/v1/info HTTP/1.1\r\nno colon\r\n\r\n",
    ],
    ids=["long_head", "long_body", "negative", "chunked", "no_version", "no_colon"],
)
def test_heads_beyond_the_limits_are_refused_and_closed(node, head):
    with node.connect() as connection:
        connection.sendall(head)
        reply = received(connection)
        assert reply.startswith(b"HTTP/1.1 400 ") and b"connection: close" in reply
        assert connection.recv(1) == b""


def test_a_connection_serves_several_calls(node):
    with node.connect() as connection:
        for _ in range(3):
            connection.sendall(request("GET", "/load", headers="connection: keep-alive\r\n"))
            assert received(connection).startswith(b"HTTP/1.1 200 ")


def test_noise_is_as_long_as_asked(node):
    with node.connect() as connection:
        connection.sendall(request("GET", "/noise?bytes=1000000"))
        head, _, noise = received(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and len(noise) == 1_000_000
    for query in ("", "?bytes=-1", f"?bytes={(64 << 20) + 1}", "?bytes=" + "9" * 30):
        assert node.call("GET", f"/noise{query}")[0] == 400


ALIVE = (22, 0, b"")


def frame(kind, stream, payload=b""):
    return struct.pack("<IB3xI", len(payload), kind, stream) + payload


def start(work, credit):
    return struct.pack("<BBHII", work, 0, 0, credit, 0)


def open_streams(node, versions="1-1"):
    connection = socket.create_connection(("127.0.0.1", node.port), timeout=5)
    offer = f"connection: upgrade\r\nupgrade: baton-streams\r\nbaton-streams-versions: {versions}\r\n"
    connection.sendall(request("GET", "/streams", headers=offer))
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(1)
    return connection, head


def read_frame(connection):
    length, kind, stream = struct.unpack("<IB3xI", exactly(connection, 12))
    return kind, stream, exactly(connection, length)


def exactly(connection, n):
    data = b""
    while len(data) < n:
        piece = connection.recv(n - len(data))
        assert piece, "the connection ended"
        data += piece
    return data


def test_loads_are_streamed_by_credit(node):
    connection, head = open_streams(node)
    assert b" 101 " in head and b"baton-streams-version: 1" in head
    connection.sendall(frame(1, 1, start(3, 2)))
    assert read_frame(connection)[:2] == (17, 1)
    for _ in range(2):
        while (got := read_frame(connection)) == ALIVE:
            pass
        assert got[:2] == (18, 1) and json.loads(got[2])["free_cells"] == 12_345
    assert [read_frame(connection) for _ in range(2)] == [ALIVE, ALIVE], "without credit only signs of life come"
    connection.sendall(frame(3, 1, struct.pack("<I", 1)))
    assert sum(read_frame(connection)[0] == 18 for _ in range(4)) == 1
    connection.close()


def test_generating_is_refused_and_the_connection_goes_on(node):
    connection, _ = open_streams(node)
    connection.sendall(frame(1, 1, start(1, 64)) + frame(1, 2, start(3, 1)))
    kind, stream, error = read_frame(connection)
    assert (kind, stream, json.loads(error)["error"]["kind"]) == (20, 1, "unsupported")
    assert read_frame(connection)[:2] == (17, 2)
    connection.close()


@pytest.mark.parametrize(
    "fault",
    [frame(16, 1), frame(1, 0, start(3, 1)), frame(1, 1, b"x"), struct.pack("<IB3xI", 1 << 30, 1, 1), frame(1, 1, start(3, 1 << 20))],
    ids=["unknown", "no_stream", "short", "long", "credit"],
)
def test_a_fault_ends_the_connection(node, fault):
    connection, _ = open_streams(node)
    connection.sendall(fault)
    connection.settimeout(5)
    while connection.recv(4096):
        pass


def test_another_version_of_the_stream_protocol_is_refused(node):
    for versions in ("2-3", "0-0", "", "a-b"):
        connection, head = open_streams(node, versions)
        assert b" 101 " not in head
        connection.close()
