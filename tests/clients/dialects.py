"""One short chat in every dialect, through an endpoint in front of another server.

Each function returns the reply's text and the tokens of the prompt and of the reply, as the endpoint counts them.
"""

from ollama import Client as Ollama

from fronts import http, text_of

ASK = [{"role": "user", "content": "Why is the sky blue?"}]
N_TOKENS = 8


def chat(baton):
    whole = baton.client().chat.completions.create(model="smol", messages=ASK, max_tokens=N_TOKENS)
    return whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens


def streamed_chat(baton):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(baton.client().chat.completions.create(model="smol", messages=ASK, max_tokens=N_TOKENS, **options))
    assert len([chunk for chunk in chunks if chunk.choices]) > N_TOKENS / 2, "it comes piece by piece"
    return text_of(chunks), chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens


def responses(baton):
    reply = baton.client().responses.create(model="smol", input=ASK[0]["content"], max_output_tokens=N_TOKENS)
    return reply.output_text, reply.usage.input_tokens, reply.usage.output_tokens


def messages(baton):
    status, reply = http(f"{baton.v1}/messages", {"model": "smol", "messages": ASK, "max_tokens": N_TOKENS})
    assert status == 200, reply
    return reply["content"][0]["text"], reply["usage"]["input_tokens"], reply["usage"]["output_tokens"]


def ollama(baton):
    pieces = list(Ollama(baton.ollama).chat(model="smol", messages=ASK, stream=True, options={"num_predict": N_TOKENS}))
    assert pieces[-1].done
    return "".join(piece.message.content for piece in pieces), pieces[-1].prompt_eval_count, pieces[-1].eval_count


DIALECTS = [chat, streamed_chat, responses, messages, ollama]
