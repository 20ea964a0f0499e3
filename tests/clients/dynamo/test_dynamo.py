"""NVIDIA Dynamo's frontend with mocker workers, and an endpoint in front of it.

scripts/check-dynamo.sh says where the model's tokenizer is, and runs this in a network of its own; without it these tests are
skipped. Mockers say random tokens, at about a hundred a second. What Dynamo did is read from its own metrics.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest

from dialects import ASK, DIALECTS, N_TOKENS
from fronts import client, entry, eventually, front, http, http_or_text, metric, raw_stream

if "DYNAMO_MODEL" not in os.environ:
    reason = "Dynamo is not installed here: `make dynamo` installs it and runs this"
    pytest.skip(reason, allow_module_level=True)

# Never complete within a test.
LONG = {"model": "smol", "messages": ASK, "max_tokens": 20_000}
ports = itertools.count(8000)


class Process:
    """A process of Dynamo, whose metrics are at `root`."""

    def __init__(self, module, folder, *args, **env):
        self.port = next(ports)
        self.root = f"http://127.0.0.1:{self.port}"
        plane = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        env = {**os.environ, **plane, "DYN_FILE_KV": str(folder), "HF_HUB_OFFLINE": "1", **env}
        if module == "dynamo.frontend":
            args = ("--http-host", "127.0.0.1", "--http-port", str(self.port), *args)
        else:
            env["DYN_SYSTEM_PORT"] = str(self.port)
        with open(folder.parent / f"{self.port}.log", "w") as log:
            command = [sys.executable, "-m", module, *args]
            self.process = subprocess.Popen(command, env=env, start_new_session=True, stdout=log, stderr=log)

    def metric(self, name, **labels):
        """The sum of a metric over all series with these labels."""
        return metric(self.root, name, **labels)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Worker(Process):
    def __init__(self, folder, mode):
        model = ("--model-path", os.environ["DYNAMO_MODEL"], "--model-name", "theirs")
        super().__init__("dynamo.mocker", folder, *model, "--disaggregation-mode", mode)

    def n_requests(self):
        return self.metric("dynamo_component_requests_total", dynamo_endpoint="generate")

    def n_running(self):
        return self.metric("dynamo_component_inflight_requests", dynamo_endpoint="generate")

    def n_cancelled(self):
        return self.metric("dynamo_component_cancellation_total", dynamo_endpoint="generate")


class Dynamo:
    """A frontend and its workers."""

    def __init__(self, folder, modes):
        self.folder = folder / "discovery"
        self.folder.mkdir()
        self.frontend = Process("dynamo.frontend", self.folder, "--router-mode", "kv")
        self.root, self.v1 = self.frontend.root, f"{self.frontend.root}/v1"
        self.workers = [Worker(self.folder, mode) for mode in modes]
        self.wait()

    def wait(self):
        def generates():
            with contextlib.suppress(OSError):
                return all(said(self.v1, "theirs") == 200 for _ in self.workers)

        eventually(generates, "Dynamo's reply", 90)

    def add(self, mode):
        self.workers.append(Worker(self.folder, mode))

    def kill(self):
        for process in [self.frontend, *self.workers]:
            process.kill()


def said(v1, model="smol"):
    return http_or_text(f"{v1}/chat/completions", {"model": model, "messages": ASK, "max_tokens": N_TOKENS})[0]


@contextlib.contextmanager
def running(tmp_path, *modes):
    dynamo = Dynamo(tmp_path, modes)
    try:
        yield dynamo
    finally:
        dynamo.kill()


@pytest.fixture(scope="module", params=[("agg",), ("prefill", "decode")], ids=["aggregated", "disaggregated"])
def dynamo(request, tmp_path_factory):
    with running(tmp_path_factory.mktemp("dynamo"), *request.param) as dynamo:
        yield dynamo


@pytest.fixture(scope="module")
def baton(dynamo, tmp_path_factory):
    with front(tmp_path_factory.mktemp("front"), entry(dynamo, "openai")) as endpoint:
        yield endpoint


def test_its_models_are_listed_under_our_names_or_its_own(dynamo, baton, tmp_path):
    assert [model.id for model in baton.client().models.list()] == ["smol"]
    with front(tmp_path, entry(dynamo, "openai", models=None)) as as_listed:
        eventually(lambda: [model.id for model in as_listed.client().models.list()] == ["theirs"], "its list")
        assert said(as_listed.v1, "theirs") == 200


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda f: f.__name__)
def test_every_dialect_reaches_every_worker_of_a_route(dynamo, baton, dialect):
    itself = client(dynamo.v1).chat.completions.create(model="theirs", messages=ASK, max_tokens=N_TOKENS)
    before = [worker.n_requests() for worker in dynamo.workers]
    text, n_prompt, n_completion = dialect(baton)
    assert text and (n_prompt, n_completion) == (itself.usage.prompt_tokens, N_TOKENS)
    eventually(lambda: [worker.n_requests() for worker in dynamo.workers] == [n + 1 for n in before], "its count")


def test_completions_reach_it(dynamo, baton):
    itself = client(dynamo.v1).completions.create(model="theirs", prompt="The sky is", max_tokens=N_TOKENS)
    raw = baton.client().completions.with_raw_response.create(model="smol", prompt="The sky is", max_tokens=N_TOKENS)
    assert "upstream=one; reason=only_upstream" in raw.headers["x-baton-route"]
    reply = raw.parse()
    assert reply.choices[0].text and reply.usage.prompt_tokens == itself.usage.prompt_tokens


def test_a_route_that_it_lacks_is_named(baton):
    status, reply = http(f"{baton.v1}/rerank", {"model": "smol", "query": "hi", "documents": ["a", "b"]})
    assert status == 501 and "rerank" in reply["error"]["message"], reply


def test_a_client_that_leaves_stops_its_workers(dynamo, baton):
    decode = dynamo.workers[-1]
    before = decode.n_cancelled()
    events = raw_stream(f"{baton.v1}/chat/completions", LONG)
    for _ in range(3):
        next(events)
    assert decode.n_running() == 1
    events.close()
    eventually(lambda: decode.n_running() == 0 and decode.n_cancelled() == before + 1, "the cancellation")
    eventually(lambda: dynamo.frontend.metric("dynamo_frontend_inflight_requests") == 0, "the frontend's end")
    assert baton.state()["upstreams"][0]["breaker"]["is_open"] is False


def test_a_killed_worker_ends_its_reply_with_an_error_and_leaves_the_next_to_the_other(tmp_path):
    with running(tmp_path, "agg", "agg") as dynamo, front(tmp_path, entry(dynamo, "openai")) as baton:
        events = raw_stream(f"{baton.v1}/chat/completions", LONG)
        for _ in range(3):
            next(events)
        [busy] = [worker for worker in dynamo.workers if worker.n_running()]
        [other] = [worker for worker in dynamo.workers if worker is not busy]
        busy.kill()
        rest = list(events)
        assert "error" in json.loads(rest[-1]) and "[DONE]" not in rest, rest[-3:]
        before = other.n_requests()
        eventually(lambda: said(baton.v1) == 200, "the next reply")
        assert other.n_requests() > before


def test_a_killed_prefill_worker_is_replaced(tmp_path):
    with running(tmp_path, "prefill", "decode") as dynamo, front(tmp_path, entry(dynamo, "openai")) as baton:
        dynamo.workers.pop(0).kill()
        status, headers, text = http_or_text(f"{baton.v1}/chat/completions", {**LONG, "max_tokens": N_TOKENS})
        assert status == 200 or status == 503 and int(headers["retry-after"]) >= 1, text
        dynamo.add("prefill")
        new = dynamo.workers[-1]

        def prefills():
            with contextlib.suppress(OSError):
                return said(baton.v1) == 200 and new.n_requests() > 0

        eventually(prefills, "the new worker", 60)


@pytest.mark.parametrize("models", ['{ smol = "theirs" }', None], ids=["with_models", "as_listed"])
def test_without_workers_it_is_unavailable_until_one_is_back(tmp_path, models):
    name = "smol" if models else "theirs"
    with running(tmp_path, "agg") as dynamo, front(tmp_path, entry(dynamo, "openai", models=models)) as baton:
        eventually(lambda: said(baton.v1, name) == 200, "a reply")
        dynamo.workers.pop().kill()
        ask = {"model": name, "messages": ASK, "max_tokens": N_TOKENS}

        def answer():
            status, headers, text = http_or_text(f"{baton.v1}/chat/completions", ask)
            assert status == 503 and int(headers["retry-after"]) >= 1, text

        def lists_nothing():
            # While Dynamo notices: at first it fails, then it is not ready, then it knows no such model.
            answer()
            return json.loads(http_or_text(f"{dynamo.v1}/models")[2])["data"] == []

        eventually(lists_nothing, "Dynamo's empty list", 60)
        answer()
        dynamo.add("agg")
        eventually(lambda: said(baton.v1, name) == 200, "the new worker", 60)
