"""vLLM computes prompts, llama.cpp decodes: packaging/vllm makes the server a prefill node of an endpoint.

Both have the same weights, vLLM in bf16 and the GGUF file in f16 rounded to bf16. The last test but one kills their server.
"""

import contextlib
import itertools
import json
import os
import random
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

import pulls
from certificates import self_signed
from fronts import eventually, http
from pairs import MAX_DISTANCE, N_TOKENS, agreement, chat, endpoint, handed_over, handing, mlx, prompt, start
from vllm_server import running

N_PROMPTS = int(os.environ.get("VLLM_PROMPTS", "20"))
TOPICS = ["the sea", "bread", "bridges", "winter", "glass", "a clock", "maps", "salt", "rivers", "paper", "the moon", "horses",
          "steel", "tea", "music", "trains", "gardens", "silk", "lightning", "wool"]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with running(start(tmp_path_factory.mktemp("vllm"))) as (vllm,):
        yield vllm


@pytest.fixture(scope="module")
def alone():
    with endpoint() as front:
        yield front


@pytest.fixture(scope="module")
def pair(vllm):
    with handing(vllm) as front:
        eventually(lambda: handed_over(front, "warm up")[1], "the first handoff", 120)
        yield front


def failed(front, text):
    """Why the handoff of a prompt failed; the reply is complete."""
    reply, route = chat(front, text, 4)
    assert reply["usage"]["completion_tokens"] == 4
    return reply["timings"].get("handoff", {}).get("failure"), route


def test_replies_are_those_of_llama_cpp_alone(pair, alone):
    same, first, distance, kl = 0, 0, 0.0, []
    for topic in itertools.islice(TOPICS, N_PROMPTS):
        handed, wanted = (
            chat(front, prompt(topic), logprobs=True, top_logprobs=20)[0] for front in (pair, alone)
        )
        report = handed["timings"]["handoff"]
        assert "failure" not in report and report["n_tokens"] > 100, report
        distance = max(distance, report["kv_distance"])
        n_equal, divergences = agreement(wanted, handed)
        kl += divergences
        lengths = {len(reply["choices"][0]["logprobs"]["content"]) for reply in (wanted, handed)}
        same += lengths == {n_equal}
        first += n_equal > 0
    mean = sum(kl) / len(kl)
    print(f"\n{same} of {N_PROMPTS} greedy replies of {N_TOKENS} tokens are equal, {first} begin alike; KV distance {distance:.3g}, "
          f"mean KL {mean:.2g} over {len(kl)} predictions")
    # Arithmetic in bf16 and in f16 parts at near ties.
    assert distance < float(MAX_DISTANCE) and mean < 3e-2 and first >= 0.9 * N_PROMPTS and same >= N_PROMPTS / 2


def test_mlx_takes_the_rows(vllm):
    """A short prompt: MLX computes about 11 tokens a second on a processor."""
    n_tokens, text = 16, prompt("cork", 30)
    with handing(vllm, engine=mlx) as pair:
        eventually(lambda: handed_over(pair, "warm up")[1], "the first handoff", 300)
        handed, _ = chat(pair, text, n_tokens, logprobs=True, top_logprobs=20)
    with endpoint(engine=mlx) as alone:
        wanted, _ = chat(alone, text, n_tokens, logprobs=True, top_logprobs=20)
    report = handed["timings"]["handoff"]
    assert "failure" not in report and report["n_tokens"] > 60, report
    n_equal, kl = agreement(wanted, handed)
    mean = sum(kl) / len(kl)
    print(f"\nmlx: {report['n_tokens']} positions, KV distance {report['kv_distance']:.3g}, {n_equal} of {n_tokens} tokens are equal, "
          f"mean KL {mean:.2g} over {len(kl)} predictions; alone {wanted['timings']['prompt_ms'] / 1e3:.1f} s of prefill")
    assert report["kv_distance"] < float(MAX_DISTANCE) and mean < 3e-2 and n_equal > 0


def test_only_what_is_missing_is_sent(pair):
    base = prompt("amber")
    _, first = handed_over(pair, base)
    _, second = handed_over(pair, f"{base} And add a second thing, please, with a reason that fits in one line.")
    assert second["n_tokens"] < first["n_tokens"] / 2, (first, second)


def test_rows_leave_while_layers_are_computed(vllm):
    """The link takes 60 % of the prefill's time. Afterwards the same prompt is pulled again, when vLLM has it."""
    known = pulls.info(vllm.node)
    draw = random.Random(5)
    tokens = [draw.randrange(100, known["n_vocab"]) for _ in range(2_000)]
    vocabulary = known["fingerprint"]["vocabulary"]
    # Nothing that the others could find cached.
    pulls.pull(vllm.node, tokens[1:600], vocabulary)
    fast = pulls.pull(vllm.node, tokens[::-1], vocabulary)
    rate = fast.n_bytes / (0.6 * fast.computed)
    slow = pulls.SlowLink(vllm.node, rate)
    overlapped = pulls.pull(slow.port, tokens, vocabulary)
    after = pulls.pull(slow.port, tokens, vocabulary)
    assert overlapped.n_cached == 0 and after.n_cached > 1_800
    wire = after.n_bytes / rate
    print(f"\n2,000 tokens, {fast.n_bytes / 1e6:.1f} MB: loopback {fast.computed:.2f} s and {1e3 * fast.unhidden:.0f} ms after it; "
          f"link of {rate / 1e6:.1f} MB/s: {overlapped.computed:.2f} s and {1e3 * overlapped.unhidden:.0f} ms; "
          f"sent afterwards {1e3 * after.ended:.0f} ms")
    assert overlapped.unhidden < wire / 2, (overlapped, after, wire)


def test_a_client_that_leaves_ends_the_prompt(vllm, pair):
    model = http(f"{pair.v1}/models")[1]["data"][0]["id"]
    long = [{"role": "user", "content": prompt("frost", 1_200)}]
    with leaving(pair, {"model": model, "messages": long, "max_tokens": 4}):
        eventually(lambda: vllm.n_running() == 1, "the prompt at vLLM", 60)
    eventually(lambda: vllm.n_running() == 0, "the end of the prompt", 60)
    # vLLM frees memory in its steps, so another prompt brings that about.
    eventually(lambda: handed_over(pair, "And now?")[1] and vllm.metric("kv_cache_usage_perc") < 0.01, "free memory", 60)


@contextlib.contextmanager
def leaving(front, body):
    """A client that closes its connection at the end of the block."""
    address = urlsplit(front.root)
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        yield


def test_other_weights_are_not_asked_for_unless_allowed_and_refused_by_the_canary(vllm):
    with handing(vllm, None) as front:
        eventually(lambda: "reason=other_weights" in failed(front, prompt("flint"))[1], "the reason other_weights", 60)
    with handing(vllm, "0.0001") as front:
        eventually(lambda: failed(front, prompt("flint"))[0] == "canary_failed", "the failure canary_failed", 60)


def test_a_killed_server_costs_no_reply(vllm, pair, alone):
    replies = []
    text = prompt("granite", 900)
    thread = threading.Thread(target=lambda: replies.append(chat(pair, text, 16)))
    thread.start()
    eventually(lambda: vllm.n_running() == 1, "the prompt at vLLM", 60)
    vllm.kill()
    thread.join(timeout=300)
    [(reply, _)] = replies
    assert reply["timings"]["handoff"]["failure"] in ("prefill_lost", "prefill_down"), reply["timings"]
    print("\nkilled:", json.dumps(reply["timings"]["handoff"]))
    assert reply["usage"]["completion_tokens"] == 16
    begun = time.monotonic()
    again, route = chat(pair, prompt("basalt"), 4)
    assert again["usage"]["completion_tokens"] == 4, route
    assert time.monotonic() - begun < 60


def test_handoffs_run_over_tls(tmp_path):
    """With a server of its own."""
    cert, key = self_signed(tmp_path, "node")
    with running(start(tmp_path, tls_cert=cert, tls_key=key)) as (vllm,):
        vllm.address = f"https://localhost:{vllm.node}"
        with handing(vllm, MAX_DISTANCE, "--tls-ca", cert) as front:
            eventually(lambda: handed_over(front, "warm up")[1], "the first handoff", 120)
            _, report = handed_over(front, prompt("tin"))
            assert report and report["n_tokens"] > 100, report
        with handing(vllm) as front:
            # The node's certificate is of an authority that this endpoint does not know.
            reply, _ = chat(front, prompt("lead"), 4)
            assert reply["usage"]["completion_tokens"] == 4 and not reply["timings"].get("handoff", {}).get("n_tokens"), reply
