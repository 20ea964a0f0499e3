"""The files in examples/ do what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import server
from conftest import MODEL, SERVED

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NODE = os.environ.get("BATON_NODE_CLIENTS")
# scripts/run-clients.sh builds it.
RUST = ROOT / "target/clients-rust/debug/examples/chat"
QUESTION = 'Say "hi" in one word.\n\\'


@pytest.fixture
def base_url(short_banner):
    return server.base_url(short_banner)


def output(*command, **env):
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_curl(base_url):
    assert output(EXAMPLES / "chat.sh", QUESTION, BATON_URL=base_url).endswith("data: [DONE]")


def test_python(base_url):
    assert len(output(sys.executable, EXAMPLES / "chat.py", QUESTION, BATON_URL=base_url)) > 1


def test_node(base_url):
    server.need(NODE, "Node's packages are not installed; scripts/run-clients.sh says why")
    # scripts/run-clients.sh copies the examples to the folder of the packages.
    assert len(output("node", f"{NODE}/chat.mjs", QUESTION, BATON_URL=base_url)) > 1


def test_rust(base_url):
    server.need(RUST.exists(), "scripts/run-clients.sh has not built the example")
    assert len(output(RUST, QUESTION, BATON_URL=base_url)) > 1


def check(review, models):
    assert review["remarks"] and [review["remarks_by"], review["verdict_by"]] == models
    assert review["verdict"] in ("accept", "revise", "reject")
    assert review["clarity"] in range(1, 6) and review["correctness"] in range(1, 6)


SUBMISSION = "The sum of two even numbers is even, because each is twice some number."


def test_a_review_by_one_model(base_url, tmp_path):
    file = tmp_path / "submission.txt"
    file.write_text(SUBMISSION)
    check(json.loads(output(sys.executable, EXAMPLES / "review.py", file, BATON_URL=base_url)), [MODEL, MODEL])


def test_a_review_by_two_models(tmp_path):
    other = os.environ.get("BATON_TEST_SWA_MODEL")
    server.need(other, "BATON_TEST_SWA_MODEL names no second model")
    file = tmp_path / "submission.txt"
    file.write_text(SUBMISSION)
    # The second model has no chat template of its own.
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    settings = ("--name", "judge", "--ctx-size", "1024", "--chat-template-file", template)
    with server.node("--model", other, *settings) as node:
        with server.serve(*SERVED, "--decode", node) as banner:
            env = {"BATON_URL": server.base_url(banner), "BATON_MODELS": f"{MODEL},judge"}
            check(json.loads(output(sys.executable, EXAMPLES / "review.py", file, **env)), [MODEL, "judge"])
