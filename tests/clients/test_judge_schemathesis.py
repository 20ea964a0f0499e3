"""schemathesis holds the running server against its own document, `/openapi.json`: statuses, headers, types and shapes of
replies, what has to be taken and what has to be refused, in every dialect. schemathesis_hooks.py is a part of it.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import schemathesis_hooks
import server
from conftest import SERVED

# `make test` tries the document's examples and one made-up body a route; `make test-long` every edge of every field, and more.
IS_LONG = os.environ.get("SCHEMATHESIS") == "long"
OPTIONS = [
    "--phases", "examples,coverage,fuzzing" if IS_LONG else "examples,fuzzing",
    # Each valid example is a generation. The seed is fixed, so every run is the same.
    "--max-examples", "5" if IS_LONG else "1", "--generation-deterministic", "--seed", "1",
    # This model has no infilling tokens and is no reranker, so every valid body is a 400.
    "--exclude-path", "/infill", "--exclude-path-regex", "^/v[12]/rerank",
    "--request-timeout", "600", "--suppress-health-check", "all", "--continue-on-failure", "--no-color",
]


def test_the_document_is_true(tmp_path):
    # Random bodies can be long.
    with server.serve(*SERVED, "--ctx-size", "8192") as banner:
        url = server.base_url(banner).removesuffix("/v1") + "/openapi.json"
        judge = os.path.join(os.path.dirname(sys.executable), "schemathesis")
        here = os.path.dirname(os.path.abspath(__file__))
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": here}
        # schemathesis writes failures into its working directory and repeats them first.
        run = subprocess.run(
            [judge, "run", url, *OPTIONS], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=1800
        )
    print(run.stdout, run.stderr)
    assert run.returncode == 0


def bounded(path, body):
    schemathesis_hooks.bound(SimpleNamespace(path=path, body=body))
    return body


@pytest.mark.parametrize("path", schemathesis_hooks.LENGTHS)
def test_every_way_to_ask_for_a_long_reply_is_bounded(path):
    fields, least = schemathesis_hooks.LENGTHS[path]
    is_ollama = path.startswith("/api/")
    for field in fields:
        for wanted in (least, 1, 2, 3, 7162.0, 2**32 - 1, float(2**32 - 1), *([0, 0.0, -5.0] if is_ollama else [])):
            asked = {field: wanted}
            bounded(path, {"options": asked} if is_ollama else asked)
            assert asked[field] in (1, 2), wanted
        # An invalid body stays as it is.
        for wrong in (least - 1, least - 1.0, 2**32, 1e300, 2.5, float("inf"), "5", True, False, []):
            asked = {field: wrong}
            bounded(path, {"options": asked} if is_ollama else asked)
            assert asked[field] is wrong
    absent = ({}, {"options": None}, {"options": {"num_predict": None}}) if is_ollama else ({}, {fields[0]: None})
    for body in absent:
        got = bounded(path, body)
        length = (got["options"] if is_ollama else got).get(fields[0])
        assert length == (None if path == "/v1/messages" else 2)
    for body in ([], "text", None, 5, b"{}"):
        bounded(path, body)
