"""The official ollama package with models that are loaded on demand."""

import time

import ollama
import pytest

import server

CONFIG = """
[[models]]
source = "smollm2"
name = "smol"
keep_alive = "1h"

[models.engine]
slots = 1
ctx_size = 1024
threads = 1
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "baton.toml"
    config.write_text(CONFIG)
    listen = ("--listen", "127.0.0.1:0", "--ollama-listen", "127.0.0.1:0", "--config", str(config))
    with server.running("serve", *listen, output="stdout", ready="Stop with") as banner:
        yield ollama.Client(host=server.ollama_url(banner), timeout=120)


def running(client):
    return {model.model: model for model in client.ps().models}


def is_gone(client):
    for _ in range(100):
        if not running(client):
            return True
        time.sleep(0.1)
    return False


def test_a_model_is_loaded_kept_and_unloaded(client):
    assert not running(client)
    assert [model.model for model in client.list().models] == ["smol:latest"]
    assert client.list().models[0].size > 90_000_000
    assert "completion" in client.show("smol").capabilities and not running(client)

    assert client.generate("smol", "", keep_alive="20m").done_reason == "load"
    left = running(client)["smol:latest"].expires_at.timestamp() - time.time()
    assert 1100 < left <= 1200
    # A request without keep_alive leaves the setting as it is.
    reply = client.chat("smol", [{"role": "user", "content": "Hello"}], options={"num_predict": 4})
    assert reply.message.content and reply.done
    left = running(client)["smol:latest"].expires_at.timestamp() - time.time()
    assert 1100 < left <= 1200
    client.chat("smol", [{"role": "user", "content": "Hello"}], options={"num_predict": 4}, keep_alive=-1)
    assert running(client)["smol:latest"].expires_at.year > 2300
    assert client.embed("smol", "Hello", keep_alive=90).embeddings
    left = running(client)["smol:latest"].expires_at.timestamp() - time.time()
    assert 60 < left <= 90

    assert client.chat("smol", [], keep_alive=0).done_reason == "unload"
    assert is_gone(client)
    # The wait for the model counts as `load_duration`.
    stream = list(client.generate("smol", "Hello", options={"num_predict": 4}, stream=True, keep_alive="100ms"))
    assert stream[-1].done and stream[-1].load_duration > 10_000_000
    assert is_gone(client)


def test_an_invalid_duration_is_refused(client):
    with pytest.raises(ollama.ResponseError) as error:
        client.generate("smol", "Hello", keep_alive="soon")
    assert error.value.status_code == 400 and "keep_alive" in error.value.error
