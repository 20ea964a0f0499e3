"""/v1/responses with the openai package: whole and streamed, with the helpers that check the order of events."""

import json

import openai
import pytest
from pydantic import BaseModel

from conftest import MODEL

ASK = "What is the capital of France?"
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


def test_a_whole_response(client):
    reply = client.responses.create(**GREEDY, input=ASK, instructions="Answer in one sentence.", metadata={"a": "b"})
    assert reply.id.startswith("resp_") and reply.object == "response" and reply.store is False
    assert reply.status in ("completed", "incomplete") and reply.error is None
    assert reply.output[0].type == "message" and reply.output_text
    assert reply.instructions == "Answer in one sentence." and reply.metadata == {"a": "b"}
    usage = reply.usage
    assert usage.input_tokens > 10 and 0 < usage.output_tokens <= 24
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_items_are_a_conversation(client):
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=24,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "My name is Ann."},
            {"role": "assistant", "content": "Hello Ann."},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    reply = client.responses.create(
        **GREEDY,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "My name is Ann."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello Ann.", "annotations": []}]},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert reply.output_text == chat.choices[0].message.content


def test_the_events_of_a_stream(client):
    whole = client.responses.create(**GREEDY, input=ASK)
    events = list(client.responses.create(**GREEDY, input=ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed" if whole.status == "completed" else "response.incomplete",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text and events[-1].response.usage.output_tokens > 0


def test_the_sdks_own_accumulator(client):
    with client.responses.stream(model=MODEL, temperature=0, input="Say hello.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == text


def test_a_cut_response_says_so(client):
    reply = client.responses.create(**{**GREEDY, "max_output_tokens": 3}, input="Count to one hundred.")
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 3 and reply.output[0].status == "incomplete"


def test_structured_output(client):
    class City(BaseModel):
        name: str
        is_large: bool

    settings = {"model": MODEL, "temperature": 0, "max_output_tokens": 100}
    reply = client.responses.parse(**settings, input="Describe Paris.", text_format=City)
    assert isinstance(reply.output_parsed, City)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}}
    assert set(json.loads(client.responses.create(**settings, input="Give a.", text=text).output_text)) == {"a"}


def test_log_probabilities(client):
    reply = client.responses.create(
        **GREEDY, input=ASK, include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = reply.output[0].content[0].logprobs
    assert "".join(token.token for token in logprobs) == reply.output_text and len(logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "gpt-nope"}, openai.NotFoundError, "does not exist"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"store": True}, openai.BadRequestError, "store"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"input": "word " * 20000}, openai.BadRequestError, "maximum context length"),
    ],
)
def test_mistakes_are_the_sdks_own_errors(client, change, error, words):
    for stream in (False, True):
        with pytest.raises(error) as raised:
            client.responses.create(**{**GREEDY, "input": ASK, **change}, stream=stream)
        assert words in raised.value.message
