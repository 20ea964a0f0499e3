"""Images for llama.cpp's own llama-server, which sees them with a projector of random weights."""

import base64
import os
import struct
import zlib

import openai
import pytest
from ollama import Client as Ollama
from upstreams import ASK, GREEDY, client, entry, front, http, llama_server

KIND = "llama-server"
QUESTION = "What do you see?"


def png(colour, size=48):
    """A picture: squares of a colour on black."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def pixel(x, y):
        return bytes(colour) if (x // 8 + y // 8) % 2 == 0 else bytes(3)

    rows = b"".join(b"\0" + b"".join(pixel(x, y) for x in range(size)) for y in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


RED, BLUE = (base64.b64encode(png(colour)).decode() for colour in ((255, 0, 0), (0, 0, 255)))


def about(image):
    """A chat about an image in OpenAI's dialect."""
    url = {"url": f"data:image/png;base64,{image}"}
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]}]


@pytest.fixture(scope="module")
def itself():
    """llama-server with a projector."""
    with llama_server("--mmproj", os.environ["BATON_PROJECTOR"]) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def baton(itself, tmp_path_factory):
    """An endpoint in front of it, which nobody has told that it sees."""
    with front(tmp_path_factory.mktemp("front"), entry(itself, KIND)) as endpoint:
        yield endpoint


def test_it_says_of_an_image_through_baton_what_it_says_itself(itself, baton):
    n_blind = client(itself.v1).chat.completions.create(
        model="theirs", messages=[{"role": "user", "content": QUESTION}], **GREEDY
    ).usage.prompt_tokens
    for image in (RED, BLUE):
        asked = {"messages": about(image), "logprobs": True, **GREEDY}
        said = client(itself.v1).chat.completions.create(model="theirs", **asked)
        through = baton.client().chat.completions.with_raw_response.create(model="smol", **asked)
        assert "upstream=one" in through.headers["x-baton-route"]
        whole = through.parse()
        assert whole.choices[0].message.content == said.choices[0].message.content
        assert whole.usage.prompt_tokens == said.usage.prompt_tokens > n_blind
        ours, theirs = (reply.choices[0].logprobs.content for reply in (whole, said))
        assert [token.logprob for token in ours] == pytest.approx([token.logprob for token in theirs], abs=0.05)


def test_another_image_is_another_prompt(baton):
    def first(image):
        asked = {"messages": about(image), "logprobs": True, "top_logprobs": 5, "temperature": 0, "max_tokens": 1}
        reply = baton.client().chat.completions.create(model="smol", **asked)
        return [top.logprob for top in reply.choices[0].logprobs.content[0].top_logprobs]

    assert first(RED) == pytest.approx(first(RED), abs=0.05)
    assert first(RED) != pytest.approx(first(BLUE), abs=0.05), "the picture is seen"


def test_every_dialect_sends_it_images(itself, baton):
    said = client(itself.v1).chat.completions.create(model="theirs", messages=about(RED), **GREEDY)
    text, n_prompt = said.choices[0].message.content, said.usage.prompt_tokens
    chunks = list(
        baton.client().chat.completions.create(
            model="smol", messages=about(RED), stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.prompt_tokens == n_prompt
    options = {"temperature": 0, "num_predict": 16, "repeat_penalty": 1.0}
    messages = [{"role": "user", "content": QUESTION, "images": [RED]}]
    assert Ollama(baton.ollama).chat(model="smol", messages=messages, options=options).message.content == text
    source = {"type": "base64", "media_type": "image/png", "data": RED}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": blocks}]
    reply = http(f"{baton.v1}/messages", {"model": "smol", "messages": messages, **GREEDY})[1]
    usage = reply["usage"]
    assert reply["content"][0]["text"] == text
    assert usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0) == n_prompt
    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{RED}", "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    response = baton.client().responses.create(
        model="smol", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=16
    )
    assert response.output_text == text


def test_one_that_does_not_see_gets_no_image(tmp_path):
    with llama_server() as upstream, front(tmp_path, entry(upstream, KIND)) as baton:
        with pytest.raises(openai.BadRequestError) as refused:
            baton.client().chat.completions.create(model="smol", messages=about(RED), **GREEDY)
        assert refused.value.code == "unsupported_parameter", refused.value
        assert baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY).choices


def test_of_two_servers_the_one_that_sees_gets_images(itself, tmp_path):
    with llama_server() as blind:
        config = entry(blind, KIND, "blind") + entry(itself, KIND, "seeing")
        with front(tmp_path, config) as baton:
            for image in (RED, BLUE, RED):
                reply = baton.client().chat.completions.with_raw_response.create(
                    model="smol", messages=about(image), **GREEDY
                )
                assert "upstream=seeing" in reply.headers["x-baton-route"]
