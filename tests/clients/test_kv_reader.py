"""A reader written from docs/kv-frames.md alone reads the output of Baton's writer, with every codec."""

from pathlib import Path

import numpy as np
import pytest

import kv_reader

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kv"
KEY, HANDOFF = b"a cluster key of the tests", bytes(range(16))
TOKENS = [i * 1000 + 7 for i in range(12)]


def value(section, layer, is_v, position, i):
    """The fixtures' values; the same formula as in tests/fuzz/src/sample.rs."""
    return (section * 31 + layer * 17 + is_v * 7 + position * 5 + i * 3) % 61 / 8 - 3.75


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
                    wanted = value(s, l, is_v, positions, np.arange(rows.shape[1])[None, :])
                    assert rows.shape == wanted.shape
                    # Half a step: of the block's scale, or of the tensor, in both elements of a rotated pair.
                    tolerance = {"q8_0": 3.76 / 254, "kvq": 0.4, "kvq_fast": 0.6}.get(codec, 0)
                    assert np.abs(rows - wanted).max(initial=0) <= tolerance
                    n_values += rows.size
    # Ten positions of two layers of K and V, and five of a windowed layer without V.
    assert n_values == 10 * 2 * (64 + 32) + 5 * 32


@pytest.mark.parametrize("wrong", [(b"other", HANDOFF, TOKENS), (KEY, bytes(16), TOKENS), (KEY, HANDOFF, TOKENS[::-1])])
def test_another_key_handoff_or_prompt_is_refused(wrong):
    with pytest.raises(ValueError):
        list(kv_reader.read(stream("none"), *wrong))


@pytest.mark.parametrize("name", ["none", "aegis128x2"])
def test_damage_is_refused(name):
    good = stream(name)
    for at in range(0, len(good), 37):
        bad = bytearray(good)
        bad[at] ^= 0x40
        with pytest.raises((ValueError, kv_reader.struct.error)):
            list(kv_reader.read(bytes(bad), KEY, HANDOFF, TOKENS))
