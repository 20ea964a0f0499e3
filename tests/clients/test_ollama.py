"""The official ollama package, as its users use it, against the second listener."""

import json
import subprocess

import ollama
import pytest
from pydantic import BaseModel, ConfigDict, Field

from conftest import MODEL, QUANTIZATION

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(ollama_url):
    return ollama.Client(host=ollama_url, timeout=120)


def test_a_stream_says_what_the_whole_reply_says(client):
    whole = client.chat(MODEL, ASK, options=GREEDY)
    assert whole.message.role == "assistant" and whole.message.content
    assert whole.done and whole.done_reason in ("stop", "length")
    lines = list(client.chat(MODEL, ASK, options=GREEDY, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    for end in (whole, lines[-1]):
        assert 0 < end.eval_count <= 12 and end.prompt_eval_count > 5
        assert end.total_duration >= end.prompt_eval_duration + end.eval_duration > 0
        assert end.load_duration is not None and end.created_at


def test_generate(client):
    said = client.generate(MODEL, "What is the capital of France?", options=GREEDY).response
    assert said == client.chat(MODEL, ASK, options=GREEDY).message.content
    lines = list(client.generate(MODEL, "What is the capital of France?", options=GREEDY, stream=True))
    assert "".join(line.response for line in lines) == said and lines[-1].done
    brief = client.generate(MODEL, "Hello", system="You are a pirate.", options=GREEDY)
    assert brief.prompt_eval_count < client.generate(MODEL, "Hello " * 50, options=GREEDY).prompt_eval_count
    # A raw prompt writes its own turns.
    prompt = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    raw = client.generate(MODEL, prompt, raw=True, options=GREEDY)
    assert raw.response and raw.prompt_eval_count == 17


def test_stops_and_seeds(client):
    whole = client.chat(MODEL, ASK, options=GREEDY).message.content
    stop = whole.split()[2]
    cut = client.chat(MODEL, ASK, options={**GREEDY, "stop": [stop]})
    assert cut.message.content == whole.split(stop)[0] and cut.done_reason == "stop"
    texts = [client.chat(MODEL, ASK, options={"temperature": 1.3, "num_predict": 12, "seed": seed}).message.content
             for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=30)
    is_large: bool


def test_structured_output(client):
    settings = {"format": City.model_json_schema(), "options": {"temperature": 0, "num_predict": 100}}
    ask = [{"role": "user", "content": "Describe Paris."}]
    whole = client.chat(MODEL, ask, **settings).message.content
    City.model_validate_json(whole)
    assert "".join(line.message.content for line in client.chat(MODEL, ask, **settings, stream=True)) == whole
    City.model_validate_json(client.generate(MODEL, "Describe Paris.", **settings).response)


def test_models(client):
    listed = client.list().models
    assert f"{MODEL}:latest" in [model.model for model in listed]
    assert listed[0].size > 90_000_000 and listed[0].details.family == "llama" and listed[0].modified_at
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and "<|im_start|>" in shown.template
    assert shown.modelinfo["llama.context_length"] == 2048 or shown.modelinfo["llama.context_length"] == 8192
    assert shown.details.parameter_size == "134.52M" and shown.details.quantization_level == QUANTIZATION
    running = client.ps().models
    assert len(running) == 1 and running[0].context_length > 0 and running[0].expires_at
    assert client.pull(MODEL).status == "success"
    assert [step.status for step in client.pull(f"{MODEL}:latest", stream=True)][-1] == "success"


def test_loading_and_unloading(client):
    assert client.generate(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert client.chat(MODEL, ASK, options={"num_predict": 1}).message.content


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        (lambda c: c.chat("nope", ASK), 404, "model 'nope' not found"),
        (lambda c: list(c.chat("nope", ASK, stream=True)), 404, "model 'nope' not found"),
        (lambda c: c.chat(MODEL, ASK, think=True), 400, "does not support thinking"),
        (lambda c: c.chat(MODEL, ASK, options={"top_p": 7}), 400, "options.top_p"),
        (lambda c: c.generate(MODEL, "a", suffix="b"), 400, "does not support insert"),
        (lambda c: c.chat(MODEL, [{"role": "user", "content": "word " * 20000}]), 400, "maximum context length"),
        (lambda c: c.embed("nope", "x"), 404, "model 'nope' not found"),
        (lambda c: c.embed(MODEL, "word " * 20000, truncate=False), 400, "maximum context length"),
        (lambda c: c.embed(MODEL, "x", dimensions=8), 400, "dimensions"),
        (lambda c: c.pull("nope"), 404, "not found"),
        (lambda c: c.delete(MODEL), 403, "operator"),
    ],
)
def test_mistakes_are_the_packages_own_errors(client, call, status, words):
    with pytest.raises(ollama.ResponseError) as raised:
        call(client)
    assert raised.value.status_code == status and words in raised.value.error


def test_curl(endpoint, ollama_url):
    def curl(*args):
        return subprocess.run(["curl", "-sS", "--max-time", "60", *args], capture_output=True, text=True, check=True).stdout

    body = {"model": MODEL, "messages": ASK, "options": {"num_predict": 3}}
    out = curl("-i", f"{ollama_url}/api/chat", "-d", json.dumps(body))
    head, _, lines = out.replace("\r\n", "\n").partition("\n\n")
    assert "content-type: application/x-ndjson" in head.lower() and endpoint.took_its_route(head.lower())
    lines = [json.loads(line) for line in lines.splitlines()]
    assert lines[-1]["done"] and lines[-1]["done_reason"] == "length" and lines[-1]["eval_count"] == 3
    assert curl(ollama_url) == "Ollama is running"
    assert "200" in curl("-I", f"{ollama_url}/api/version")
    assert all(part.isdigit() for part in json.loads(curl(f"{ollama_url}/api/version"))["version"].split("."))
