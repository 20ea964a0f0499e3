"""What the writer writes is read by the reader that was written from docs/kv-frames.md alone."""

from dataclasses import replace

import numpy as np
import pytest

import kv_reader
from baton_vllm.errors import NodeError
from baton_vllm.frames import Layout, LinearLayer, Window, Writer

KEY, HANDOFF = b"a cluster key", bytes(range(16))
TOKENS = [i * 1000 + 7 for i in range(12)]
LAYOUT = Layout("interleaved", 2, 6, "f16")
HYBRID = replace(LAYOUT, linear=(LinearLayer(6, 9, 0), LinearLayer(6, 9, 1)))
FINGERPRINT = {"vocabulary": "aa" * 32, "weights": "55" * 32}
TIMINGS = {"queue_ms": 1.0, "prefill_ms": 12.0, "n_computed": 10, "n_cached": 2}


def writer(start=2, layout=LAYOUT):
    return Writer(KEY, HANDOFF, TOKENS, start, layout, FINGERPRINT)


def rows(layer, is_v, p0, p1):
    positions, values = np.arange(p0, p1)[:, None], np.arange(LAYOUT.n_values)[None, :]
    return (layer * 100 + is_v * 50 + positions + values / 8).astype(np.float16)


def frame(writer, p1, layout=LAYOUT):
    record, sent, starts = writer.frame(p1)
    for layer, p0 in layout.layers(starts):
        sent += record.add(rows(layer, 0, p0, p1).tobytes()) + record.add(rows(layer, 1, p0, p1).tobytes())
    return sent + record.mac()


def states(writer):
    """The next layer's states: 100 times the layer's number, and on from there."""
    number = writer.n_linear
    record, sent = writer.states()
    for n_values, first in ((6, 0), (9, 6)):
        sent += record.add((100 * number + first + np.arange(n_values, dtype=np.float32)).tobytes())
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


@pytest.mark.parametrize("rows_first", [True, False])
def test_every_value_of_the_states_is_read(rows_first):
    w = writer(layout=HYBRID)
    stream = w.head()
    stream += frame(w, 12) + states(w) + states(w) if rows_first else states(w) + states(w) + frame(w, 12)
    events = read(stream + w.end(TIMINGS))
    assert [kind for kind, _ in events] == ["head", *(["frame", "state"] if rows_first else ["state", "frame"]), "end"]
    head = events[0][1]
    assert (head["version"], head["states_at"], head["layout"]) == (2, [12], HYBRID.json())
    assert [(one["kind"], one["n_values"]) for one in head["layout"]["states"]] == [("convolution", 6), ("recurrence", 9)] * 2
    [state] = [event for kind, event in events if kind == "state"]
    assert state.position == 12 and np.array_equal(np.concatenate(state.tensors), [*range(15), *range(100, 115)])


def test_layers_with_a_window_follow_and_have_only_what_the_end_looks_back_to():
    layout = replace(LAYOUT, n_layers=3, window=Window(4, (0, 2)))
    w = writer(layout=layout)
    stream = w.head() + frame(w, 5, layout) + frame(w, 10, layout) + frame(w, 12, layout) + w.end(TIMINGS)
    (_, head), *frames, _ = read(stream)
    assert [section.get("window") for section in head["layout"]["sections"]] == [None, 4] and head["version"] == 1
    # The token at position 12 looks back to 9.
    assert [one.starts for _, one in frames] == [(2, 5), (5, 9), (10, 10)]
    for _, one in frames:
        for layers, start, section in zip(((1,), (0, 2)), one.starts, one.tensors):
            for layer, (k, v) in zip(layers, section, strict=True):
                assert np.array_equal(k, rows(layer, 0, start, one.p1)) and np.array_equal(v, rows(layer, 1, start, one.p1))


def test_a_handoff_without_all_states_has_no_end():
    w = writer(layout=HYBRID)
    frame(w, 12), states(w)
    with pytest.raises(ValueError):
        w.end(TIMINGS)
    states(w)
    assert w.end(TIMINGS)
    with pytest.raises(ValueError):
        w.states()


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
    record, *_ = writer().frame(3)
    with pytest.raises(ValueError):
        record.add(bytes(LAYOUT.position_bytes + 1))
    record, *_ = writer().frame(3)
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


def test_the_layers_that_come_late_in_a_frame_are_known():
    assert LAYOUT.longest_wait == 1
    assert replace(LAYOUT, n_layers=13, window=Window(4, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12))).longest_wait == 6


def test_frames_of_large_models_are_within_the_formats_limits():
    assert LAYOUT.max_frame_positions == 4096
    large = Layout("half_split", 126, 8192, "bf16")
    assert large.max_frame_positions * large.position_bytes <= 1 << 30
