"""mlx-lm's own server with the real model, on the processor, as an upstream."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))
import server  # noqa: E402

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
# It compiles its kernels on first use.
PATIENCE = 300


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The default model in mlx_lm's format."""
    gguf = subprocess.run([server.BATON, "pull", "smollm2"], check=True, capture_output=True, text=True).stdout.strip()
    folder = tmp_path_factory.mktemp("mlx") / "smollm2"
    subprocess.run([sys.executable, Path(__file__).parent.with_name("to_hugging_face.py"), gguf, folder], check=True)
    return str(folder)


@pytest.fixture(scope="session")
def mlx(model):
    """The address of mlx_lm's server."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "mlx_lm.server did not start"
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def baton(mlx, model, tmp_path_factory):
    """An endpoint in front of that server."""
    config = tmp_path_factory.mktemp("config") / "baton.toml"
    config.write_text(f'[[upstream]]\nname = "mlx"\nkind = "openai"\nurl = "{mlx}"\nmodels = {{ smol = {json.dumps(model)} }}\n')
    listen = ("--listen", "127.0.0.1:0", "--ollama-listen", "127.0.0.1:0")
    with server.running("serve", *listen, "--config", str(config), output="stdout", ready="Stop with") as banner:
        yield server.base_url(banner)


def client(url):
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)


def test_it_says_through_baton_what_it_says_itself(mlx, baton, model):
    itself = client(mlx).chat.completions.create(model=model, messages=ASK, **GREEDY)
    said = itself.choices[0].message.content
    assert "Paris" in said
    through = client(baton).chat.completions.with_raw_response.create(model="smol", messages=ASK, **GREEDY)
    assert "upstream=mlx" in through.headers["x-baton-route"]
    whole = through.parse()
    assert whole.choices[0].message.content == said
    assert whole.choices[0].finish_reason == itself.choices[0].finish_reason
    assert whole.usage.prompt_tokens == itself.usage.prompt_tokens
    stream = client(baton).chat.completions.create(
        model="smol", messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
    assert chunks[-1].usage.completion_tokens == itself.usage.completion_tokens


def test_other_dialects_reach_it(baton):
    root = baton.removesuffix("/v1")

    def post(path, body):
        request = urllib.request.Request(f"{root}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.load(reply)

    options = {"temperature": 0, "num_predict": 12, "repeat_penalty": 1.0}
    ollama = post("/api/chat", {"model": "smol", "messages": ASK, "stream": False, "options": options})
    assert "Paris" in ollama["message"]["content"] and ollama["done"]
    anthropic = post("/v1/messages", {"model": "smol", "messages": ASK, **GREEDY})
    assert "Paris" in anthropic["content"][0]["text"]
    # Baton finds the stop strings.
    stopped = client(baton).chat.completions.create(model="smol", messages=ASK, stop=[" Paris"], **GREEDY)
    assert stopped.choices[0].message.content == "The capital of France is"
