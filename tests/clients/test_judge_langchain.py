"""langchain-tests, LangChain's own suite for chat models, on langchain-openai's class pointed at Baton.

A test that a model of 135M parameters cannot pass by its own wit is marked with the reason; it may pass all the same.
docs/compatibility.md has the table.
"""

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

import server
from conftest import MODEL

# The model's token of a quotation mark.
QUOTE = 18


class TestChatModel(ChatModelIntegrationTests):
    # One route is enough: other files test both.
    @pytest.fixture(autouse=True)
    def at(self, banner):
        self.base_url = server.base_url(banner)

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": MODEL, "base_url": self.base_url, "api_key": "none",
            "temperature": 0, "max_tokens": 500, "max_retries": 0, "timeout": 120, "stream_usage": True,
            # Without a penalty this model repeats itself in a string without end, which the schemas do not bound. The
            # quotes that end strings must not be penalised with the rest.
            "frequency_penalty": 2, "logit_bias": {QUOTE: 6},
            # With a seed nothing is guessed, so that a near tie does not depend on how busy the machine is.
            "seed": 1,
            # Otherwise the model adds more calls to the forced one.
            "extra_body": {"parallel_tool_calls": False},
        }

    @property
    def has_tool_choice(self):
        return True

    @property
    def structured_output_kwargs(self):
        # The grammar keeps the schema. test_tools.py tests the other way, by a tool.
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self):
        return True

    @pytest.mark.xfail(reason="whether a tool is called at all is this model's choice here: the suite leaves it free")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="where a string ends is this model's choice, which rounding moves with what is cached of the prompt")
    def test_unicode_tool_call_integration(self, model):
        super().test_unicode_tool_call_integration(model)

    @pytest.mark.xfail(reason="JSON mode keeps the reply JSON; which keys it has is this model's wit")
    def test_json_mode(self, model):
        super().test_json_mode(model)
