"""Node's clients, run by Node's test runner: each file of tests/clients/node, on both routes.

scripts/run-clients.sh copies that folder to its packages and puts the path into BATON_NODE_CLIENTS.
"""

import os
import subprocess
from pathlib import Path

import pytest

import server

SOURCES = sorted(Path(__file__).with_name("node").glob("*.test.mjs"))


@pytest.mark.parametrize("name", [source.name for source in SOURCES])
def test_a_package_of_node(endpoint, name):
    folder = os.environ.get("BATON_NODE_CLIENTS")
    server.need(folder, "Node's packages are not installed; scripts/run-clients.sh says why")
    env = {**os.environ, "BATON_URL": endpoint.base_url, "BATON_OLLAMA_URL": endpoint.ollama_url}
    done = subprocess.run(["node", "--test", name], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout and "# tests 0" not in done.stdout
