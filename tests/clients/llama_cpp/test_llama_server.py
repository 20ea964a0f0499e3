"""llama.cpp's own llama-server as an upstream of kind llama-server."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from ollama import Client as Ollama
from upstreams import (
    ASK,
    GREEDY,
    PERSON,
    THINKING_TEMPLATE,
    TIME,
    TOOLS_TEMPLATE,
    WEATHER,
    client,
    entry,
    eventually,
    front,
    gguf,
    http,
    killable_node,
    llama_server,
    llama_server_of,
    raw_stream,
    text_of,
)

KIND = "llama-server"
ENDLESS = {"model": "smol", "messages": ASK, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def itself():
    """llama-server without an endpoint."""
    with llama_server() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def baton(itself, tmp_path_factory):
    """An endpoint in front of llama-server."""
    with front(tmp_path_factory.mktemp("front"), entry(itself, KIND)) as endpoint:
        yield endpoint


def test_its_models_are_listed_under_our_names_or_its_own(itself, baton, tmp_path):
    assert [model.id for model in baton.client().models.list()] == ["smol"]
    with front(tmp_path, entry(itself, KIND, models=None)) as as_listed:
        eventually(lambda: [model.id for model in as_listed.client().models.list()] == ["theirs"], "its list")
        assert as_listed.client().chat.completions.create(model="theirs", messages=ASK, **GREEDY).choices
        with pytest.raises(openai.NotFoundError):
            as_listed.client().chat.completions.create(model="smol", messages=ASK, **GREEDY)
    assert [model.model for model in Ollama(baton.ollama).list().models] == ["smol:latest"]


def test_it_says_through_baton_what_it_says_itself(itself, baton):
    said = client(itself.v1).chat.completions.create(model="theirs", messages=ASK, **GREEDY)
    assert said.choices[0].message.content
    through = baton.client().chat.completions.with_raw_response.create(model="smol", messages=ASK, **GREEDY)
    assert "upstream=one; reason=only_upstream" in through.headers["x-baton-route"]
    whole = through.parse()
    assert whole.choices[0].message.content == said.choices[0].message.content
    assert whole.choices[0].finish_reason == said.choices[0].finish_reason
    assert whole.usage.prompt_tokens == said.usage.prompt_tokens
    assert whole.usage.completion_tokens == said.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens > 0, "the prompt was there"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(baton.client().chat.completions.create(model="smol", messages=ASK, **options, **GREEDY))
    assert text_of(chunks) == said.choices[0].message.content
    assert len(chunks) > 5, "it comes piece by piece"
    assert chunks[-1].usage.completion_tokens == said.usage.completion_tokens


def test_ollamas_client_and_the_other_dialects_reach_it(itself, baton):
    said = client(itself.v1).chat.completions.create(model="theirs", messages=ASK, **GREEDY).choices[0].message.content
    options = {"temperature": 0, "num_predict": 16, "repeat_penalty": 1.0}
    pieces = list(Ollama(baton.ollama).chat(model="smol", messages=ASK, stream=True, options=options))
    assert "".join(piece.message.content for piece in pieces) == said
    assert pieces[-1].done and pieces[-1].eval_count > 0 and pieces[-1].prompt_eval_count > 0
    messages = http(f"{baton.v1}/messages", {"model": "smol", "messages": ASK, **GREEDY})[1]
    assert messages["content"][0]["text"] == said
    response = baton.client().responses.create(model="smol", input=ASK, temperature=0, max_output_tokens=16)
    assert response.output_text == said
    greedy = {"max_tokens": 16, "temperature": 0}
    plain = client(itself.v1).completions.create(model="theirs", prompt="The capital of France is", **greedy)
    through = baton.client().completions.create(model="smol", prompt="The capital of France is", **greedy)
    assert through.choices[0].text == plain.choices[0].text
    tokens = http(f"{itself.root}/tokenize", {"content": "The capital of France is", "add_special": True})[1]["tokens"]
    through = baton.client().completions.create(model="smol", prompt=tokens, **greedy)
    assert through.choices[0].text == plain.choices[0].text
    with pytest.raises(openai.BadRequestError) as refused:
        baton.client().completions.create(model="smol", prompt="def", suffix="return", **greedy)
    assert refused.value.param == "suffix"


def test_stop_strings_end_its_work(itself, baton):
    said = baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY).choices[0].message.content
    stop = said.split()[2]
    stopped = baton.client().chat.completions.create(
        model="smol", messages=ASK, stop=[stop], temperature=0, max_tokens=900, extra_body={"ignore_eos": True}
    )
    assert stopped.choices[0].message.content == said[: said.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert is_idle(itself) < 1


def test_seeds_decide_every_draw(baton):
    def draw(seed):
        sampling = {"temperature": 1.5, "max_tokens": 24, "seed": seed}
        reply = baton.client().chat.completions.create(model="smol", messages=ASK, **sampling)
        return reply.choices[0].message.content

    assert draw(7) == draw(7)
    assert draw(8) != draw(7)
    # This seed is larger than any server accepts.
    assert draw(2**63 + 7) == draw(2**63 + 7)


def test_choices_are_requests_of_their_own(baton):
    reply = baton.client().chat.completions.create(
        model="smol", messages=ASK, n=2, temperature=1.5, max_tokens=24, seed=7
    )
    first, second = (choice.message.content for choice in reply.choices)
    assert first != second
    assert reply.usage.completion_tokens > 24


def test_samplers_reach_it(baton):
    def said(**more):
        reply = baton.client().chat.completions.create(model="smol", messages=ASK, max_tokens=24, **more)
        return reply.choices[0]

    greedy = said(temperature=0).message.content
    assert said(temperature=2, seed=1, extra_body={"top_k": 1}).message.content == greedy
    assert said(temperature=2, seed=1, extra_body={"min_p": 1}).message.content == greedy
    assert said(temperature=0, extra_body={"ignore_eos": True}).finish_reason == "length"
    assert said(temperature=0, extra_body={"repeat_penalty": 5}).message.content != greedy
    assert said(temperature=0, frequency_penalty=2, presence_penalty=2).message.content
    token = http(f"{baton.root}/tokenize", {"content": " Paris"})[1]["tokens"][0]
    assert said(temperature=0, logit_bias={str(token): 100}).message.content == " Paris" * 24


def test_log_probabilities_are_its_own(itself, baton):
    asked = {"messages": ASK, "logprobs": True, "top_logprobs": 3, **GREEDY}
    said = client(itself.v1).chat.completions.create(model="theirs", **asked).choices[0].logprobs.content
    through = baton.client().chat.completions.create(model="smol", **asked).choices[0].logprobs.content
    assert [entry.token for entry in through] == [entry.token for entry in said]
    for ours, theirs in zip(through, said):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05)
        assert [top.token for top in ours.top_logprobs][0] == theirs.top_logprobs[0].token
        assert len(ours.top_logprobs) == 3 and ours.bytes == theirs.bytes
    chunks = baton.client().chat.completions.create(model="smol", stream=True, **asked)
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    streamed = [entry.token for logprobs in streamed if logprobs for entry in logprobs.content]
    assert streamed == [entry.token for entry in said]
    plain = baton.client().completions.create(
        model="smol", prompt="The capital of France is", logprobs=2, temperature=0, max_tokens=4
    )
    assert len(plain.choices[0].logprobs.tokens) == 4 and len(plain.choices[0].logprobs.top_logprobs[0]) >= 2


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    """An endpoint in front of one whose template knows tools, and how to ask it for a call.

    llama-server lets a model talk before a call that it has to make, and the default one never stops talking: the
    pieces of what begins a call are made likely, and the end most of all, which is possible only where no call has to
    come.
    """
    with llama_server("--chat-template-file", str(TOOLS_TEMPLATE)) as upstream:
        with front(tmp_path_factory.mktemp("tools"), entry(upstream, KIND)) as endpoint:
            begin = http(f"{upstream.root}/tokenize", {"content": "<tool_call>\n"})[1]["tokens"]
            [end] = http(f"{upstream.root}/tokenize", {"content": "<|im_end|>", "parse_special": True})[1]["tokens"]
            bias = {str(end): 40, **{str(token): 20 for token in begin}}
            messages = [{"role": "user", "content": "What is the weather in Paris?"}]
            asked = {"messages": messages, "temperature": 0, "max_tokens": 100, "logit_bias": bias}
            yield endpoint, {"model": "smol", "tools": [WEATHER, TIME], **asked}


def test_a_required_call_comes_and_follows_its_schema(with_tools):
    baton, asked = with_tools
    whole = baton.client().chat.completions.create(tool_choice="required", **asked).choices[0]
    call = whole.message.tool_calls[0]
    assert call.id and call.function.name in ("get_weather", "get_time") and not whole.message.content
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert whole.finish_reason == "tool_calls"
    pieces = [
        piece
        for chunk in baton.client().chat.completions.create(tool_choice="required", stream=True, **asked)
        if chunk.choices
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert pieces[0].function.name == call.function.name
    arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.index == 0)
    assert json.loads(arguments) == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*asked["messages"], whole.message.model_dump(exclude_none=True), result]
    answer = baton.client().chat.completions.create(model="smol", tools=[WEATHER], messages=messages, **GREEDY)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_a_named_tool_is_called_and_no_other(with_tools, name):
    baton, asked = with_tools
    choice = {"type": "function", "function": {"name": name}}
    reply = baton.client().chat.completions.create(tool_choice=choice, **asked).choices[0]
    assert [call.function.name for call in reply.message.tool_calls or []] == [name]
    assert reply.finish_reason == "tool_calls"


def test_no_call_comes_unless_required(with_tools):
    baton, asked = with_tools
    for choice in ("auto", "none"):
        reply = baton.client().chat.completions.create(tool_choice=choice, **asked).choices[0]
        assert not reply.message.tool_calls and reply.finish_reason == "stop"


def test_a_reply_follows_its_schema(baton):
    asked = {"model": "smol", "messages": [{"role": "user", "content": "Who is Bob, 42?"}], "temperature": 0}
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    reply = baton.client().chat.completions.create(response_format=named, max_tokens=100, **asked)
    person = json.loads(reply.choices[0].message.content)
    assert person.keys() == {"name", "age"} and isinstance(person["age"], int)
    reply = Ollama(baton.ollama).chat(
        model="smol", messages=asked["messages"], format=PERSON, options={"temperature": 0, "num_predict": 100}
    )
    assert json.loads(reply.message.content).keys() == {"name", "age"}
    reply = baton.client().chat.completions.create(response_format={"type": "json_object"}, max_tokens=60, **asked)
    assert reply.choices[0].message.content.lstrip().startswith("{")


def test_a_request_for_zero_tokens_counts_its_prompt(itself, baton):
    n_prompt = client(itself.v1).chat.completions.create(model="theirs", messages=ASK, **GREEDY).usage.prompt_tokens
    reply = baton.client().chat.completions.create(model="smol", messages=ASK, max_tokens=0)
    assert not reply.choices[0].message.content and reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (n_prompt, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_reported_with_its_numbers(baton, stream):
    long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as refused:
        baton.client().chat.completions.create(model="smol", messages=long, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert "1024" in refused.value.message and "30" in refused.value.message, refused.value.message
    assert baton.state()["upstreams"][0]["breaker"]["is_open"] is False


def test_tokens_and_prompts_come_from_it(itself, baton):
    text = {"content": "The capital of France", "add_special": True}
    tokens = http(f"{itself.root}/tokenize", text)[1]["tokens"]
    assert http(f"{baton.root}/tokenize", {"model": "smol", **text}) == (200, {"tokens": tokens})
    assert http(f"{baton.root}/detokenize", {"model": "smol", "tokens": tokens})[1]["content"] == text["content"]
    prompt = http(f"{itself.root}/apply-template", {"messages": ASK})[1]["prompt"]
    assert http(f"{baton.root}/apply-template", {"model": "smol", "messages": ASK})[1]["prompt"] == prompt
    whole = {"content": prompt, "add_special": True, "parse_special": True}
    n_tokens = len(http(f"{itself.root}/tokenize", whole)[1]["tokens"])
    counted = http(f"{baton.v1}/messages/count_tokens", {"model": "smol", "messages": ASK})[1]
    assert counted == {"input_tokens": n_tokens}


def test_template_variables_reach_it(tmp_path):
    with llama_server("--chat-template-file", str(THINKING_TEMPLATE)) as upstream:
        with front(tmp_path, entry(upstream, KIND)) as baton:
            def prompt(**more):
                return http(f"{baton.root}/apply-template", {"model": "smol", "messages": ASK, **more})[1]["prompt"]

            off = {"chat_template_kwargs": {"enable_thinking": False}}
            assert "</think>" in prompt(**off) and "</think>" not in prompt()

            def n_prompt(**more):
                reply = baton.client().chat.completions.create(model="smol", messages=ASK, extra_body=more, **GREEDY)
                return reply.usage.prompt_tokens

            assert n_prompt(**off) > n_prompt()


def test_its_context_and_slots_are_reported(baton):
    props = http(f"{baton.root}/props?model=smol")[1]
    # Each of two slots has half of its 2048 positions.
    assert props["default_generation_settings"]["n_ctx"] == 1024 and props["total_slots"] == 8
    assert len(http(f"{baton.root}/slots?model=smol")[1]) == 8
    shown = http(f"{baton.root}/api/show", {"model": "smol"})[1]
    assert shown["model_info"]["general.context_length"] == 1024


def is_idle(itself):
    """Waits until all its slots are idle. Returns the seconds that took."""
    def idle():
        return not any(slot["is_processing"] for slot in http(f"{itself.root}/slots")[1])

    return eventually(idle, "an idle server", 5)


def test_a_client_that_leaves_stops_it(itself, baton):
    events = raw_stream(f"{baton.v1}/chat/completions", ENDLESS)
    for _ in range(3):
        next(events)
    assert any(slot["is_processing"] for slot in http(f"{itself.root}/slots")[1])
    events.close()
    is_idle(itself)
    # The same without streaming to the client.
    with pytest.raises(openai.APITimeoutError):
        baton.client().with_options(timeout=1).chat.completions.create(
            model="smol", messages=ASK, max_tokens=1500, extra_body={"ignore_eos": True}
        )
    is_idle(itself)


def test_more_requests_than_slots_wait_and_are_answered(baton):
    def ask(i):
        messages = [{"role": "user", "content": f"Count to {i}."}]
        return baton.client().chat.completions.create(model="smol", messages=messages, max_tokens=8).choices[0]

    with ThreadPoolExecutor(12) as pool:
        assert all(choice.finish_reason for choice in pool.map(ask, range(12)))
    assert baton.state()["upstreams"][0]["breaker"]["is_open"] is False


def test_vectors_are_its_own(tmp_path):
    # A text's vector depends a little on what else is in its batch: Baton's have 32 texts.
    texts = ["France", "Paris", "a wardrobe"] * 15
    with llama_server("--embeddings", "--pooling", "mean") as upstream, front(tmp_path, entry(upstream, KIND)) as baton:
        said = client(upstream.v1).embeddings.create(model="theirs", input=texts[:32], encoding_format="float")
        through = baton.client().embeddings.create(model="smol", input=texts)
        assert [item.index for item in through.data] == list(range(45)), "more than one batch"
        for ours, theirs in zip(through.data, said.data):
            assert ours.embedding == pytest.approx(theirs.embedding, abs=1e-6)
        assert through.usage.prompt_tokens > said.usage.prompt_tokens
        [vector] = Ollama(baton.ollama).embed(model="smol", input="France").embeddings
        assert len(vector) == len(said.data[0].embedding)


def test_a_function_it_was_not_started_for_is_not_a_failure(baton):
    with pytest.raises(openai.APIStatusError) as refused:
        baton.client().embeddings.create(model="smol", input="France")
    assert refused.value.status_code == 501, refused.value
    assert baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY).choices


def test_a_server_with_several_models_serves_each(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    for name in ("a", "b"):
        (models / f"{name}.gguf").symlink_to(gguf())
    with llama_server_of(models) as upstream, front(tmp_path, entry(upstream, KIND, models=None)) as baton:
        eventually(lambda: {model.id for model in baton.client().models.list()} == {"a", "b"}, "its list")
        for name in ("a", "b"):
            assert baton.client().chat.completions.create(model=name, messages=ASK, **GREEDY).choices[0].message.content
            assert http(f"{baton.root}/tokenize", {"model": name, "content": "hi"})[1]["tokens"]
            assert http(f"{baton.root}/props?model={name}")[1]["default_generation_settings"]["n_ctx"] == 1024


def test_its_key_is_sent_and_a_wrong_one_is_the_operators_mistake(tmp_path):
    with llama_server("--api-key", "right") as upstream:
        with front(tmp_path, entry(upstream, KIND, more='key = "right"')) as baton:
            assert baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY).choices
            assert http(f"{baton.root}/tokenize", {"model": "smol", "content": "hi"})[0] == 200
        with front(tmp_path, entry(upstream, KIND, more='key = "wrong"')) as baton:
            with pytest.raises(openai.InternalServerError) as refused:
                baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY)
            assert refused.value.status_code == 503 and "refused this server" in refused.value.message
            assert http(f"{baton.root}/health")[0] == 503


def test_a_server_that_is_killed_ends_replies_with_an_error_and_is_used_again_when_it_is_back(tmp_path):
    with llama_server() as upstream, front(tmp_path, entry(upstream, KIND)) as baton:
        events = raw_stream(f"{baton.v1}/chat/completions", ENDLESS)
        begun = [next(events) for _ in range(5)]
        upstream.kill()
        rest = list(events)
        assert "content" in begun[-1] and "error" in json.loads(rest[-1]), rest
        assert "[DONE]" not in rest
        with pytest.raises(openai.InternalServerError) as away:
            baton.client().chat.completions.create(model="smol", messages=ASK, **GREEDY)
        assert away.value.status_code == 503
        # It stays away for longer than the first pauses of its breaker.
        time.sleep(3)
        upstream.start()

        def is_served():
            return http(f"{baton.v1}/chat/completions", {"model": "smol", "messages": ASK, **GREEDY})[0] == 200

        assert eventually(is_served, "a reply", 10) < 6


def test_a_server_that_still_loads_is_treated_as_busy(tmp_path):
    with llama_server() as upstream, front(tmp_path, entry(upstream, KIND)) as baton:
        upstream.kill()
        upstream.start(is_ready=False)
        seen = set()

        def is_served():
            status, reply = http(f"{baton.v1}/chat/completions", {"model": "smol", "messages": ASK, **GREEDY})
            seen.add((status, reply.get("error", {}).get("type")))
            return status == 200

        eventually(is_served, "a reply")
        assert {status for status, _ in seen} <= {200, 503}, seen


def test_two_servers_share_the_work_and_one_answers_for_a_dead_one(tmp_path):
    with llama_server() as first, llama_server() as second:
        both = (("first", first), ("second", second))
        config = "".join(entry(upstream, KIND, name, more="max_concurrent = 2") for name, upstream in both)
        with front(tmp_path, config) as baton:
            def ask(i):
                messages = [{"role": "user", "content": f"Count to {i}."}]
                reply = baton.client().chat.completions.with_raw_response.create(
                    model="smol", messages=messages, max_tokens=24, extra_body={"ignore_eos": True}
                )
                assert reply.parse().choices[0].finish_reason == "length"
                return reply.headers["x-baton-route"]

            with ThreadPoolExecutor(4) as pool:
                routes = list(pool.map(ask, range(12)))
            for name in ("first", "second"):
                assert 3 <= sum(f"upstream={name}" in route for route in routes) <= 9, routes
            first.kill()
            routes = [ask(i) for i in range(4)]
            assert all("upstream=second" in route for route in routes), routes


def test_it_answers_for_a_model_whose_engine_is_gone(itself, tmp_path):
    with killable_node("--model", "smollm2", "--name", "smol") as node:
        config = f'[model]\nname = "smol"\ndecode = ["{node.url}"]\n' + entry(itself, KIND, "deputy")
        with front(tmp_path, config) as baton:
            def ask():
                reply = baton.client().chat.completions.with_raw_response.create(model="smol", messages=ASK, **GREEDY)
                return reply.headers["x-baton-route"], reply.parse().choices[0].message.content

            route, _ = ask()
            assert route.startswith("direct; decode=decode-1"), "the model's own engine comes first"
            node.process.kill()
            for _ in range(3):
                route, from_afar = ask()
                assert route.startswith("upstream; upstream=deputy; reason=no_engine"), route
                assert from_afar
            fallbacks = baton.state()["models"][0]["fallbacks"]
            assert fallbacks["upstream"]["count"] == 3, fallbacks
            assert http(f"{baton.root}/health")[1]["status"] == "ok"
