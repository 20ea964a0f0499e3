"""schemathesis holds the running server against its own document, `/openapi.json`: statuses, headers, types and shapes of
replies, what has to be taken and what has to be refused, in every dialect. schemathesis_hooks.py is a part of it.
"""

import os
import subprocess
import sys

import server
from conftest import MODEL

OPTIONS = [
    "--phases", "examples,coverage,fuzzing",
    # Each is a generation where it is valid. The same on every day.
    "--max-examples", "5", "--generation-deterministic", "--seed", "1",
    "--request-timeout", "600", "--suppress-health-check", "all", "--continue-on-failure", "--no-color",
]


def test_the_document_is_true(tmp_path):
    # Bodies of random texts can be long.
    with server.serve("--model", MODEL, "--ctx-size", "8192") as banner:
        url = server.base_url(banner).removesuffix("/v1") + "/openapi.json"
        judge = os.path.join(os.path.dirname(sys.executable), "schemathesis")
        here = os.path.dirname(os.path.abspath(__file__))
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": here}
        # It remembers failures where it runs, and tries them first the next time.
        run = subprocess.run(
            [judge, "run", url, *OPTIONS], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=1800
        )
    print(run.stdout, run.stderr)
    assert run.returncode == 0
