"""Decodes tensors of the codecs kvq and kvq_fast as docs/kv-frames.md describes them.

`decode` returns a float32 array [positions][values], or raises ValueError. It does not round to the layout's dtype.
"""

import math
import struct
from functools import cache

import numpy as np


def decode(encoded, shape, start, pairing, rotation, plain, value_size, channels, tensor):
    """`plain` reads rows without a codec. `channels` keeps what tensors remember between frames."""
    n_rows, n_values = shape
    form, at = encoded[0], 1
    if form == 0:
        check(len(encoded) == 1 + n_rows * n_values * value_size, "length of plain rows")
        return plain(encoded[1:])
    n_exact = min(n_rows, max(0, 4 - start))
    exact = plain(encoded[at:at + n_exact * n_values * value_size])
    at += n_exact * n_values * value_size
    if form == 1:
        step, has_steps = struct.unpack_from("<fB", encoded, at)
        check(1e-30 <= step <= 1e30 and has_steps <= 1, "step")
        at += 5
        steps = np.full(n_values, step, np.float32)
        if has_steps:
            steps *= np.exp2((np.frombuffer(encoded, np.uint8, n_values, at).astype(np.float32) - 128) / 8)
            at += n_values
        means = np.frombuffer(encoded, "<i2", n_values, at).astype(int)
        classes = np.frombuffer(encoded, np.uint8, n_values, at + 2 * n_values).astype(int)
        check(classes.max() <= 97, "class")
        at += 3 * n_values
        state = {"steps": steps, "S": np.zeros(n_values, int), "A": np.zeros(n_values, int), "N": 0}
    else:
        check(form == 2 and tensor in channels, "form")
        state = channels[tensor]
        means, classes = advance(state)
    width = 256
    if rotation:
        width = max(1, 256 // rotation["head_size"]) * rotation["head_size"]
    blocks = [exact]
    for first in range(n_exact, n_rows, 512):
        if first > n_exact:
            means, classes = advance(state)
        n = min(512, n_rows - first)
        q = np.zeros((n, n_values), int)
        for left in range(0, n_values, width):
            slab = range(left, min(left + width, n_values))
            m = max(1, -(-n // 4))
            for stream in range(4):
                length, = struct.unpack_from("<I", encoded, at)
                bits = Bits(encoded[at + 4:at + 4 + length])
                at += 4 + length
                rows = range(min(stream * m, n), min((stream + 1) * m, n))
                for channel in sorted(slab, key=lambda c: classes[c]):
                    q[rows.start:rows.stop, channel] = integers(bits, int(classes[channel]), len(rows))
                check(bits.is_read(), "a stream of bits has another length")
        state["S"] += (16 * q + means).sum(0)
        state["A"] += np.abs(q).sum(0)
        state["N"] += n
        while state["N"] > 1024:
            state["S"], state["A"], state["N"] = state["S"] >> 1, state["A"] >> 1, state["N"] // 2
        values = ((16 * q + means) * (state["steps"] / 16)).astype(np.float32)
        blocks.append(rotate(values, start + first, pairing, rotation) if rotation else values)
    check(at == len(encoded), "nothing follows the last stream")
    channels[tensor] = state
    return np.concatenate(blocks)


def advance(state):
    """Means and classes for the next rows."""
    n = state["N"]
    means = np.clip((state["S"] + n // 2) // n, -32768, 32767)
    return means, 1 + np.searchsorted(bounds(), (4096 * state["A"] + 2048) // n, side="right")


def rotate(values, start, pairing, rotation):
    frequencies = np.array(rotation["frequencies"])
    n = len(frequencies)
    angles = (start + np.arange(len(values)))[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    heads = values.reshape(len(values), -1, rotation["head_size"]).copy()
    first, second = (slice(0, n), slice(n, 2 * n)) if pairing == "half_split" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first], heads[..., second] = a * cos - b * sin, a * sin + b * cos
    return heads.reshape(values.shape)


class Bits:
    def __init__(self, stream):
        self.number, self.n, self.at = int.from_bytes(stream, "little"), 8 * len(stream), 0

    def take(self, n):
        self.at += n
        check(self.at <= self.n, "a stream of bits ends too early")
        return self.number >> (self.at - n) & ((1 << n) - 1)

    def symbol(self, codes):
        length, code = 0, 0
        while (length, code) not in codes:
            length, code = length + 1, code << 1 | self.take(1)
        return codes[length, code]

    def is_read(self):
        return self.n - self.at < 8 and self.number >> self.at == 0


def integers(bits, c, n):
    if c == 0:
        return [0] * n
    if c <= 25:
        return [q for _ in range(-(-n // 4)) for q in four(bits, c)][:n]
    return [one(bits, c) for _ in range(n)]


def four(bits, c):
    codes, _ = codes_of(c)
    symbol = bits.symbol(codes)
    if symbol == 81:
        return [one(bits, 36) for _ in range(4)]
    return [symbol // 3 ** i % 3 - 1 for i in range(4)]


def one(bits, c):
    b = max(0, -(-(c - 49) // 4))
    codes, n = codes_of(c - 4 * b)
    symbol = bits.symbol(codes)
    upper = symbol - n
    if symbol == 2 * n + 1:
        upper = bits.take(16)
        upper -= (upper >> 15) << 16
    return (upper << b) + bits.take(b) - (1 << b >> 1)


@cache
def probabilities(c):
    root, scale = math.sqrt(math.sqrt(2.0)), 1.0
    for _ in range(abs(c - 41)):
        scale = scale / root if c < 41 else scale * root
    r, t, p = scale / (1.0 + scale), 1.0, []
    for _ in range(4096):
        p.append(t / ((1.0 + t) * (1.0 + t)))
        t *= r
    total = 0.0
    for k, share in enumerate(p):
        total += share if k == 0 else 2.0 * share
    return [share / total for share in p]


@cache
def bounds():
    means = []
    for c in range(1, 98):
        if c <= 49:
            total = 0.0
            for k, share in enumerate(probabilities(c)):
                total += share * k
            means.append(2.0 * total)
        else:
            means.append(2.0 * means[c - 5])
    return np.array([int(math.sqrt(a * b) * 4096.0) for a, b in zip(means, means[1:])])


@cache
def codes_of(c):
    """{(length, code): symbol}, and n."""
    p, n = probabilities(c), 0
    if c <= 25:
        three, rest, shares = (p[1], p[0], p[1]), 1.0, []
        for group in range(81):
            shares.append(three[group % 3] * three[group // 3 % 3] * three[group // 9 % 3] * three[group // 27])
            rest -= shares[-1]
    else:
        rest = 1.0 - p[0]
        while n < 60 and rest > 1 / 1024:
            n += 1
            rest -= 2.0 * p[n]
        shares = [p[abs(k)] for k in range(-n, n + 1)]
    weights = [max(0, int(share * 2.0 ** 40)) + 1 for share in shares + [rest]]
    leaves = sorted((weight, [symbol]) for symbol, weight in enumerate(weights))
    level = leaves
    for _ in range(10):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(level[::2], level[1::2])]
        level = sorted(leaves + pairs, key=lambda package: package[0])
    lengths = [0] * len(weights)
    for _, symbols in level[:2 * len(weights) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    codes, code, last = {}, 0, 0
    for symbol in sorted(range(len(weights)), key=lambda s: (lengths[s], s)):
        code <<= lengths[symbol] - last
        last = lengths[symbol]
        codes[last, code] = symbol
        code += 1
    return codes, n


def check(right, what):
    if not right:
        raise ValueError(what)
