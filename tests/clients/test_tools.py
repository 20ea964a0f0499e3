"""Tools, as the users of the openai, ollama and langchain packages call them."""

import json

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from conftest import MODEL

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
CALL = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "tool_choice": NAMED, "temperature": 0, "max_tokens": 100}


def check(arguments):
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")


def test_a_named_tool_is_called(client):
    choice = client.chat.completions.create(**CALL).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather" and call.id
    check(json.loads(call.function.arguments))


def test_a_stream_of_a_call_adds_up(client):
    whole = client.chat.completions.create(**CALL).choices[0].message.tool_calls[0].function
    name, arguments, ids, reasons = "", "", [], []
    for chunk in client.chat.completions.create(**CALL, stream=True):
        choice = chunk.choices[0]
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            ids += [call.id] if call.id else []
    assert (name, arguments) == (whole.name, whole.arguments)
    assert len(ids) == 1 and reasons == ["tool_calls"]


def test_the_stream_helper_parses_arguments(client):
    class GetWeather(BaseModel):
        city: str
        days: int

    weather = openai.pydantic_function_tool(GetWeather)
    choice = {"type": "function", "function": {"name": "GetWeather"}}
    with client.chat.completions.stream(**{**CALL, "tools": [weather], "tool_choice": choice}) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_result_is_answered(client):
    first = client.chat.completions.create(**CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    reply = client.chat.completions.create(**{**CALL, "messages": [*ASK, first, result], "tool_choice": "none"})
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls


@pytest.mark.parametrize("change", [
    {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
    {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
    {"tools": [{"type": "function", "function": {
        "name": "get_weather", "parameters": {"type": "object", "properties": {"a": {"type": "strnig"}}}}}]},
])
def test_bad_tools_are_the_sdks_own_errors(client, change):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{**CALL, **change})


def test_ollamas_tools_are_called_and_their_results_answered(ollama_url):
    import ollama

    client = ollama.Client(host=ollama_url, timeout=120)
    parameters = {"type": "object", "properties": {"city": PARAMETERS["properties"]["city"]}, "required": ["city"]}
    tools = [{"type": "function", "function": {**WEATHER["function"], "parameters": parameters}}]
    settings = {"tools": tools, "options": {"temperature": 0, "num_predict": 60, "repeat_penalty": 1}}

    def called(city):
        return {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": city}}}]}

    # Ollama's API cannot force a tool, but this model repeats an example.
    shown = [message for city in ("Rome", "Madrid")
             for message in ({"role": "user", "content": f"What is the weather in {city}?"}, called(city))]
    whole = client.chat(MODEL, [*shown, *ASK], **settings)
    [call] = whole.message.tool_calls
    assert call.function.name == "get_weather" and call.function.arguments == {"city": "Paris"}
    lines = list(client.chat(MODEL, [*shown, *ASK], **settings, stream=True))
    assert [call.function for line in lines for call in line.message.tool_calls or []] == [call.function]
    assert "".join(line.message.content or "" for line in lines) == (whole.message.content or "") and lines[-1].done
    history = [*ASK, called("Paris"), {"role": "tool", "tool_name": "get_weather", "content": "Sunny, 21 degrees."}]
    assert client.chat(MODEL, history, **settings).message.content
    assert "tools" in client.show(MODEL).capabilities


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"Sunny in {city} for {days} days."


def langchain(base_url):
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key="none", temperature=0, max_tokens=100, max_retries=0)


@pytest.mark.parametrize("choice", ["get_weather", "required", "any", True])
def test_langchain_calls_the_tool(base_url, choice):
    # The question leaves no argument open. Where two tokens are equally likely, rounding decides: cached KV may lie in other cells.
    question = "What is the weather in Paris for the next 3 days?"
    model = langchain(base_url).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    reply = model.invoke(question)
    [call] = reply.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["days"], int)
    assert "Sunny in" in get_weather.invoke(call).content
    streamed = None
    for chunk in model.stream(question):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]


def test_langchain_structured_output_by_tool(base_url):
    class Weather(BaseModel):
        city: str
        days: int

    model = langchain(base_url).with_structured_output(Weather, method="function_calling")
    assert isinstance(model.invoke("The weather in Paris for three days."), Weather)


def test_functions_are_called_in_their_own_form(client):
    function = {"name": "get_weather", "parameters": PARAMETERS}
    asked = {"model": MODEL, "messages": ASK, "functions": [function], "function_call": {"name": "get_weather"},
             "temperature": 0, "max_tokens": 100}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    check(json.loads(choice.message.function_call.arguments))
    deltas = [chunk.choices[0].delta.function_call for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(d.arguments or "" for d in deltas if d) == choice.message.function_call.arguments
    history = [*ASK, choice.message, {"role": "function", "name": "get_weather", "content": "Sunny."}]
    reply = client.chat.completions.create(**{**asked, "messages": history, "function_call": "none"})
    assert reply.choices[0].message.content
