"""A running Baton with the real model, for every client's tests, by both routes.

A test that asks for `endpoint`, `base_url`, `ollama_url` or `client` runs twice: against an endpoint that generates
directly, and against one that has every prompt computed by a prefill node and takes over its KV cache. `make test` runs
each by one of the two, `make test-long` by the other one.
"""

import json
import os
import urllib.request
import zlib
from typing import NamedTuple

import pytest
from openai import OpenAI

import server

MODEL = "smollm2"
# `make test` names a file of the same model, in a type that llama.cpp computes in half the time.
FILE = os.environ.get("BATON_TEST_MODEL", MODEL)
SERVED = ("--model", FILE, "--name", MODEL)
QUANTIZATION = "Q4_1" if FILE == MODEL else "Q8_0"


class Endpoint(NamedTuple):
    route: str
    banner: str

    @property
    def base_url(self):
        return server.base_url(self.banner)

    @property
    def ollama_url(self):
        return server.ollama_url(self.banner)

    def took_its_route(self, head):
        """Returns true if a reply's headers, in lower case, name the route. A cached prompt is not handed over."""
        is_cached = self.route == "handoff" and "reason=cached" in head
        return f"x-baton-route: {self.route}" in head or is_cached

    def state(self):
        with urllib.request.urlopen(self.base_url.removesuffix("/v1") + "/baton/state", timeout=60) as reply:
            return json.load(reply)


@pytest.fixture(scope="session")
def banner():
    """The banner of a server that generates directly."""
    with server.serve(*SERVED) as banner:
        yield banner


@pytest.fixture(scope="session")
def short_banner():
    """The banner of a server with a small context, for clients that do not bound their replies: this model may fill it."""
    with server.serve(*SERVED, "--ctx-size", "1024") as banner:
        yield banner


@pytest.fixture(scope="session")
def handoff_banner():
    """The banner of a server whose prompts a prefill node computes."""
    with server.node("--role", "prefill", *SERVED) as prefill:
        policy = ("--prefill", prefill, "--policy", "always_handoff", "--no-calibration")
        with server.serve(*SERVED, *policy) as banner:
            yield banner
            state = Endpoint("handoff", banner).state()
            # After all tests of this route: prompts came from the other node, without a fallback.
            assert any(route["prefill"] for route in state["routes"])
            assert [model["fallbacks"] for model in state["models"]] == [{}]


BANNERS = {"direct": "banner", "handoff": "handoff_banner"}
# By which routes a test runs that asks for an endpoint: both, `one` of them, or the `other` one.
WANTED_ROUTES = os.environ.get("BATON_TEST_ROUTES", "both")
assert WANTED_ROUTES in ("both", "one", "other"), f"BATON_TEST_ROUTES={WANTED_ROUTES}"


def runs(item):
    """Returns true if the test's route is wanted. Its name without the route chooses the one, so that each gets half of the tests."""
    parameters = item.callspec.id.split("-") if hasattr(item, "callspec") else []
    route = next((name for name in parameters if name in BANNERS), None)
    if WANTED_ROUTES == "both" or route is None:
        return WANTED_ROUTES != "other"
    parameters.remove(route)
    name = "-".join([item.nodeid.partition("[")[0].rpartition("/")[2], *parameters])
    one = list(BANNERS)[zlib.crc32(name.encode()) % 2]
    return (route == one) == (WANTED_ROUTES == "one")


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not runs(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if runs(item)]


@pytest.fixture(scope="session", params=list(BANNERS))
def endpoint(request):
    name = BANNERS[request.param]
    return Endpoint(request.param, request.getfixturevalue(name))


@pytest.fixture(scope="session")
def base_url(endpoint):
    return endpoint.base_url


@pytest.fixture(scope="session")
def ollama_url(endpoint):
    return endpoint.ollama_url


@pytest.fixture
def client(base_url):
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
