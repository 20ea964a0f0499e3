"""/v1/messages with the anthropic package: whole, streamed with its accumulator, and token counts."""

import json

import anthropic
import pytest

from conftest import MODEL

ASK = [{"role": "user", "content": "What is the capital of France?"}]
# This version of the package has no sampling arguments.
GREEDY = {"model": MODEL, "extra_body": {"temperature": 0}, "max_tokens": 24}


@pytest.fixture
def client(base_url):
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)


def test_a_whole_message(client):
    reply = client.messages.create(**GREEDY, messages=ASK, system="Answer in one sentence.")
    assert reply.id.startswith("msg_") and reply.type == "message" and reply.role == "assistant"
    assert reply.content[0].type == "text" and reply.content[0].text
    assert reply.stop_reason in ("end_turn", "max_tokens") and reply.stop_sequence is None
    assert reply.usage.input_tokens > 0 and 0 < reply.usage.output_tokens <= 24
    again = client.messages.create(**GREEDY, messages=ASK, system="Answer in one sentence.")
    assert again.content == reply.content and again.usage.cache_read_input_tokens > 0
    assert again._request_id


def test_blocks_are_a_conversation(client):
    text = lambda text: [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    messages = [
        {"role": "user", "content": text("My name is Ann.")},
        {"role": "assistant", "content": text("Hello Ann.")},
        {"role": "user", "content": text("What is my name?")},
    ]
    plain = [{**message, "content": message["content"][0]["text"]} for message in messages]
    reply = client.messages.create(**GREEDY, system=text("Be brief."), messages=messages)
    assert reply.content == client.messages.create(**GREEDY, system="Be brief.", messages=plain).content


def test_a_stream_says_what_the_whole_message_says(client):
    whole = client.messages.create(**GREEDY, messages=ASK)
    events = list(client.messages.create(**GREEDY, messages=ASK, stream=True))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    assert events[0].message.usage.input_tokens > 0
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == whole.content[0].text
    with client.messages.stream(**GREEDY, messages=ASK) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_why_it_ended(client):
    counting = [{"role": "user", "content": "Count from one to ten in digits: 1, 2, 3, ..."}]
    cut = client.messages.create(**{**GREEDY, "max_tokens": 3}, messages=counting)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    whole = client.messages.create(**GREEDY, messages=counting).content[0].text
    stop = whole[len(whole) // 2 :][:4]
    stopped = client.messages.create(**GREEDY, messages=counting, stop_sequences=[stop])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop
    assert stopped.content[0].text == whole.split(stop)[0]


def test_structured_output(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    reply = client.messages.create(
        **{**GREEDY, "max_tokens": 100},
        messages=[{"role": "user", "content": "Give a."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert set(json.loads(reply.content[0].text)) == {"a"}


def test_tokens_are_counted_as_a_message_counts_them(client):
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    usage = client.messages.create(**GREEDY, messages=ASK, system="Be brief.").usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "claude-nope"}, anthropic.NotFoundError, "does not exist"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"extra_body": {"temperature": 7}}, anthropic.BadRequestError, "temperature"),
        ({"messages": [*ASK, {"role": "assistant", "content": "The"}]}, anthropic.BadRequestError, "last message"),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, anthropic.BadRequestError, "prompt is too long"),
    ],
)
def test_mistakes_are_the_sdks_own_errors(client, change, error, words):
    for stream in (False, True):
        with pytest.raises(error) as raised:
            client.messages.create(**{**GREEDY, "messages": ASK, **change}, stream=stream)
        assert words in raised.value.message and raised.value.request_id


WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
}
CALL = {**GREEDY, "max_tokens": 100, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"},
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}


def test_a_tool_is_used_and_its_result_answered(client):
    reply = client.messages.create(**CALL)
    [use] = reply.content
    assert reply.stop_reason == "tool_use" and use.type == "tool_use" and use.name == "get_weather"
    assert set(use.input) == {"city", "unit"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 21 degrees.", "is_error": False}
    messages = [*CALL["messages"], {"role": "assistant", "content": reply.content},
                {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**CALL, "messages": messages, "tool_choice": {"type": "none"}})
    assert answer.content[0].type == "text"


def test_a_streamed_input_adds_up(client):
    [whole] = client.messages.create(**CALL).content
    with client.messages.stream(**CALL) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(pieces)) == whole.input == final.content[0].input and len(pieces) > 3
    assert final.stop_reason == "tool_use"


def test_a_call_that_the_limit_cuts_is_never_a_call_without_arguments(client):
    cuts = set()
    for limit in range(12, 24):
        cut = {**CALL, "max_tokens": limit}
        whole = client.messages.create(**cut)
        with client.messages.stream(**cut) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        assert whole.stop_reason == final.stop_reason == "max_tokens"
        # The whole message holds the same characters in the form for arguments that are no object.
        assert [use.input for use in whole.content] == ([{"INVALID_JSON": "".join(pieces)}] if pieces else []), limit
        assert [use.id[:5] for use in final.content] == (["call_"] if pieces else []), limit
        cuts.add(bool(pieces))
    assert cuts == {False, True}, "limits before and within the arguments"


def test_any_tool_and_only_one(client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    reply = client.beta.messages.create(**{**CALL, "tool_choice": choice}, betas=["interleaved-thinking-2025-05-14"])
    assert [block.type for block in reply.content] == ["tool_use"]


def test_tokens_of_tools_are_counted(client):
    asked = {key: CALL[key] for key in ("model", "messages", "tools", "tool_choice")}
    usage = client.messages.create(**CALL).usage
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
