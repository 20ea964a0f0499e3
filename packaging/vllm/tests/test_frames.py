"""What the writer writes is read by the reader that was written from docs/kv-frames.md alone."""

import numpy as np
import pytest

import kv_reader
from baton_vllm.errors import NodeError
from baton_vllm.frames import Layout, Writer

KEY, HANDOFF = b"a cluster key", bytes(range(16))
TOKENS = [i * 1000 + 7 for i in range(12)]
LAYOUT = Layout("interleaved", 2, 6, "f16")
FINGERPRINT = {"vocabulary": "aa" * 32, "weights": "55" * 32}
TIMINGS = {"queue_ms": 1.0, "prefill_ms": 12.0, "n_computed": 10, "n_cached": 2}


def writer(start=2):
    return Writer(KEY, HANDOFF, TOKENS, start, LAYOUT, FINGERPRINT)


def rows(layer, is_v, p0, p1):
    positions, values = np.arange(p0, p1)[:, None], np.arange(LAYOUT.n_values)[None, :]
    return (layer * 100 + is_v * 50 + positions + values / 8).astype(np.float16)


def frame(writer, p1):
    p0 = writer.position
    record, sent = writer.frame(p1)
    for layer in range(LAYOUT.n_layers):
        sent += record.add(rows(layer, 0, p0, p1).tobytes()) + record.add(rows(layer, 1, p0, p1).tobytes())
    return sent + record.mac()


def read(stream):
    return list(kv_reader.read(stream, KEY, HANDOFF, TOKENS))


def test_every_value_is_read():
    w = writer()
    stream = w.head() + w.wait() + frame(w, 5) + w.wait(has_begun=True) + frame(w, 12) + w.end(TIMINGS)
    events = read(stream)
    assert [kind for kind, _ in events] == ["head", "wait", "frame", "wait", "frame", "end"]
    head = events[0][1]
    assert (head["start"], head["end"], head["codec"]) == (2, 12, "none")
    assert (head["layout"], head["fingerprint"]) == (LAYOUT.json(), FINGERPRINT)
    assert events[1][1] == {"queued_ahead": 0, "n_done": 0}
    assert events[3][1] == {"queued_ahead": 0, "n_done": 3, "has_begun": True} and events[-1][1]["timings"] == TIMINGS
    for read_frame, (p0, p1) in zip((events[2][1], events[4][1]), ((2, 5), (5, 12))):
        assert (read_frame.p0, read_frame.p1) == (p0, p1)
        for layer, (k, v) in enumerate(read_frame.tensors[0]):
            assert np.array_equal(k, rows(layer, 0, p0, p1)) and np.array_equal(v, rows(layer, 1, p0, p1))


def test_an_error_ends_the_stream():
    w = writer()
    events = read(w.head() + frame(w, 5) + w.error(NodeError("gave_way")))
    assert events[-1] == ("error", {"kind": "gave_way"})


@pytest.mark.parametrize("at", [0, 5, 9, 15, 60, -1])
def test_damage_is_refused(at):
    w = writer()
    stream = bytearray(w.head() + frame(w, 12) + w.end(TIMINGS))
    stream[at] ^= 0x40
    with pytest.raises((ValueError, kv_reader.struct.error)):
        read(bytes(stream))


def test_a_record_has_the_length_that_its_header_says():
    record, _ = writer().frame(3)
    with pytest.raises(ValueError):
        record.add(bytes(LAYOUT.position_bytes + 1))
    record, _ = writer().frame(3)
    record.add(bytes(LAYOUT.position_bytes - 1))
    with pytest.raises(ValueError):
        record.mac()


@pytest.mark.parametrize("p1", [2, 13])
def test_a_frame_goes_on_where_the_last_one_ended_and_not_beyond_the_prompt(p1):
    with pytest.raises(ValueError):
        writer().frame(p1)


def test_an_incomplete_handoff_has_no_end():
    w = writer()
    frame(w, 11)
    with pytest.raises(ValueError):
        w.end(TIMINGS)


def test_frames_of_large_models_are_within_the_formats_limits():
    assert LAYOUT.max_frame_positions == 4096
    large = Layout("half_split", 126, 8192, "bf16")
    assert large.max_frame_positions * large.position_bytes <= 1 << 30
