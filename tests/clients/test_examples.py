"""The files in examples/ do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("command", "ending"),
    [([EXAMPLES / "chat.sh"], "data: [DONE]"), ([sys.executable, EXAMPLES / "chat.py"], None)],
    ids=["chat.sh", "chat.py"],
)
def test_an_example_answers(base_url, command, ending):
    question = 'Say "hi" in one word.\n\\'
    env = {**os.environ, "BATON_URL": base_url}
    done = subprocess.run([*command, question], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.strip()) > 1
    assert ending is None or done.stdout.strip().endswith(ending)
