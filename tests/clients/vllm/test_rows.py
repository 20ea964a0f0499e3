"""Rows come out of vLLM's caches as they went in, whatever order its kernels keep them in. No server is started."""

import sys
from types import SimpleNamespace

import pytest
import torch

from vllm_server import PACKAGE

sys.path.insert(0, str(PACKAGE))

from vllm import _custom_ops  # noqa: E402

from baton_vllm.connector import cpu_store  # noqa: E402
from baton_vllm.frames import Layout  # noqa: E402
from baton_vllm.rows import FP8, CpuRows, DeviceRows, Rows, rope_order  # noqa: E402

N_HEADS, HEAD, BLOCK, N_BLOCKS = 3, 64, 128, 5
BLOCKS = [4, 1, 3]
SCALES = (0.5, 2.0)


def read(rows, rope, p0, p1, dtype=torch.float16):
    pieces = rows.copy(SimpleNamespace(blocks=[BLOCKS], ready=None), 0, p0, p1)
    k, v = (torch.frombuffer(bytearray(piece), dtype=dtype).view(p1 - p0, N_HEADS, HEAD) for piece in pieces)
    if rope == "interleaved":
        # Back to half-split: GGUF's neighbours are the halves of a head.
        k = torch.cat([k[..., 0::2], k[..., 1::2]], dim=-1)
    return k, v


@pytest.mark.parametrize("rope", ["interleaved", "half_split"])
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_the_processors_caches_are_read(rope, isa, cache_dtype):
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip(f"this processor has no {isa}")
    if isa == "vec16" and cache_dtype != "auto":
        pytest.skip("vLLM has no FP8 caches for heads that need vec16")
    stored = FP8.get(cache_dtype)
    dtype = torch.bfloat16 if stored is None else torch.uint8
    cache = torch.zeros((N_BLOCKS, N_HEADS, BLOCK, 2 * HEAD), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    # Eighths up to 1.875 are exact in every type here but e5m2.
    k, v = (torch.randint(-15, 16, (300, N_HEADS, HEAD), generator=generator) / 8 for _ in range(2))
    scales = SCALES if stored else (1.0, 1.0)
    slots = torch.tensor([BLOCKS[p // BLOCK] * BLOCK + p % BLOCK for p in range(300)], dtype=torch.int64)
    halves = cache.view(N_BLOCKS, N_HEADS, 2 * BLOCK, HEAD).chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        (k * scales[0]).bfloat16(), (v * scales[1]).bfloat16(), *halves, slots, isa,
        k_scale=scales[0], v_scale=scales[1], kv_cache_dtype=cache_dtype)
    layout = Layout(rope, 1, N_HEADS * HEAD, "f16")
    store = cpu_store(torch.bfloat16, isa, cache_dtype)
    source = CpuRows([cache], layout, rope_order(HEAD, rope), store, stored)
    rows = Rows(source, layout, BLOCK, 1, [scales], stored, [0])
    tolerance = 0.13 if cache_dtype == "fp8_e5m2" else 0
    for p0, p1 in ((0, 300), (0, 1), (127, 129), (130, 300)):
        for got, wanted, scale in zip(read(rows, rope, p0, p1), (k, v), scales):
            assert (got.float() - (wanted[p0:p1] * scale)).abs().max() <= tolerance * 2 * scale


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("rope", ["interleaved", "half_split"])
def test_a_devices_caches_are_read(rope, split):
    """Of the shape that vLLM shows every device's in, here in ordinary memory."""
    cache = torch.randn((N_BLOCKS * split, N_HEADS, BLOCK // split, 2 * HEAD)).half()
    layout = Layout(rope, 1, N_HEADS * HEAD, "f16")
    rows = Rows(DeviceRows([cache], layout, rope_order(HEAD, rope)), layout, BLOCK, 1, [(1.0, 1.0)], None, [0])
    got = read(rows, rope, 100, 270)
    whole = cache.view(N_BLOCKS, split, N_HEADS, BLOCK // split, 2 * HEAD).transpose(1, 2).reshape(N_BLOCKS, N_HEADS, BLOCK, -1)
    wanted = torch.stack([whole[BLOCKS[p // BLOCK], :, p % BLOCK] for p in range(100, 270)]).chunk(2, dim=-1)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted))
