"""vLLM as an upstream: alone, and as a pair of a prefill and a decode server over NIXL.

The servers are killed at the end, in the order of the tests. What vLLM did is read from its own metrics.
"""

import json

import pytest

from dialects import ASK, DIALECTS, N_TOKENS
from fronts import client, entry, eventually, front, http, http_or_text, metric, raw_stream
from vllm_server import NIXL, Vllm, running

# Does not end within a test.
LONG = {"model": "smol", "messages": ASK, "max_tokens": 3_500, "ignore_eos": True}


class Pair:
    """A decode server, which may have a prefill server."""

    def __init__(self, decode, prefill=None):
        self.decode, self.prefill = decode, prefill
        self.root, self.v1 = decode.root, decode.v1

    def entry(self):
        return entry(self, "vllm", more=f'prefill = ["{self.prefill.root}"]' if self.prefill else "")


@pytest.fixture(scope="module", params=["alone", "pair"])
def servers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    if request.param == "alone":
        with running(Vllm(folder)) as (server,):
            yield Pair(server)
    else:
        prefill = Vllm(folder, {**NIXL, "kv_role": "kv_producer"})
        with running(prefill, Vllm(folder, {**NIXL, "kv_role": "kv_consumer"})) as (prefill, decode):
            yield Pair(decode, prefill)


@pytest.fixture(scope="module")
def baton(servers, tmp_path_factory):
    with front(tmp_path_factory.mktemp("front"), servers.entry()) as endpoint:
        yield endpoint


def long_prompt(n_words):
    return [{"role": "user", "content": " ".join(f"word{i}" for i in range(n_words))}]


def ask(baton, messages=ASK, **more):
    body = {"model": "smol", "messages": messages, "max_tokens": N_TOKENS, "temperature": 0, **more}
    return http_or_text(f"{baton.v1}/chat/completions", body)


def fallbacks(baton, reason):
    return metric(baton.root, "baton_upstream_prefill_fallbacks_total", reason=reason)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda f: f.__name__)
def test_every_dialect_reaches_it(servers, baton, dialect):
    itself = client(servers.v1).chat.completions.create(model="theirs", messages=ASK, max_tokens=N_TOKENS)
    before = servers.decode.metric("request_success_total")
    text, n_prompt, n_completion = dialect(baton)
    assert text and (n_prompt, n_completion) == (itself.usage.prompt_tokens, N_TOKENS)
    eventually(lambda: servers.decode.metric("request_success_total") == before + 1, "its count")


def test_completions_reach_it(servers, baton):
    itself = client(servers.v1).completions.create(model="theirs", prompt="The sky is", max_tokens=N_TOKENS)
    reply = baton.client().completions.create(model="smol", prompt="The sky is", max_tokens=N_TOKENS)
    assert reply.choices[0].text and reply.usage.prompt_tokens == itself.usage.prompt_tokens


def test_a_prompt_comes_by_transfer_if_there_is_a_prefill_server(servers, baton):
    moved = servers.decode.prompt_tokens("external_kv_transfer")
    computed = servers.decode.prompt_tokens("local_compute")
    status, _, text = ask(baton, long_prompt(250))
    assert status == 200, text
    n_prompt = json.loads(text)["usage"]["prompt_tokens"]
    moved = servers.decode.prompt_tokens("external_kv_transfer") - moved
    computed = servers.decode.prompt_tokens("local_compute") - computed
    assert n_prompt > 500
    if servers.prefill:
        # NIXL's decode server may compute the last token again.
        assert moved >= n_prompt - 1 and computed <= 1, (n_prompt, moved, computed)
        assert servers.prefill.prompt_tokens("local_compute") > 500
    else:
        assert moved == 0 and computed > n_prompt / 2


def test_a_client_that_leaves_stops_it(servers, baton):
    events = raw_stream(f"{baton.v1}/chat/completions", LONG)
    for _ in range(3):
        next(events)
    assert servers.decode.n_running() == 1
    events.close()
    eventually(lambda: servers.decode.n_running() == 0, "the end of its work")
    assert baton.state()["upstreams"][0]["breaker"]["is_open"] is False


def test_without_its_prefill_server_it_computes_the_prompt_itself(servers, baton):
    if not servers.prefill:
        pytest.skip("it has no prefill server")
    _, _, text = ask(baton, long_prompt(60))
    servers.prefill.kill()
    status, _, again = ask(baton, long_prompt(61))
    assert status == 200, again
    assert fallbacks(baton, "prefill_failed") == 1
    status, _, third = ask(baton, long_prompt(60))
    assert status == 200 and fallbacks(baton, "prefill_kept_away") >= 1
    content = lambda reply: json.loads(reply)["choices"][0]["message"]["content"]
    assert content(third) == content(text)


def test_a_killed_server_ends_its_reply_with_an_error_and_is_unavailable(servers, baton):
    events = raw_stream(f"{baton.v1}/chat/completions", LONG)
    for _ in range(3):
        next(events)
    servers.decode.kill()
    rest = list(events)
    assert "error" in json.loads(rest[-1]) and "[DONE]" not in rest, rest[-3:]
    for _ in range(3):
        status, headers, text = ask(baton)
        assert status == 503 and int(headers["retry-after"]) >= 1, text
    status, health = http(f"{baton.root}/health")
    assert status == 503, health
