#!/usr/bin/env python3
"""Compares servers, fresh and after many chats with one system prompt, with llama-server's /completion.

    scripts/shared-prompt.py 32 1000 baton=http://127.0.0.1:8080 llama-server=http://127.0.0.1:8081

The first number is that of chats, the second that of the tokens that all of them begin with. Each server computes a prompt that
shares nothing, three times, before and after the chats, alone and beside a stream; the medians of its rates are compared. Servers are measured in turn, in
pairs of the same work, so what else the machine does slows both. Prompts are tokens, the same for every server: below 32,000 or, where
a vocabulary is smaller, bytes.
"""

import contextlib
import json
import random
import statistics
import sys
import urllib.error
import urllib.request

PROBE, PROBE_REPLY = 512, 48
CHAT, CHAT_REPLY = 160, 24


# Tokens of large vocabularies, and of models with random weights.
VOCABULARIES = range(1_000, 32_000), range(256)


class Tokens:
    """Draws tokens that all servers know."""

    def __init__(self, urls):
        self.rng = random.Random(43)
        self.vocabulary = next((known for known in VOCABULARIES if all(knows(url, known[-1]) for url in urls)), None)
        if self.vocabulary is None:
            sys.exit("shared-prompt: a server refuses every prompt")

    def __call__(self, n):
        return self.rng.choices(self.vocabulary, k=n)


def knows(url, token):
    try:
        timings(url, [token], 1)
    except urllib.error.HTTPError as refused:
        if refused.code >= 500:
            raise
        return False
    return True


def post(url, body):
    request = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=600)


def timings(url, prompt, n_reply):
    asked = {"prompt": prompt, "n_predict": n_reply, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
    with post(url, asked) as reply:
        return json.load(reply)["timings"]


@contextlib.contextmanager
def stream(url, prompt):
    """A stream that has begun, and goes on until the block ends."""
    with post(url, {"prompt": prompt, "n_predict": 2_000, "temperature": 0, "ignore_eos": True, "stream": True}) as reply:
        reply.readline()
        yield


def probe(servers, tokens, beside):
    """The rates of each server: prompt tokens and reply tokens a second."""
    rates = {name: ([], []) for name in servers}
    for _ in range(3):
        prompt, other = tokens(PROBE), tokens(CHAT)
        for name, url in servers.items():
            with stream(url, other) if beside else contextlib.nullcontext():
                times = timings(url, prompt, PROBE_REPLY)
            rates[name][0].append(times["prompt_per_second"])
            rates[name][1].append(times["predicted_per_second"])
    return {name: tuple(map(statistics.median, both)) for name, both in rates.items()}


def main():
    n_chats, n_shared = map(int, sys.argv[1:3])
    servers = dict(argument.split("=", 1) for argument in sys.argv[3:])
    tokens = Tokens(servers.values())
    for url in servers.values():
        timings(url, tokens(64), 8)  # What is done once at the start is no part of a rate.
    fresh = [probe(servers, tokens, beside) for beside in (False, True)]
    system = tokens(n_shared)
    computed = dict.fromkeys(servers, 0)
    for _ in range(n_chats):
        prompt = system + tokens(CHAT)
        for name, url in servers.items():
            computed[name] += timings(url, prompt, CHAT_REPLY)["prompt_n"]
    used = [probe(servers, tokens, beside) for beside in (False, True)]
    print(f"{n_chats} chats of {n_shared + CHAT} tokens, {n_shared} of them shared")
    print("| server | prefill fresh, used, tok/s | used ÷ fresh | decode fresh, used, tok/s | used ÷ fresh | computed in the chats |")
    print("|---|---|---|---|---|---|")
    for company, before, after in zip(("alone", "beside a stream"), fresh, used, strict=True):
        for name in servers:
            (prefill, decode), (prefill_used, decode_used) = before[name], after[name]
            print(
                f"| {name}, {company} | {prefill:.0f}, {prefill_used:.0f} | {prefill_used / prefill:.2f} "
                f"| {decode:.1f}, {decode_used:.1f} | {decode_used / decode:.2f} | {computed[name]} |"
            )


main()
