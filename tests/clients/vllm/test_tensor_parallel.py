"""vLLM with tensor parallelism as a prefill node: SmolLM2 has three KV heads, so three ranks have one each."""

import json
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import pulls
from fronts import eventually
from pairs import MAX_DISTANCE, chat, endpoint, handed_over, handing, prompt, start
from vllm_server import running

RANKS = ("--tensor-parallel-size", "3", "--distributed-executor-backend", "mp")
TOPICS = ["amber", "bells", "chalk"]


@pytest.fixture(scope="module")
def tokens():
    draw = random.Random(9)
    return [draw.randrange(100, 40_000) for _ in range(700)]


@pytest.fixture(scope="module")
def rows_of_one(tokens, tmp_path_factory):
    with running(start(tmp_path_factory.mktemp("one"))) as (vllm,):
        return pulls.rows(vllm.node, tokens, pulls.info(vllm.node))


@pytest.fixture(scope="module")
def vllm(rows_of_one, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with running(start(folder, *RANKS, env={"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)})) as (vllm,):
        # The ranks have met, and their folder is gone.
        assert not list(folder.glob("baton-ranks-*"))
        yield vllm


def test_three_ranks_send_the_rows_of_one(vllm, tokens, rows_of_one):
    rows = pulls.rows(vllm.node, tokens, pulls.info(vllm.node))
    assert rows.shape == rows_of_one.shape
    # One distance a head, so that a head in a wrong place shows.
    heads = [all_.reshape(*all_.shape[:3], 3, -1) for all_ in (rows, rows_of_one)]
    apart, size = (np.square(part).sum(axis=(2, 4)) for part in (heads[0] - heads[1], heads[1]))
    distances = np.sqrt(apart / size)
    print(f"\n{len(tokens)} positions: the ranks' rows are {distances.max():.3g} from those of one rank at most, "
          f"{distances.mean():.3g} on average of {distances.size} heads")
    assert distances.max() < float(MAX_DISTANCE)


def test_replies_of_the_pair_are_those_of_llama_cpp_alone(vllm):
    same, distance = 0, 0.0
    with handing(vllm) as pair, endpoint() as alone:
        eventually(lambda: handed_over(pair, "warm up")[1], "the first handoff", 120)
        for topic in TOPICS:
            text, report = handed_over(pair, prompt(topic), 16)
            assert report and report["n_tokens"] > 100, report
            distance = max(distance, report["kv_distance"])
            same += text == chat(alone, prompt(topic), 16)[0]["choices"][0]["message"]["content"]
        # Blocks of closed handoffs are freed on all ranks: otherwise none would be left for the others.
        eventually(lambda: handed_over(pair, "And now?")[1] and vllm.metric("kv_cache_usage_perc") < 0.01, "free memory", 60)
    print(f"\n{same} of {len(TOPICS)} replies of 16 tokens are equal; KV distance {distance:.3g}")
    assert distance < float(MAX_DISTANCE) and same >= len(TOPICS) - 1


def test_a_killed_rank_costs_no_reply(vllm):
    with handing(vllm) as pair:
        eventually(lambda: handed_over(pair, "warm up")[1], "the first handoff", 120)
        replies = []
        thread = threading.Thread(target=lambda: replies.append(chat(pair, prompt("dusk", 900), 16)[0]))
        thread.start()
        eventually(lambda: vllm.n_running() == 1, "the prompt at vLLM", 60)
        os.kill(process("VLLM::Worker_TP1"), signal.SIGKILL)
        thread.join(timeout=300)
        [reply] = replies
        print("\nkilled:", json.dumps(reply["timings"]["handoff"]))
        assert reply["timings"]["handoff"]["failure"] in ("prefill_lost", "prefill_down", "prefill_stalled"), reply["timings"]
        assert reply["usage"]["completion_tokens"] == 16


def process(title):
    """The id of the process with this title. scripts/check-vllm.sh shows the tests their own processes alone."""
    [found] = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_text().startswith(title)]
    return int(found.parent.name)
