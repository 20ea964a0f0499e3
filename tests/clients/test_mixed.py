"""Clients of every dialect at once, against one server with four slots: every reply is complete and to its own prompt."""

from concurrent.futures import ThreadPoolExecutor

import anthropic
import ollama
import openai
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

from conftest import MODEL

N_TOKENS = 16


def by_openai(base_url, prompt):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=N_TOKENS, stream=True)
    chunks = list(stream)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] in (["stop"], ["length"])
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_responses(base_url, prompt):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    with client.responses.stream(model=MODEL, input=prompt, temperature=0, max_output_tokens=N_TOKENS) as stream:
        events = list(stream)
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].response.output_text


def by_anthropic(base_url, prompt):
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=300)
    settings = {"model": MODEL, "max_tokens": N_TOKENS, "extra_body": {"temperature": 0}}
    with client.messages.stream(**settings, messages=[{"role": "user", "content": prompt}]) as stream:
        message = stream.get_final_message()
    assert message.stop_reason in ("end_turn", "max_tokens")
    return message.content[0].text


def by_ollama(base_url, prompt):
    options = {"temperature": 0, "num_predict": N_TOKENS, "repeat_penalty": 1}
    messages = [{"role": "user", "content": prompt}]
    client = ollama.Client(host=base_url.removesuffix("/v1"), timeout=300)
    lines = list(client.chat(MODEL, messages, options=options, stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    return "".join(line.message.content for line in lines)


def by_langchain(base_url, prompt):
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key="none", temperature=0, max_tokens=N_TOKENS, max_retries=0)
    return model.invoke(prompt).content


def by_langchains_ollama(base_url, prompt):
    settings = {"temperature": 0, "num_predict": N_TOKENS, "repeat_penalty": 1}
    model = ChatOllama(model=MODEL, base_url=base_url.removesuffix("/v1"), **settings)
    return "".join(chunk.content for chunk in model.stream(prompt))


CLIENTS = [by_openai, by_responses, by_anthropic, by_ollama, by_langchain, by_langchains_ollama]


def test_every_client_at_once(base_url):
    # Replies begin differently for each prompt, so a mix-up would show.
    prompts = ["Count: 1, 2, 3,", "Name a colour.", "What is the capital of Italy?"]
    jobs = [(client, prompt) for prompt in prompts for client in CLIENTS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        replies = list(pool.map(lambda job: job[0](base_url, job[1]), jobs))
    assert all(replies)
    # While other streams run, llama.cpp may take the other of two nearly equal tokens (docs/engine.md). Most replies agree, and
    # none is the reply to another prompt.
    said = [set(replies[i : i + len(CLIENTS)]) for i in range(0, len(replies), len(CLIENTS))]
    assert not said[0] & said[1] and not said[1] & said[2] and not said[0] & said[2]
