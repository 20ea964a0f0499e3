#!/usr/bin/env python3
"""Plays one trace of chats to a router, and prints the times to the first token and what was cached: a line of a table.

    scripts/router-trace.py baton http://127.0.0.1:8080

The trace has agents, whose prompts grow by every turn, chats, and batches that arrive at once. It is the same for every router:
when a turn begins depends on the end of the one before it, but what it says does not. A failed request is an error.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from urllib.parse import urlsplit

SEED = 48
SECONDS = 24  # in which conversations begin
AGENTS, CHATS, BATCHES = 6, 16, 3
PATIENCE = 120
WORDS = "heron lighthouse river stone cloud window garden letter engine winter music paper bridge island candle forest".split()


def text(rng, n_bytes):
    said = ""
    while len(said) < n_bytes:
        said += rng.choice(WORDS) + " "
    return said[:n_bytes]


def conversations():
    """Each: when it begins, the pause between its turns, and its turns: messages and the most tokens of the reply."""
    rng = random.Random(SEED)
    tools = [text(rng, 3_000) for _ in range(2)]
    greeting = text(rng, 300)

    def conversation(begins, pause, system, n_turns, message, n_reply):
        messages, turns = [{"role": "system", "content": system}], []
        for _ in range(n_turns):
            messages = [*messages, {"role": "user", "content": text(rng, rng.randint(*message))}]
            turns.append((messages, rng.randint(*n_reply)))
            messages = [*messages, {"role": "assistant", "content": text(rng, 200)}]
        return begins, pause, turns

    for i in range(AGENTS):
        yield conversation(i * SECONDS / AGENTS, 0.3, tools[i % 2], rng.randint(4, 8), (200, 900), (20, 60))
    for i in range(CHATS):
        yield conversation(i * SECONDS / CHATS, 3, greeting, rng.randint(1, 4), (40, 200), (60, 160))
    for i in range(BATCHES):
        system = text(rng, 1_000)
        for _ in range(12):
            yield conversation((i + 0.5) * SECONDS / BATCHES, 0, system, 1, (500, 2_500), (10, 30))


async def ask(address, messages, n_reply):
    """Seconds to the first token and to the end, tokens of the prompt, and those that were cached."""
    body = json.dumps(
        {
            "model": "sim",
            "messages": messages,
            "max_tokens": n_reply,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": 1,
        }
    ).encode()
    began, first, usage = time.monotonic(), None, None
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        if status.split(b" ")[1:2] != [b"200"]:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(2_000)).decode(errors='replace')}")
        # Sizes of chunks and their ends are lines of their own, which are no data.
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            said = any(choice.get("delta", {}).get("content") for choice in event.get("choices", []))
            first = first or (time.monotonic() if said else None)
    finally:
        writer.close()
    if first is None or usage is None:
        raise RuntimeError("a reply has no text or no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return first - began, time.monotonic() - began, usage["prompt_tokens"], cached


async def play(address):
    began = time.monotonic()

    async def converse(begins, pause, turns):
        await asyncio.sleep(max(0, began + begins - time.monotonic()))
        found = []
        for messages, n_reply in turns:
            found.append(await asyncio.wait_for(ask(address, messages, n_reply), PATIENCE))
            await asyncio.sleep(pause)
        return found

    found = await asyncio.gather(*(converse(*conversation) for conversation in conversations()))
    return [request for each in found for request in each]


def main():
    name, url = sys.argv[1:3]
    found = asyncio.run(play(urlsplit(url)))
    firsts = sorted(first for first, *_ in found)
    p99 = firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]
    ends = statistics.mean(end for _, end, *_ in found)
    cached = sum(n for *_, n in found) / sum(n for _, _, n, _ in found)
    print(f"| {name} | {len(found)} | {statistics.median(firsts):.2f} s | {p99:.2f} s | {ends:.2f} s | {cached:.1%} |")


main()
