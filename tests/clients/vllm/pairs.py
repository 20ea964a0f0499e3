"""A vLLM server as the prefill node of an endpoint whose engine is llama.cpp, with the same weights."""

import contextlib
import json
import math
import os
import random

import server
from fronts import Front, http, http_or_text
from vllm_server import MAX_CONTEXT, PACKAGE, Vllm, ports

# vLLM computes in bf16 and the other engine in f16 or f32; 0.024 was measured.
MAX_DISTANCE = "0.1"
N_TOKENS = 64


def start(folder, *args, env=(), model=None, **options):
    node = next(ports)
    extra = {"listen": f"127.0.0.1:{node}", "vllm": f"http://127.0.0.1:{node + 1}", **options}
    transfer = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    vllm = Vllm(folder, transfer, *args, model=model, PYTHONPATH=str(PACKAGE), BATON_CLUSTER_KEY=server.CLUSTER_KEY, **dict(env))
    assert vllm.port == node + 1
    vllm.node = node
    vllm.address = f"127.0.0.1:{node}"
    return vllm


def llama():
    return "--model", os.environ["VLLM_GGUF"]


def gguf_of(variable):
    """The engine that runs the GGUF file beside the folder that a variable names."""
    return lambda: ("--model", os.environ[variable] + ".gguf")


def mlx():
    """The engine that computes vLLM's own folder, in f32."""
    python = os.environ.get("BATON_TEST_MLX_PYTHON")
    server.need(python, "BATON_TEST_MLX_PYTHON names no Python with mlx-lm")
    return "--engine", "mlx", "--mlx-python", python, "--model", os.environ["VLLM_MODEL"]


@contextlib.contextmanager
def endpoint(*args, engine=llama):
    with server.serve(*engine(), "--ctx-size", str(MAX_CONTEXT), *args) as banner:
        yield Front(banner)


def handing(vllm, distance=MAX_DISTANCE, *args, engine=llama):
    distance = ("--max-canary-distance", distance) if distance else ()
    return endpoint("--prefill", vllm.address, "--policy", "always_handoff", *distance, *args, engine=engine)


def prompt(topic, n_words=60):
    words = random.Random(topic)
    told = " ".join(words.choice(["old", "small", "blue", "quiet", "long", "warm"]) + f" {topic}" for _ in range(n_words))
    return f"Notes about {topic}: {told}. Tell me one thing about {topic}."


def chat(front, text, n_tokens=N_TOKENS, **more):
    model = http(f"{front.v1}/models")[1]["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": n_tokens, "temperature": 0, **more}
    status, headers, reply = http_or_text(f"{front.v1}/chat/completions", body)
    assert status == 200, reply
    return json.loads(reply), headers["x-baton-route"]


def handed_over(front, text, n_tokens=1):
    """The reply's text and what its handoff reports, without a failure; `None`s if there was one."""
    reply, _ = chat(front, text, n_tokens)
    report = reply["timings"].get("handoff")
    if not report or "failure" in report:
        return None, None
    return reply["choices"][0]["message"]["content"], report


def divergence(ours, theirs):
    """KL of two predictions in nats, over ours' 20 likeliest tokens and one for all others."""
    other = {one["token"]: math.exp(one["logprob"]) for one in theirs["top_logprobs"]}
    pairs = [(math.exp(one["logprob"]), other.get(one["token"], 1e-6)) for one in ours["top_logprobs"]]
    pairs.append(tuple(max(1e-6, 1 - sum(one[i] for one in pairs)) for i in (0, 1)))
    return sum(p * math.log(p / q) for p, q in pairs if p > 0)


def agreement(wanted, handed):
    """How many tokens two replies begin alike, and the divergence of each prediction after the same tokens.

    These are the predictions up to the first that differs, its own included.
    """
    divergences, n_equal = [], 0
    for ours, theirs in zip(*(reply["choices"][0]["logprobs"]["content"] for reply in (wanted, handed))):
        divergences.append(divergence(ours, theirs))
        if ours["token"] != theirs["token"]:
            break
        n_equal += 1
    return n_equal, divergences
