"""What the official ollama package and Open WebUI do with models, against an endpoint whose operator allows it: pull, list, show, chat,
copy, delete. A stand-in for the hub has the model's file."""

import subprocess
from pathlib import Path

import ollama
import pytest

import server
from conftest import MODEL
from hub import PULLED, hub_of

ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model_file():
    found = subprocess.run([server.BATON, "pull", MODEL], check=True, capture_output=True, text=True).stdout.strip()
    return Path(found)


@pytest.fixture
def shop(model_file, tmp_path, monkeypatch):
    hub = hub_of(model_file)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    yield tmp_path
    hub.shutdown()


def names(client):
    return [model.model for model in client.list().models]


def test_what_is_pulled_can_be_listed_shown_asked_copied_and_deleted(shop):
    serve = ("--engine", "sim", "--allow-model-management")
    with server.serve(*serve) as banner:
        client = ollama.Client(host=server.ollama_url(banner), timeout=120)
        with pytest.raises(ollama.ResponseError) as missing:
            client.chat(PULLED, ASK)
        assert missing.value.status_code == 404
        steps = list(client.pull(PULLED, stream=True))
        assert steps[-1].status == "success"
        arrived = [step.completed for step in steps if step.total]
        assert arrived == sorted(arrived)
        assert PULLED in names(client)
        listed = next(model for model in client.list().models if model.model == PULLED)
        assert listed.size > 90_000_000 and listed.details.quantization_level == "Q4_1" and listed.details.family == "llama"
        shown = client.show(PULLED)
        assert "completion" in shown.capabilities and "<|im_start|>" in shown.template
        assert not any(model.model == PULLED for model in client.ps().models)
        said = client.chat(PULLED, ASK, options={"temperature": 0, "num_predict": 8}).message.content
        assert said and any(model.model == PULLED for model in client.ps().models)
        assert client.copy(PULLED, "france").status == "success"
        assert "france:latest" in names(client)
    # The same endpoint, started again.
    with server.serve(*serve) as banner:
        client = ollama.Client(host=server.ollama_url(banner), timeout=120)
        assert {PULLED, "france:latest"} <= set(names(client))
        assert client.chat("france", ASK, options={"temperature": 0, "num_predict": 8}).message.content == said
        assert client.delete("france").status == "success" and PULLED in names(client)
        assert client.delete(PULLED).status == "success"
        assert names(client) == ["sim:latest"] and not list(shop.rglob("*.gguf"))
        with pytest.raises(ollama.ResponseError) as gone:
            client.delete(PULLED)
        assert gone.value.status_code in (400, 404)


def test_without_the_option_nothing_is_pulled(shop):
    with server.serve("--engine", "sim") as banner:
        client = ollama.Client(host=server.ollama_url(banner), timeout=120)
        for call in (lambda: client.pull(PULLED), lambda: client.copy("sim", "x"), lambda: client.delete("sim")):
            with pytest.raises(ollama.ResponseError) as refused:
                call()
            assert refused.value.status_code in (403, 404)
        assert names(client) == ["sim:latest"] and not list(shop.rglob("*.gguf"))
