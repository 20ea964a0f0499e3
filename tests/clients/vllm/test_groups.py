"""What the connector makes of vLLM's groups of layers. No server is started."""

import sys
from types import SimpleNamespace

import pytest

from vllm_server import PACKAGE

sys.path.insert(0, str(PACKAGE))

from baton_vllm.connector import BatonConnector, block_size_of, cpu_keeps_k_first  # noqa: E402
from baton_vllm.errors import Unsupported  # noqa: E402
from baton_vllm.frames import Layout, Window  # noqa: E402


@pytest.fixture
def connector():
    """Its part in the scheduler."""
    connector = object.__new__(BatonConnector)
    connector._requests, connector._scheduled = {}, set()
    connector._kv_cache_config = SimpleNamespace(kv_cache_groups=[None, None])
    return connector


def step(connector, n, new=(), cached=()):
    cached_requests = SimpleNamespace(
        req_ids=["r" for _ in cached],
        new_block_ids=list(cached),
        num_computed_tokens=[n for _ in cached],
        resumed_req_ids=set(),
    )
    meta = connector.build_connector_meta(SimpleNamespace(
        num_scheduled_tokens={"r": n},
        scheduled_new_reqs=[SimpleNamespace(req_id="r", block_ids=blocks, num_computed_tokens=0) for blocks in new],
        scheduled_cached_reqs=cached_requests,
        preempted_req_ids=None,
    ))
    return [one.blocks for one in meta.steps]


def test_blocks_of_each_group_are_counted_apart(connector):
    connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r", kv_transfer_params={"baton_handoff": "h"}), 0)
    [first] = step(connector, 32, new=[([1, 2], [3])])
    assert first == [[1, 2], [3]]
    assert step(connector, 32, cached=[([4, 5], [])]) == [[[1, 2, 4, 5], [3]]]
    assert step(connector, 32, cached=[None]) == [[[1, 2, 4, 5], [3]]]
    assert step(connector, 32, cached=[([6], [7])]) == [[[1, 2, 4, 5, 6], [3, 7]]]
    assert first == [[1, 2], [3]], "a step keeps what it was"
    assert connector.request_finished_all_groups(SimpleNamespace(request_id="r"), ([], [])) == (True, None)


def spec(block_size=16, window=None):
    return SimpleNamespace(block_size=block_size, sliding_window=window)


def test_rows_that_vllm_frees_are_not_promised():
    plain, windowed = Layout("half_split", 2, 8, "f16"), Layout("half_split", 2, 8, "f16", window=Window(64, (0,)))
    assert block_size_of([spec(), spec()], plain) == 16
    # vLLM may keep more than is sent.
    for window in (64, 100, None):
        assert block_size_of([spec(window=window), spec()], windowed) == 16
    for specs, layout in (
        ([spec(window=64), spec()], plain),
        ([spec(), spec(window=64)], windowed),
        ([spec(window=63), spec()], windowed),
        ([spec(32), spec()], plain),
    ):
        with pytest.raises(Unsupported):
            block_size_of(specs, layout)


@pytest.mark.parametrize("size", [64, 128])
def test_the_order_of_the_processors_states_is_found(size):
    assert cpu_keeps_k_first(size) in (True, False)
