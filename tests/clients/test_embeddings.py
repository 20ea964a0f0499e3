"""Vectors with the openai and ollama packages: one text, several texts and tokens give the same vectors in every form."""

import base64
import struct

import ollama
import openai
import pytest

from conftest import MODEL

N_EMBD = 576
TEXTS = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Interest rates rose by half a percent."]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.fixture
def ollama_client(ollama_url):
    return ollama.Client(host=ollama_url, timeout=120)


def test_texts_become_vectors_of_length_one(client):
    reply = client.embeddings.create(model=MODEL, input=TEXTS)
    assert reply.object == "list" and reply.model == MODEL and reply.usage.total_tokens == reply.usage.prompt_tokens > 15
    vectors = [item.embedding for item in reply.data]
    assert [item.index for item in reply.data] == [0, 1, 2] and {len(v) for v in vectors} == {N_EMBD}
    assert all(abs(dot(v, v) - 1) < 1e-4 for v in vectors)
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2])


def test_both_encodings_and_tokens_say_the_same(client, base_url):
    # By default the package asks for base64 and decodes it.
    decoded = client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding
    floats = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float").data[0].embedding
    encoded = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64").data[0].embedding
    assert list(struct.unpack(f"<{N_EMBD}f", base64.b64decode(encoded))) == list(decoded)
    assert floats == pytest.approx(decoded, abs=1e-7)
    tokens = client.post(base_url.removesuffix("/v1") + "/tokenize", cast_to=object, body={"content": TEXTS[0]})
    by_tokens = client.embeddings.create(model=MODEL, input=tokens["tokens"], encoding_format="float")
    assert by_tokens.data[0].embedding == floats
    pair = client.embeddings.create(model=MODEL, input=[tokens["tokens"], [1, 2, 3]], encoding_format="float")
    assert dot(pair.data[0].embedding, floats) > 0.999


def test_many_long_texts(client):
    reply = client.embeddings.create(model=MODEL, input=["word " * 520] + [f"text {i}" for i in range(12)])
    assert len(reply.data) == 13 and all(len(item.embedding) == N_EMBD for item in reply.data)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "gpt-nope"}, openai.NotFoundError, "does not exist"),
        ({"input": ""}, openai.BadRequestError, "input"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"input": [10**8]}, openai.BadRequestError, "vocabulary"),
        ({"input": "word " * 20000}, openai.BadRequestError, "maximum context length"),
        ({"dimensions": 8}, openai.BadRequestError, "576"),
    ],
)
def test_mistakes_are_the_sdks_own_errors(client, change, error, words):
    with pytest.raises(error) as raised:
        client.embeddings.create(**{"model": MODEL, "input": "x", **change})
    assert words in raised.value.message


def test_ollamas_routes(client, ollama_client):
    expected = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float").data[0].embedding
    reply = ollama_client.embed(MODEL, TEXTS)
    assert len(reply.embeddings) == 3 and reply.prompt_eval_count > 15 and reply.total_duration > 0
    assert dot(reply.embeddings[0], expected) > 0.999
    assert list(ollama_client.embeddings(MODEL, TEXTS[0]).embedding) == pytest.approx(expected, abs=1e-6)
    assert ollama_client.embed(MODEL, "").embeddings == []
