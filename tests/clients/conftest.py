"""A running Baton with the real model, for every client's tests. BATON names the binary."""

import os
import subprocess
import threading

import pytest
from openai import OpenAI

MODEL = "smollm2"


@pytest.fixture(scope="session")
def banner():
    """What the server printed when it was ready."""
    command = [os.environ["BATON"], "serve", "--listen", "127.0.0.1:0", "--ollama-listen", "127.0.0.1:0"]
    command += ["--model", MODEL, "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("Stop with"):
                break
        else:
            pytest.fail("the server ended before it was ready")
        # Kept reading, so that the server never blocks on a full pipe.
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield "".join(lines)
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def base_url(banner):
    return banner.split(" at ")[1].split()[0]


@pytest.fixture(scope="session")
def ollama_url(banner):
    return banner.split("OLLAMA_HOST=")[1].split()[0]


@pytest.fixture
def client(base_url):
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
