"""The official openai package in everyday use."""

import math

import openai
import pytest
from pydantic import BaseModel, Field

from conftest import MODEL

ASK = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 12}


def test_chat(client):
    reply = client.chat.completions.create(**GREEDY)
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    assert isinstance(reply.created, int)
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = reply.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert reply.timings["predicted_n"] > 0


def test_a_stream_says_what_the_whole_reply_says(client):
    whole = client.chat.completions.create(**GREEDY).choices[0].message.content
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:] if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] in (["stop"], ["length"])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])


# The helper raises on a reply that its limit cut short, so these end early, whichever of two nearly equal tokens is next.
COMPLETE = {**GREEDY, "max_tokens": 200, "stop": [".", ","]}


def test_the_stream_helper(client):
    with client.chat.completions.stream(**COMPLETE) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events and "content.done" in events
    assert final.choices[0].message.content == client.chat.completions.create(**COMPLETE).choices[0].message.content


def test_the_stream_helper_with_several_choices(client):
    # With the stop, the end comes before the limit whatever is drawn: the helper raises on a cut reply.
    with client.chat.completions.stream(**{**COMPLETE, "temperature": 0.3, "seed": 3, "stop": [" ", "."]}, n=3) as stream:
        final = stream.get_final_completion() if list(stream) else None
    assert [choice.index for choice in final.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in final.choices)


class City(BaseModel):
    name: str = Field(max_length=30)
    is_large: bool


def test_structured_output_is_parsed_whole_and_streamed(client):
    messages = [{"role": "user", "content": "Describe Paris."}]
    ask = {**GREEDY, "messages": messages, "max_tokens": 100, "response_format": City}
    whole = client.chat.completions.parse(**ask).choices[0].message.parsed
    assert isinstance(whole, City)
    with client.chat.completions.stream(**ask) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole


def test_several_choices_and_seeds(client):
    ask = {**GREEDY, "temperature": 1.2, "n": 3, "max_tokens": 6}
    texts = [[c.message.content for c in client.chat.completions.create(**ask, seed=seed).choices] for seed in (11, 11, 12)]
    # Earlier tests fill the cache, which moves probabilities in their last digits (docs/engine.md). That rarely changes a
    # draw.
    assert any(first == second for first, second in zip(texts[0], texts[1]))
    assert texts[1] != texts[2]
    assert len(set(texts[0])) > 1


def test_logprobs(client):
    choice = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=5).choices[0]
    tokens = choice.logprobs.content
    assert "".join(t.token for t in tokens) == choice.message.content
    for t in tokens:
        assert bytes(t.bytes).decode() == t.token and t.logprob <= 0
        assert len(t.top_logprobs) == 5
        ordered = [alternative.logprob for alternative in t.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
        # Greedy: the best alternative is the one that was taken.
        assert t.top_logprobs[0].token == t.token and math.isclose(ordered[0], t.logprob, abs_tol=1e-5)


def test_streamed_logprobs_are_those_of_the_whole_reply(client):
    def pairs(content):
        return [(t.token, round(t.logprob, 3)) for t in content]

    whole = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=0).choices[0].logprobs.content
    chunks = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=0, stream=True)
    streamed = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert pairs(streamed) == pairs(whole)


def test_models(client):
    listed = client.models.list().data
    assert MODEL in [m.id for m in listed] or "SmolLM2-135M-Instruct" in [m.id for m in listed]
    assert client.models.retrieve(listed[0].id).id == listed[0].id
    assert client.models.retrieve(MODEL).object == "model"


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"model": "gpt-nope"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 7}, openai.BadRequestError, None),
        ({"top_logprobs": 21, "logprobs": True}, openai.BadRequestError, None),
        ({"messages": []}, openai.BadRequestError, None),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_the_sdks_own_errors(client, change, error, code, stream):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{**GREEDY, **change}, stream=stream)
    assert code is None or raised.value.code == code
    assert raised.value.request_id


def test_roles_and_content_parts(client):
    messages = [
        {"role": "developer", "content": "Answer briefly."},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 1}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
    ]
    assert client.chat.completions.create(**{**GREEDY, "messages": messages}).choices[0].finish_reason


def test_text_is_whole_in_every_delta(client):
    ask = [{"role": "user", "content": "Repeat exactly: 日本語 🙂 naïve café"}]
    stream = client.chat.completions.create(model=MODEL, messages=ask, temperature=0, max_tokens=40, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text and "\ufffd" not in text


def test_concurrent_streams_do_not_mix(base_url):
    from concurrent.futures import ThreadPoolExecutor

    def ask(word):
        client = openai.OpenAI(base_url=base_url, api_key="none", timeout=300)
        stream = client.chat.completions.create(
            model=MODEL, stream=True, temperature=0, max_tokens=16,
            messages=[{"role": "user", "content": f"Write one sentence about {word}."}])
        chunks = list(stream)
        return chunks[0].id, "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(ask, ["rivers", "trains", "bread", "music", "snow", "bees"] * 2))
    assert all(text and finish for _, text, finish in replies)
    assert len({id for id, _, _ in replies}) == len(replies)
