"""litellm, with its OpenAI provider and its Ollama provider."""

import json
import os

import pytest

# Use the table of prices that the package contains, and do not fetch it.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from litellm import completion, embedding
from pydantic import BaseModel

from conftest import MODEL

ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}}}


class City(BaseModel):
    name: str
    is_large: bool


@pytest.fixture
def openai(base_url):
    return {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "timeout": 120, "max_retries": 0}


@pytest.fixture
def ollama(ollama_url):
    return {"model": f"ollama_chat/{MODEL}", "api_base": ollama_url, "timeout": 120, "max_retries": 0}


@pytest.fixture(params=["openai", "ollama"])
def to(request, openai, ollama):
    """The arguments that every call shares."""
    return {"openai": openai, "ollama": ollama}[request.param]


def test_a_stream_says_what_the_whole_reply_says(to):
    settings = {**to, "messages": ASK, "temperature": 0, "max_tokens": 12}
    whole = completion(**settings)
    assert whole.choices[0].message.content and whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.prompt_tokens > 5 and 0 < whole.usage.completion_tokens <= 12
    chunks = list(completion(**settings, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_forced_tool(openai):
    named = {"type": "function", "function": {"name": "get_weather"}}
    settings = {**openai, "messages": ASK, "temperature": 0, "max_tokens": 100, "tools": [WEATHER], "tool_choice": named}
    [call] = completion(**settings).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    chunks = list(completion(**settings, stream=True))
    [streamed] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


def test_ollamas_tools_are_called_and_their_results_answered(ollama):
    ask = lambda city: {"role": "user", "content": f"What is the weather in {city}?"}

    def called(city):
        call = {"id": city, "type": "function"}
        call["function"] = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    # Ollama's API cannot force a tool, but this model repeats an example.
    messages = [ask("Rome"), called("Rome"), ask("Madrid"), called("Madrid"), ask("Paris")]
    settings = {**ollama, "tools": [WEATHER], "temperature": 0, "max_tokens": 60, "repeat_penalty": 1}
    whole = completion(**settings, messages=messages).choices[0]
    chunks = list(completion(**settings, messages=messages, stream=True))
    for choice in (whole, litellm.stream_chunk_builder(chunks).choices[0]):
        [call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    assert completion(**settings, messages=[ask("Paris"), whole.message, result]).choices[0].message.content


def test_structured_output(to):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": {
        **City.model_json_schema(), "additionalProperties": False}}}
    said = completion(**to, messages=ASK, temperature=0, max_tokens=100, response_format=schema)
    City.model_validate_json(said.choices[0].message.content)


def test_vectors(openai, ollama_url):
    texts = ["The cat sits on the mat.", "Interest rates rose."]
    vectors = [item["embedding"] for item in embedding(**openai, input=texts).data]
    assert [len(vector) for vector in vectors] == [576, 576]
    other = embedding(model=f"ollama/{MODEL}", api_base=ollama_url, input=texts).data
    assert sum(a * b for a, b in zip(other[0]["embedding"], vectors[0])) > 0.999


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "openai/nope"}, litellm.NotFoundError),
        ({"temperature": 7}, litellm.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, litellm.ContextWindowExceededError),
    ],
)
def test_mistakes_are_its_own_errors(openai, change, error, stream):
    with pytest.raises(error):
        completion(**{**openai, "messages": ASK, **change}, stream=stream)


# litellm has no error type of its own for a long prompt here, so the message decides.
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "ollama_chat/nope"}, litellm.NotFoundError, "model 'nope' not found"),
        ({"temperature": 7}, litellm.BadRequestError, "options.temperature"),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, litellm.BadRequestError, "context length"),
    ],
)
def test_ollamas_mistakes_are_its_own_errors(ollama, change, error, words, stream):
    with pytest.raises(error) as raised:
        completion(**{**ollama, "messages": ASK, **change}, stream=stream)
    assert words in str(raised.value)
