"""instructor: objects out of text, by tools and by schemas, whole, partial and many."""

import instructor
import openai
import pytest
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field

from conftest import MODEL

ASK = {"model": MODEL, "temperature": 0, "max_tokens": 200, "messages": [{"role": "user", "content": "Describe Paris."}]}


class City(BaseModel):
    name: str = Field(max_length=30)
    is_large: bool


# JSON mode guarantees JSON but not the schema, which a model of 135M cannot follow unaided.
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_object(client, mode):
    patched = instructor.from_openai(client, mode=mode)
    city, reply = patched.chat.completions.create_with_completion(**ASK, response_model=City, max_retries=0)
    assert isinstance(city, City) and reply.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_partial_object_grows(client, mode):
    patched = instructor.from_openai(client, mode=mode)
    seen = list(patched.chat.completions.create_partial(**ASK, response_model=City, max_retries=0))
    assert len(seen) > 1 and seen[-1].name is not None and seen[-1].is_large is not None


def test_many_objects(client):
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)

    class Cities(BaseModel):
        cities: list[City] = Field(min_length=2, max_length=3)

    assert len(patched.chat.completions.create(**ASK, response_model=Cities, max_retries=0).cities) in (2, 3)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, openai.BadRequestError),
    ],
)
def test_mistakes_are_the_sdks_own_errors(client, change, error):
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    with pytest.raises((error, InstructorRetryException)) as raised:
        patched.chat.completions.create(**{**ASK, **change}, response_model=City, max_retries=0)
    cause = raised.value
    while cause is not None and not isinstance(cause, error):
        cause = cause.__cause__
    assert isinstance(cause, error)
