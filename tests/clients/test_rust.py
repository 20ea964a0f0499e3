"""Rust's clients, run by cargo's test runner: tests/clients/rust, built by scripts/run-clients.sh."""

import os
import subprocess
from pathlib import Path

import pytest

PACKAGE = Path(__file__).with_name("rust")
TARGET = PACKAGE.parents[2] / "target/clients-rust"


@pytest.mark.parametrize("name", [source.stem for source in sorted((PACKAGE / "tests").glob("*.rs"))])
def test_a_package_of_rust(endpoint, name):
    env = {**os.environ, "BATON_URL": endpoint.base_url, "BATON_OLLAMA_URL": endpoint.ollama_url}
    command = ["cargo", "test", "--quiet", "--locked", "--target-dir", TARGET, "--test", name]
    # One after another: some compare replies, and other streams in a batch can change a reply.
    command += ["--", "--test-threads=1"]
    done = subprocess.run(command, cwd=PACKAGE, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test result: ok. 0 passed" not in done.stdout and "test result: ok." in done.stdout
