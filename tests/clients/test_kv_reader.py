"""A reader written from docs/kv-frames.md alone reads the output of Baton's writer, with every codec."""

from pathlib import Path

import numpy as np
import pytest

import kv_reader

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kv"
KEY, HANDOFF = b"a cluster key of the tests", bytes(range(16))
TOKENS = [i * 1000 + 7 for i in range(12)]


def mixed(section, layer, is_v, position, i):
    """The number of a place, from which its value follows; the same formulas as in tests/fuzz/src/sample.rs."""
    return section * 31 + layer * 17 + is_v * 7 + position * 5 + i * 3


def value(mixed):
    return mixed % 61 / 8 - 3.75


QUANTIZED = {
    "q8_0": value,
    "q4_0": lambda mixed: (mixed % 16 - 8) * 0.5,
    "q4_1": lambda mixed: mixed % 16 * 0.5 - 3.75,
    "q5_0": lambda mixed: (mixed % 32 - 16) * 0.25,
    "q5_1": lambda mixed: mixed % 32 * 0.25 - 3.75,
    "iq4_nl": lambda mixed: kv_reader.IQ4_NL[mixed % 16] / 32,
}


def stream(codec):
    return (FIXTURES / f"{codec}.bin").read_bytes()


@pytest.mark.parametrize("codec", ["none", "planes_zstd", "q8_0", "kvq", "kvq_fast", "aegis128x2"])
def test_every_value_is_read(codec):
    events = list(kv_reader.read(stream(codec), KEY, HANDOFF, TOKENS))
    assert [kind for kind, _ in events] == ["head", "wait", "frame", "frame", "frame", "end"]
    assert events[1][1] == {"queued_ahead": 1, "n_done": 0}
    assert events[5][1]["timings"]["prefill_ms"] == 12.0
    frames = [frame for kind, frame in events if kind == "frame"]
    assert [(f.p0, f.p1, f.starts) for f in frames] == [(2, 5, (2, 5)), (5, 9, (5, 7)), (9, 12, (9, 9))]
    n_values = 0
    for frame in frames:
        for s, section in enumerate(frame.tensors):
            for l, layer in enumerate(section):
                for is_v, rows in enumerate(layer):
                    if rows is None:
                        continue
                    positions = np.arange(frame.starts[s], frame.p1)[:, None]
                    wanted = value(mixed(s, l, is_v, positions, np.arange(rows.shape[1])[None, :]))
                    assert rows.shape == wanted.shape
                    # Half a step: of the block's scale, or of the tensor, in both elements of a rotated pair.
                    tolerance = {"q8_0": 3.76 / 254, "kvq": 0.4, "kvq_fast": 0.6}.get(codec, 0)
                    assert np.abs(rows - wanted).max(initial=0) <= tolerance
                    n_values += rows.size
    # Ten positions of two layers of K and V, and five of a windowed layer without V.
    assert n_values == 10 * 2 * (64 + 32) + 5 * 32


def test_every_quantized_type_is_read():
    events = list(kv_reader.read(stream("quantized"), KEY, HANDOFF, TOKENS))
    layout = events[0][1]["layout"]["sections"][0]
    assert layout["n_rot"] == [64, 32]
    frames = [frame for kind, frame in events if kind == "frame"]
    read = set()
    for frame in frames:
        for l, (layer, shape) in enumerate(zip(frame.tensors[0], layout["layers"])):
            for is_v, rows in enumerate(layer):
                dtype = shape[("k", "v")[is_v]]["dtype"]
                numbers = mixed(0, l, is_v, np.arange(frame.p0, frame.p1)[:, None], np.arange(rows.shape[1])[None, :])
                assert np.array_equal(rows, QUANTIZED.get(dtype, value)(numbers)), dtype
                read.add(dtype)
    assert read == {*QUANTIZED, "f16"}


@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_states_are_read_at_the_positions_that_the_head_names(name):
    events = list(kv_reader.read(stream(name), KEY, HANDOFF, TOKENS))
    kinds = ["head", "wait", "frame", "state", "frame", "frame", "state", "end"]
    assert [kind for kind, _ in events] == kinds
    assert events[0][1]["states_at"] == [5, 12] and events[0][1]["version"] == 2
    for state in (state for kind, state in events if kind == "state"):
        assert [tensor.size for tensor in state.tensors] == [5, 7, 32, 64]
        for index, tensor in enumerate(state.tensors):
            wanted = value(state.position * 13 + index * 29 + np.arange(tensor.size) * 3)
            assert np.array_equal(tensor, wanted)
    sections = [len(frame.tensors) for kind, frame in events if kind == "frame"]
    assert sections == [0 if name == "recurrent" else 1] * 3


@pytest.mark.parametrize("name, error", [("state_f16", 1 / 4096), ("state_int8", 1 / 253)])
def test_narrower_states_are_read(name, error):
    events = list(kv_reader.read(stream(name), KEY, HANDOFF, TOKENS))
    assert events[0][1]["state_codec"] == name
    states = [state for kind, state in events if kind == "state"]
    assert [state.position for state in states] == [5, 12]
    for state in states:
        assert [tensor.size for tensor in state.tensors] == [5, 7, 32, 64]
        for index, tensor in enumerate(state.tensors):
            wanted = value(state.position * 13 + index * 29 + np.arange(tensor.size) * 3)
            # The last state is F16, which stays as it is.
            assert np.abs(tensor - wanted).max() <= (0 if index == 3 else error * np.abs(wanted).max())


def test_rows_of_five_tokens_are_read():
    events = list(kv_reader.read(stream("compressed"), KEY, HANDOFF, TOKENS))
    assert events[0][1]["version"] == 2 and events[0][1]["layout"]["sections"][0]["tokens_per_row"] == 5
    frames = [frame for kind, frame in events if kind == "frame"]
    # Of the positions 2..5, 5..9 and 9..12.
    for frame, numbers in zip(frames, ([0], [], [1]), strict=True):
        for l, layer in enumerate(frame.tensors[0]):
            for is_v, rows in enumerate(layer):
                wanted = value(mixed(0, l, is_v, np.array(numbers, int)[:, None], np.arange(rows.shape[1])[None, :]))
                assert np.array_equal(rows, wanted)
        assert len(frame.tensors[1][0][0]) == frame.p1 - frame.starts[1]


@pytest.mark.parametrize("wrong", [(b"other", HANDOFF, TOKENS), (KEY, bytes(16), TOKENS), (KEY, HANDOFF, TOKENS[::-1])])
def test_another_key_handoff_or_prompt_is_refused(wrong):
    with pytest.raises(ValueError):
        list(kv_reader.read(stream("none"), *wrong))


@pytest.mark.parametrize("name", ["none", "aegis128x2", "hybrid", "state_f16", "state_int8", "quantized", "compressed"])
def test_damage_is_refused(name):
    good = stream(name)
    for at in range(0, len(good), 37):
        bad = bytearray(good)
        bad[at] ^= 0x40
        with pytest.raises((ValueError, kv_reader.struct.error)):
            list(kv_reader.read(bytes(bad), KEY, HANDOFF, TOKENS))
