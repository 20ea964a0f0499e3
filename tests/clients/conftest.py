"""A running Baton with the real model, for every client's tests. BATON names the binary."""

import os
import re
import subprocess

import pytest
from openai import OpenAI

MODEL = "smollm2"


@pytest.fixture(scope="session")
def base_url():
    command = [os.environ["BATON"], "serve", "--listen", "127.0.0.1:0", "--model", MODEL, "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            if found := re.search(r"at (http://\S+/v1)", line):
                yield found.group(1)
                return
        pytest.fail("the server ended before it was ready")
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


@pytest.fixture
def client(base_url):
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
