"""vLLM computes prompts of models whose layers are of several kinds, which it keeps in groups with blocks of their own.

Qwen 3.5 and Nemotron-H have states beside rows, Gemma 3 rows of windows. All have random weights; scripts/check-vllm.sh makes the
folders and the GGUF files.
"""

import json
import os
import random
from urllib.parse import urlsplit

import numpy as np
import pytest

import pulls
import server
from fronts import eventually, http, http_or_text
from pairs import MAX_DISTANCE, agreement, chat, divergence, endpoint, gguf_of, handed_over, handing, prompt, start
from vllm_server import running

for variable in ("VLLM_HYBRID", "VLLM_MAMBA", "VLLM_WINDOWED"):
    server.need(os.environ.get(variable), f"{variable} names no folder of a model")

hybrid = gguf_of("VLLM_HYBRID")
TOPICS = ["amber", "bells", "chalk", "dusk"]
N_TOKENS = 16
UNCACHED = ("--no-enable-prefix-caching",)


def start_hybrid(folder, *args):
    return start(folder, *args, model=os.environ["VLLM_HYBRID"])


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with running(start_hybrid(tmp_path_factory.mktemp("vllm"))) as (vllm,):
        yield vllm


def tokens(seed, n):
    draw = random.Random(seed)
    return [draw.randrange(0, 256) for _ in range(n)]


def distances(ours, theirs):
    """Of each state, relative to theirs."""
    return [float(np.linalg.norm(one - other) / np.linalg.norm(other)) for (_, one), (_, other) in zip(ours, theirs)]


def check_replies(vllm, engine, has_states):
    """Random weights make more of vLLM's bf16 than trained ones do, so predictions of other prompts are the measure."""
    kl, distance, first = [], 0.0, []
    with handing(vllm, engine=engine) as pair, endpoint(engine=engine) as alone:
        eventually(lambda: handed_over(pair, "warm up")[1], "the first handoff", 120)
        for topic in TOPICS:
            handed, wanted = (
                chat(front, prompt(topic), N_TOKENS, logprobs=True, top_logprobs=20)[0] for front in (pair, alone)
            )
            report = handed["timings"]["handoff"]
            assert "failure" not in report and report["n_tokens"] > 100, report
            assert (report.get("state_bytes", 0) > 0) == has_states, report
            distance = max(distance, report["kv_distance"])
            kl += agreement(wanted, handed)[1]
            first.append(wanted["choices"][0]["logprobs"]["content"][0])
    mean, others = sum(kl) / len(kl), [divergence(one, other) for one, other in zip(first, first[1:])]
    print(f"\n{vllm.log.parent.name}: KV distance {distance:.3g}, mean KL {mean:.2g} over {len(kl)} predictions; "
          f"{min(others):.2g} at least between prompts")
    assert distance < float(MAX_DISTANCE) and mean < 0.1 and mean < min(others) / 5


def test_replies_are_those_of_llama_cpp_alone(vllm):
    check_replies(vllm, hybrid, has_states=True)


def test_so_are_those_of_mamba(tmp_path):
    """With a prefix cache vLLM 0.32 itself ends on a processor: IndexError in mamba_mixer2.py, at a prompt of several blocks."""
    with running(start(tmp_path, *UNCACHED, model=os.environ["VLLM_MAMBA"])) as (vllm,):
        check_replies(vllm, gguf_of("VLLM_MAMBA"), has_states=True)


def test_so_are_those_of_a_model_with_windows(tmp_path):
    """vLLM frees the blocks that no window needs while it computes the prompt."""
    with running(start(tmp_path, model=os.environ["VLLM_WINDOWED"])) as (vllm,):
        sections = pulls.info(vllm.node)["kv"]["layout"]["sections"]
        assert [section.get("window") for section in sections] == [None, 16]
        check_replies(vllm, gguf_of("VLLM_WINDOWED"), has_states=False)


def test_states_are_llama_cpps_and_exchanged_heads_are_not(vllm):
    prompt = tokens(1, 333)
    known = pulls.info(vllm.node)
    with server.node("--role", "prefill", *hybrid(), "--ctx-size", "4096") as url:
        port = urlsplit(url).port
        theirs = pulls.info(port)
        assert theirs["kv"]["layout"] == known["kv"]["layout"] and theirs["kv"]["canary"] == known["kv"]["canary"]
        wanted = pulls.states(port, prompt, theirs)
    found = pulls.states(vllm.node, prompt, known)
    apart = distances(found, wanted)
    print(f"\nhybrid: states are {max(apart):.3g} from llama.cpp's at most, {sum(apart) / len(apart):.3g} on average")
    assert max(apart) < float(MAX_DISTANCE)
    n_heads = 4
    exchanged = [
        (kind, np.roll(values.reshape(n_heads, -1), 1, axis=0).reshape(-1)) if kind == "recurrence" else (kind, values)
        for kind, values in found
    ]
    others = [apart for apart, (kind, _) in zip(distances(exchanged, wanted), wanted) if kind == "recurrence"]
    transposed = [
        (kind, values.reshape(n_heads, 64, 64).swapaxes(1, 2).reshape(-1)) if kind == "recurrence" else (kind, values)
        for kind, values in found
    ]
    others += [apart for apart, (kind, _) in zip(distances(transposed, wanted), wanted) if kind == "recurrence"]
    assert min(others) > 0.5, others


def completed(front, text):
    """What a completion's handoff reports."""
    model = http(f"{front.v1}/models")[1]["data"][0]["id"]
    body = {"model": model, "prompt": text, "max_tokens": 2, "temperature": 0}
    status, _, reply = http_or_text(f"{front.v1}/completions", body)
    assert status == 200, reply
    return json.loads(reply)["timings"]["handoff"]


def test_only_what_is_missing_is_sent(vllm):
    """The decode node goes on from the states of the first prompt's end, which it keeps as a checkpoint."""
    base = prompt("amber")
    with handing(vllm, engine=hybrid) as pair:
        eventually(lambda: handed_over(pair, "warm up")[1], "the first handoff", 120)
        first, second = (completed(pair, text) for text in (base, f"{base} And add a second thing, please."))
    print(f"\nhybrid: {first['n_tokens']} positions, then {second['n_tokens']}")
    assert "failure" not in first and "failure" not in second, (first, second)
    assert second["n_tokens"] < first["n_tokens"] / 2 and first["state_bytes"] == second["state_bytes"], (first, second)


def test_states_are_the_same_if_vllm_has_the_beginning_cached(tmp_path):
    """It keeps the states of whole blocks. What follows the last one is computed again."""
    with running(start_hybrid(tmp_path, "--enable-prefix-caching", "--mamba-cache-mode", "align")) as (vllm,):
        known = pulls.info(vllm.node)
        prompt = tokens(2, 1_500)
        vocabulary = known["fingerprint"]["vocabulary"]
        assert pulls.pull(vllm.node, prompt, vocabulary).n_cached == 0
        first = pulls.states(vllm.node, prompt, known)
        again = pulls.pull(vllm.node, prompt, vocabulary)
        longer = prompt + tokens(3, 200)
        found = pulls.states(vllm.node, longer, known)
        cached = pulls.pull(vllm.node, longer, vocabulary).n_cached
    assert again.n_cached > 0 and cached > 0
    with running(start_hybrid(tmp_path, *UNCACHED)) as (vllm,):
        known = pulls.info(vllm.node)
        wanted, shorter = pulls.states(vllm.node, longer, known), pulls.states(vllm.node, prompt, known)
    apart = max(distances(found, wanted) + distances(first, shorter))
    print(f"\nhybrid: {again.n_cached} of {len(prompt)} positions cached; states are {apart:.3g} from those without a cache")
    assert apart < 0.05
