"""/v1/completions with the openai package, and llama-server's utility routes with plain HTTP."""

import json
import math
import urllib.request

import openai
import pytest

from conftest import MODEL

GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}


def test_completion(client):
    reply = client.completions.create(**GREEDY, prompt="The capital of France is")
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert reply.choices[0].text and reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.prompt_tokens == 5 and 0 < reply.usage.completion_tokens <= 8
    chunks = list(client.completions.create(**GREEDY, prompt="The capital of France is", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == reply.choices[0].text
    assert chunks[-1].choices[0].finish_reason == reply.choices[0].finish_reason


def test_several_prompts_choices_and_echo(client):
    prompts = ["One, two,", "Red, green,"]
    choices = client.completions.create(**GREEDY, prompt=prompts, n=2, echo=True).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert all(len(choice.text) > len(prompts[choice.index // 2]) for choice in choices)
    assert all(choice.text.startswith(prompts[choice.index // 2]) and choice.finish_reason for choice in choices)


def test_tokens_are_a_prompt_too(client, base_url):
    tokens = post(base_url, "/tokenize", {"content": "The capital of France is"})["tokens"]
    text = client.completions.create(**GREEDY, prompt="The capital of France is").choices[0].text
    assert client.completions.create(**GREEDY, prompt=tokens).choices[0].text == text
    assert client.completions.create(**GREEDY, prompt=[tokens], echo=True).choices[0].text == "The capital of France is" + text


def test_logprobs(client):
    choice = client.completions.create(**GREEDY, prompt="One, two,", logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert all(choice.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens))
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert len(top) == 2 and math.isclose(top[token], logprob, abs_tol=1e-5) and max(top.values()) <= logprob + 1e-5


def test_logprobs_of_an_echoed_prompt(client):
    choice = client.completions.create(**{**GREEDY, "max_tokens": 0}, prompt="One, two,", logprobs=2, echo=True).choices[0]
    logprobs = choice.logprobs
    assert choice.text == "One, two," == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None and all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    stream = client.completions.create(
        **{**GREEDY, "max_tokens": 2}, prompt="One, two,", logprobs=2, echo=True, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert chunks[0].text == "One, two," and chunks[0].logprobs.tokens == logprobs.tokens


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "gpt-nope"}, openai.NotFoundError),
        ({"prompt": [10**8]}, openai.BadRequestError),
        ({"suffix": "x"}, openai.BadRequestError),
        ({"best_of": 3}, openai.BadRequestError),
        ({"prompt": "word " * 20000}, openai.BadRequestError),
    ],
)
def test_mistakes_are_the_sdks_own_errors(client, change, error):
    with pytest.raises(error):
        client.completions.create(**{**GREEDY, "prompt": "a", **change})


def post(base_url, path, body=None):
    request = urllib.request.Request(base_url.removesuffix("/v1") + path, data=body and json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_llama_servers_routes(client, base_url):
    text = "naïve 日本語 🙂"
    tokens = post(base_url, "/tokenize", {"content": text})["tokens"]
    assert post(base_url, "/detokenize", {"tokens": tokens}) == {"content": text, "prompt": text}
    assert len(post(base_url, "/tokenize", {"content": "<|im_end|>"})["tokens"]) == 1
    assert len(post(base_url, "/tokenize", {"content": "<|im_end|>", "parse_special": False})["tokens"]) > 1
    prompt = post(base_url, "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # A chat and its rendered prompt get the same reply.
    chat = client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "Hi"}])
    assert client.completions.create(**GREEDY, prompt=prompt).choices[0].text == chat.choices[0].message.content
    props, slots = post(base_url, "/props"), post(base_url, "/slots")
    assert props["total_slots"] == len(slots) == 4 and "/" not in props["model_path"]
    assert "<|im_start|>" in props["chat_template"] and props["default_generation_settings"]["n_ctx"] > 0
