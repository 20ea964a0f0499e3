"""llama-cpp-python's server (`python -m llama_cpp.server`) as an upstream, as docs/upstreams.md sets it up."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from ollama import Client as Ollama
from upstreams import (
    ASK,
    GREEDY,
    PERSON,
    WEATHER,
    client,
    entry,
    eventually,
    front,
    http,
    llama_cpp_python,
    raw_stream,
    text_of,
)

KIND = "openai"
# It generates one reply at a time. By default it cuts off the one under way when another request comes, if only a
# question for its models.
WHOLE_REPLIES = ("--interrupt_requests", "false")
SET = """max_concurrent = 1
fields = ["temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repeat_penalty", "seed",
  "logit_bias", "logprobs", "tools"]
"""
# Its default is 1.1 in every dialect.
PLAIN = {**GREEDY, "extra_body": {"repeat_penalty": 1.0}}
LONG = {"model": "smol", "messages": ASK, "max_tokens": 700, "temperature": 0, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def itself():
    """The server without an endpoint."""
    with llama_cpp_python(*WHOLE_REPLIES) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def baton(itself, tmp_path_factory):
    """An endpoint in front of the server."""
    with front(tmp_path_factory.mktemp("front"), entry(itself, KIND, more=SET)) as endpoint:
        yield endpoint


def said_by(itself):
    """The server's own reply to Baton's request."""
    return client(itself.v1).chat.completions.create(model="theirs", messages=ASK, **PLAIN)


def test_its_models_are_listed_under_our_names_or_its_own(itself, baton, tmp_path):
    assert [model.id for model in baton.client().models.list()] == ["smol"]
    with front(tmp_path, entry(itself, KIND, models=None, more=SET)) as as_listed:
        eventually(lambda: [model.id for model in as_listed.client().models.list()] == ["theirs"], "its list")
        assert as_listed.client().chat.completions.create(model="theirs", messages=ASK, **GREEDY).choices


def test_it_says_through_baton_what_it_says_itself(itself, baton):
    said = said_by(itself)
    assert said.choices[0].message.content
    through = baton.client().chat.completions.with_raw_response.create(model="smol", messages=ASK, **GREEDY)
    assert "upstream=one; reason=only_upstream" in through.headers["x-baton-route"]
    whole = through.parse()
    assert whole.choices[0].message.content == said.choices[0].message.content
    assert whole.choices[0].finish_reason == said.choices[0].finish_reason
    chunks = list(baton.client().chat.completions.create(model="smol", messages=ASK, stream=True, **GREEDY))
    assert text_of(chunks) == said.choices[0].message.content
    assert len(chunks) > 5, "it comes piece by piece"


def test_ollamas_client_and_the_other_dialects_reach_it(itself, baton):
    said = said_by(itself).choices[0].message.content
    options = {"temperature": 0, "num_predict": 16, "repeat_penalty": 1.0}
    pieces = list(Ollama(baton.ollama).chat(model="smol", messages=ASK, stream=True, options=options))
    assert "".join(piece.message.content for piece in pieces) == said and pieces[-1].done
    messages = http(f"{baton.v1}/messages", {"model": "smol", "messages": ASK, **GREEDY})[1]
    assert messages["content"][0]["text"] == said
    plain = client(itself.v1).completions.create(model="theirs", prompt="The capital of France is", **PLAIN)
    through = baton.client().completions.create(model="smol", prompt="The capital of France is", **GREEDY)
    assert through.choices[0].text == plain.choices[0].text


def test_tokens_that_its_streams_do_not_count_are_counted_by_baton(itself, baton):
    said = said_by(itself)
    through = baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY)
    assert through.usage.completion_tokens == said.usage.completion_tokens
    assert 0 < through.usage.prompt_tokens <= said.usage.prompt_tokens


def test_stop_strings_seeds_and_samplers(baton):
    def said(**more):
        return baton.client().chat.completions.create(**{"model": "smol", "messages": ASK, "max_tokens": 24, **more})

    greedy = said(temperature=0).choices[0].message.content
    stop = greedy.split()[2]
    stopped = said(stop=[stop], temperature=0).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (greedy[: greedy.index(stop)], "stop")
    draw = [said(temperature=1.5, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert draw[0] == draw[1] != draw[2]
    assert said(temperature=2, seed=1, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert said(temperature=0, extra_body={"repeat_penalty": 5}).choices[0].message.content != greedy
    nothing = said(max_tokens=0)
    assert not nothing.choices[0].message.content and nothing.usage.completion_tokens == 0


def test_log_probabilities_are_its_own(itself, baton):
    asked = {"messages": ASK, "logprobs": True, "top_logprobs": 3}
    said = client(itself.v1).chat.completions.create(model="theirs", **asked, **PLAIN).choices[0].logprobs.content
    through = baton.client().chat.completions.create(model="smol", **asked, **GREEDY).choices[0].logprobs.content
    assert [entry.token for entry in through] == [entry.token for entry in said]
    for ours, theirs in zip(through, said):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05)


def test_a_named_tool_is_called(baton):
    asked = {
        "model": "smol", "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0, "max_tokens": 200,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    }
    whole = baton.client().chat.completions.create(**asked).choices[0]
    call = whole.message.tool_calls[0]
    assert call.function.name == "get_weather" and isinstance(json.loads(call.function.arguments)["city"], str)
    assert len(whole.message.tool_calls) == 1 and whole.finish_reason == "tool_calls"


def test_a_tools_result_is_read(baton):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    reply = baton.client().chat.completions.create(model="smol", messages=messages, tools=[WEATHER], **GREEDY)
    assert reply.choices[0].message.content


def test_fields_that_it_does_not_know_are_refused(baton):
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for more, field in (({"response_format": named}, "response_format"), ({"n": 2}, "n")):
        with pytest.raises(openai.BadRequestError) as refused:
            baton.client().chat.completions.create(model="smol", messages=ASK, **more)
        assert refused.value.param == field
    assert http(f"{baton.root}/tokenize", {"model": "smol", "content": "hi"})[0] == 501


def test_requests_take_turns(baton):
    def ask(i):
        messages = [{"role": "user", "content": f"Count to {i}."}]
        return baton.client().chat.completions.create(model="smol", messages=messages, max_tokens=8).choices[0]

    with ThreadPoolExecutor(6) as pool:
        assert all(choice.finish_reason for choice in pool.map(ask, range(6)))
    assert baton.state()["upstreams"][0]["breaker"]["is_open"] is False


def test_a_client_that_leaves_stops_it(itself, baton):
    events = raw_stream(f"{baton.v1}/chat/completions", LONG)
    for _ in range(3):
        next(events)
    events.close()
    # The server lists its models only between replies.
    assert eventually(lambda: http(f"{itself.v1}/models")[0] == 200, "its list") < 3


def test_its_key_is_sent_and_a_wrong_one_is_the_operators_mistake(tmp_path):
    with llama_cpp_python(*WHOLE_REPLIES, "--api_key", "right") as upstream:
        with front(tmp_path, entry(upstream, KIND, more=SET + 'key = "right"')) as baton:
            assert baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY).choices
        with front(tmp_path, entry(upstream, KIND, more=SET + 'key = "wrong"')) as baton:
            with pytest.raises(openai.InternalServerError) as refused:
                baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY)
            assert refused.value.status_code == 503 and "refused this server" in refused.value.message
            assert http(f"{baton.root}/health")[0] == 503


def test_a_prompt_that_does_not_fit_is_an_error_and_delays_others_briefly(baton):
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.APIStatusError):
        baton.client().chat.completions.create(model="smol", messages=long)

    def is_served():
        return http(f"{baton.v1}/chat/completions", {"model": "smol", "messages": ASK, **GREEDY})[0] == 200

    assert eventually(is_served, "a reply", 10) < 6


def test_a_server_that_is_killed_ends_replies_with_an_error_and_is_used_again_when_it_is_back(tmp_path):
    with llama_cpp_python(*WHOLE_REPLIES) as upstream, front(tmp_path, entry(upstream, KIND, more=SET)) as baton:
        events = raw_stream(f"{baton.v1}/chat/completions", LONG)
        for _ in range(5):
            next(events)
        upstream.kill()
        rest = list(events)
        assert "error" in json.loads(rest[-1]) and "[DONE]" not in rest, rest
        upstream.start()

        def is_served():
            return http(f"{baton.v1}/chat/completions", {"model": "smol", "messages": ASK, **GREEDY})[0] == 200

        assert eventually(is_served, "a reply", 10) < 6
