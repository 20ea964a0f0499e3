"""pydantic-ai with its OpenAI model: agents with tools and typed outputs."""

import importlib.util

import pytest
from pydantic import BaseModel

import server

server.need(importlib.util.find_spec("pydantic_ai"), "pydantic-ai needs Python 3.11")
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from conftest import MODEL

SETTINGS = {"temperature": 0, "max_tokens": 100, "timeout": 120}
ASK = "What is the capital of France?"


class City(BaseModel):
    name: str
    is_large: bool


@pytest.fixture
def provider(base_url):
    return OpenAIProvider(base_url=base_url, api_key="none")


@pytest.fixture
def model(provider):
    return OpenAIChatModel(MODEL, provider=provider, settings=SETTINGS)


def test_chat(model):
    agent = Agent(model, instructions="Answer in one sentence.")
    result = agent.run_sync(ASK, model_settings={"max_tokens": 12})
    assert result.output and result.usage.input_tokens > 5 and 0 < result.usage.output_tokens <= 12
    second = agent.run_sync("And of Spain?", message_history=result.all_messages(), model_settings={"max_tokens": 4})
    assert second.output and second.usage.input_tokens > result.usage.input_tokens


async def test_a_stream_says_what_the_whole_reply_says(model):
    agent = Agent(model)
    whole = (await agent.run(ASK)).output
    async with agent.run_stream(ASK) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1 and "".join(pieces) == whole


@pytest.mark.parametrize("output", [City, ToolOutput(City, name="describe"), NativeOutput(City)], ids=["tool", "named", "native"])
def test_structured_output(model, output):
    # A tool output requires a tool call; a native output is a schema for the answer.
    assert isinstance(Agent(model, output_type=output, retries=0).run_sync("Describe Paris.").output, City)


async def test_structured_output_streams(model):
    async with Agent(model, output_type=City, retries=0).run_stream("Describe Paris.") as result:
        partial = [output async for output in result.stream_output(debounce_by=None)]
    assert isinstance(partial[-1], City)


def test_a_tool_is_called_and_its_result_used(model):
    agent = Agent(model, output_type=str)
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "Sunny, 21 degrees."

    # The first step must call the tool, the second must answer.
    choice = lambda context: {"tool_choice": "required" if context.run_step == 1 else "none"}
    result = agent.run_sync("What is the weather in Paris?", model_settings=choice)
    assert asked and result.output


def test_vectors(provider):
    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))
    vectors = embedder.embed_documents_sync(["The cat sits on the mat.", "Interest rates rose."]).embeddings
    assert [len(vector) for vector in vectors] == [576, 576]


@pytest.mark.parametrize(
    ("name", "prompt", "status"), [("nope", ASK, 404), (MODEL, "word " * 20000, 400)], ids=["no such model", "too long"]
)
def test_mistakes_are_its_own_errors(provider, name, prompt, status):
    with pytest.raises(ModelHTTPError) as raised:
        Agent(OpenAIChatModel(name, provider=provider)).run_sync(prompt)
    assert raised.value.status_code == status and raised.value.body["message"]
