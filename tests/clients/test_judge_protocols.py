"""llm-comply and canitoolcall, two public judges of protocols. Each check passes, or is listed here with the reason why it
does not. docs/compatibility.md has the tables.

Both leave sampling to the server. Here their requests are greedy and bounded, so that every run is the same.
"""

import dataclasses
import importlib.resources

import llm_comply.config
import llm_comply.http
import llm_comply.runner
import llm_comply.schema
import llm_comply.tests
import pytest
from canitoolcall import probe

import server
from conftest import MODEL

# How each dialect bounds a reply, and its specification in the package.
COMPLY = {
    "openai-chat": ("max_tokens", "openai_chat.json"),
    "open-responses": ("max_output_tokens", "openresponses.json"),
    "anthropic": ("max_tokens", "anthropic.json"),
}
IMAGE = ("this model has no eyes: an image is refused, 400", ("HTTP 400", "missing or empty", "is empty", "expected "))
LENGTH = ("the model does not end its reply, and is cut at the bound: the status is incomplete", ("got 'incomplete'",))
# Why a check does not pass, and the complaints that this explains. Any other complaint fails the test.
KNOWN = {
    "openai-chat:chat-image-input": IMAGE,
    "open-responses:image-input": IMAGE,
    "anthropic:anth-image-input": IMAGE,
    "open-responses:streaming-response": LENGTH,
}
WIT = {
    "unicode-args": "the model leaves out half of the text that it should copy; what it writes arrives whole",
    "reasoning-then-call": "the model does not end its string, and is cut at the bound: finish_reason is length",
}


def cases():
    for form in COMPLY:
        for case in llm_comply.tests.get_tests(form):
            yield pytest.param(form, case, id=f"{form}:{case.id}")


@pytest.mark.parametrize(("form", "case"), list(cases()))
def test_llm_comply(banner, form, case):
    bound, spec = COMPLY[form]
    greedy = {"temperature": 0, bound: 160}

    def build(config):
        request = case.build_request(config)
        # Deliberate omissions stay out.
        if "error" in case.id or "missing" in case.id:
            return request
        # The scenario asks for one call; further ones are the model's choice.
        if form == "anthropic" and "tool_choice" in request:
            greedy["tool_choice"] = {**request["tool_choice"], "disable_parallel_tool_use": True}
        elif "tools" in request:
            greedy["parallel_tool_calls"] = False
        return {**request, **greedy}

    config = llm_comply.config.ComplianceConfig(base_url=server.base_url(banner), api_key="none", model=MODEL, timeout=120)
    with importlib.resources.as_file(importlib.resources.files("llm_comply") / "specs" / spec) as path:
        loader = llm_comply.schema.SpecLoader(str(path))
    # A new connection for each check, because a broken one stays in the pool.
    llm_comply.http.close_client()
    runner = llm_comply.runner.TestRunner(config, [], loader)
    result = runner.run_one(dataclasses.replace(case, build_request=build))
    print(result.status.value, *result.errors, *result.warnings, sep='\nJ ')
    if result.status.value == "skipped":
        pytest.skip(result.errors[0])
    known, words = KNOWN.get(f"{form}:{case.id}", (None, ()))
    strange = [error for error in result.errors if not any(word in error for word in words)]
    assert not strange
    if result.errors:
        pytest.xfail(known)


@pytest.mark.parametrize("scenario", probe.BUILTIN_SCENARIOS, ids=lambda scenario: scenario.id)
def test_canitoolcall(banner, scenario):
    """Forces the tool where the scenario wants a call, because a small model may not call it by itself."""
    changes = {"extra_body": {**scenario.extra_body, "max_tokens": 160}}
    if scenario.expect.tool_names and isinstance(scenario.tool_choice, str):
        changes["tool_choice"] = "required"
    if len(scenario.expect.tool_names) == 1:
        changes["extra_body"]["parallel_tool_calls"] = False
    report = probe.probe(
        server.base_url(banner), MODEL, scenarios=[dataclasses.replace(scenario, **changes)], timeout_s=120, concurrency=1
    )
    print(report.render_text())
    outcomes = {(outcome.check, outcome.stream): outcome.status for outcome in report.outcomes}
    # The stream and the whole reply are equal.
    assert outcomes["stream_equals_nonstream", True] == "pass"
    if set(outcomes.values()) != {"pass"} and scenario.id in WIT:
        pytest.xfail(WIT[scenario.id])
    assert set(outcomes.values()) == {"pass"}
