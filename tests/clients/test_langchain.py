"""LangChain's classes for the openai and ollama packages: what both do, and Ollama's tools."""

from functools import reduce
from operator import add

import ollama
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from conftest import MODEL

ASK = "What is the capital of France?"


class City(BaseModel):
    name: str = Field(max_length=30)
    is_large: bool


def chat(package, endpoint, model=MODEL, n_tokens=100):
    if package is openai:
        settings = {"base_url": endpoint.base_url, "api_key": "none", "max_retries": 0, "max_tokens": n_tokens}
        return ChatOpenAI(model=model, temperature=0, timeout=120, **settings)
    return ChatOllama(model=model, base_url=endpoint.ollama_url, temperature=0, num_predict=n_tokens, repeat_penalty=1)


def embeddings(package, endpoint, model=MODEL):
    if package is openai:
        # Its own check of the length would fetch tiktoken's encoding.
        settings = {"api_key": "none", "max_retries": 0, "check_embedding_ctx_length": False}
        return OpenAIEmbeddings(model=model, base_url=endpoint.base_url, **settings)
    return OllamaEmbeddings(model=model, base_url=endpoint.ollama_url)


packages = pytest.mark.parametrize("package", [openai, ollama], ids=["openai", "ollama"])


@packages
def test_a_stream_says_what_the_whole_reply_says(package, endpoint):
    model = chat(package, endpoint, n_tokens=12)
    whole = model.invoke(ASK)
    assert whole.content and 0 < whole.usage_metadata["output_tokens"] <= 12
    ends = {whole.response_metadata.get(name) for name in ("finish_reason", "done_reason")}
    assert ends & {"stop", "length"}
    assert "".join(chunk.content for chunk in model.stream(ASK)) == whole.content


@packages
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_structured_output_by_schema(package, endpoint):
    model = chat(package, endpoint).with_structured_output(City, method="json_schema")
    whole = model.invoke("Describe Paris.")
    assert isinstance(whole, City) and list(model.stream("Describe Paris."))[-1] == whole


@packages
def test_vectors(package, endpoint):
    model = embeddings(package, endpoint)
    texts = ["The cat sits on the mat.", "Interest rates rose by half a percent."]
    documents = model.embed_documents(texts)
    query = model.embed_query("Where is the cat?")
    assert [len(vector) for vector in [*documents, query]] == [576] * 3
    near, far = (sum(a * b for a, b in zip(query, vector, strict=True)) for vector in documents)
    assert near > far


@packages
@pytest.mark.parametrize(
    ("model", "prompt", "status", "words"),
    [("nope", ASK, 404, "nope"), (MODEL, "word " * 20000, 400, "maximum context length")],
    ids=["no such model", "too long"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_of_chats_are_the_packages_own_errors(package, endpoint, model, prompt, status, words, stream):
    model = chat(package, endpoint, model)
    of_openai = {404: openai.NotFoundError, 400: openai.BadRequestError}[status]
    with pytest.raises(of_openai if package is openai else ollama.ResponseError) as raised:
        list(model.stream(prompt)) if stream else model.invoke(prompt)
    assert raised.value.status_code == status and words in str(raised.value)


@packages
def test_mistakes_of_vectors_are_the_packages_own_errors(package, endpoint):
    model = embeddings(package, endpoint, "nope")
    with pytest.raises(openai.NotFoundError if package is openai else ollama.ResponseError) as raised:
        model.embed_query("x")
    assert raised.value.status_code == 404


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def test_ollamas_tools_are_called_and_their_results_answered(endpoint):
    # Ollama's API cannot force a tool, but this model repeats an example.
    history = []
    for city in ("Rome", "Madrid"):
        call = {"name": "get_weather", "args": {"city": city}, "id": city}
        history += [HumanMessage(f"What is the weather in {city}?"), AIMessage("", tool_calls=[call])]
    history.append(HumanMessage("What is the weather in Paris?"))
    model = chat(ollama, endpoint).bind_tools([get_weather])
    whole = model.invoke(history)
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]
    streamed = reduce(add, model.stream(history))
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = get_weather.invoke(whole.tool_calls[0])
    assert isinstance(result, ToolMessage) and result.content == "Sunny in Paris."
    assert model.invoke([HumanMessage("What is the weather in Paris?"), whole, result]).content
