#!/usr/bin/env python3
"""Plays an agent's conversation of 40 turns to servers with llama-server's /completion, and counts the tokens they compute.

    scripts/agent-turns.py baton=http://127.0.0.1:8080 llama-server=http://127.0.0.1:8081

Prompts are tokens, so every server gets the same ones whatever its template. They are shaped as a thinking model's template
shapes them: a turn ends with the beginning of a reply and of its reasoning, and the next turn leaves out the reasoning of the
replies before. Every eighth turn goes back to an earlier one, as an agent does that tries again. Replies are made up, since a
model with random weights says nothing that is worth keeping, and so the turns do not depend on the servers.
"""

import json
import random
import sys
import urllib.request

START, END = 257, 258  # control tokens of the tiny models
TURNS = 40
SYSTEM = 700
REPLY = 16


def body(rng, n):
    return [rng.randrange(256) for _ in range(n)]


def turns():
    """Yields the prompt of each turn."""
    rng = random.Random(7)
    opening = [START, *b"assistant\n"]
    thinks = [*b"<think>\n"]
    history = [START, *b"system\n", *body(rng, SYSTEM), END]
    kept = []
    for turn in range(TURNS):
        if turn % 8 == 7:
            history = list(kept[turn // 2])
        history = history + [START, *b"user\n", *body(rng, rng.randrange(40, 160)), END]
        kept.append(list(history))
        yield history + opening + thinks
        history = history + opening + body(rng, rng.randrange(20, 80)) + [END]


def computed(url, prompt):
    """The tokens of a prompt that a server computed."""
    asked = {"prompt": prompt, "n_predict": REPLY, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
    request = urllib.request.Request(url + "/completion", json.dumps(asked).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)["timings"]["prompt_n"]


def main():
    servers = dict(argument.split("=", 1) for argument in sys.argv[1:])
    prompts = list(turns())
    counts = {name: [computed(url, prompt) for prompt in prompts] for name, url in servers.items()}
    print(f"| server | prompt tokens | computed | second turn, of {len(prompts[1])} | median turn | largest after the first |")
    print("|---|---|---|---|---|---|")
    for name, each in counts.items():
        rest = sorted(each[1:])
        total = sum(map(len, prompts))
        print(f"| {name} | {total} | {sum(each)} | {each[1]} | {rest[len(rest) // 2]} | {rest[-1]} |")
    for name, each in counts.items():
        print(f"{name}: {each}")


main()
