"""Open WebUI in a browser, connected to Baton with the default model by Ollama's and by OpenAI's API.

OPEN_WEBUI_SCREENSHOT names the file for a picture of the window. MMPROJ is a projector for the model.
"""

import json
import os
import re
import struct
import time
import urllib.request
import zlib

import pytest
from playwright.sync_api import expect

import server
import window
from window import PATIENCE, eventually, get

MODEL = "smollm2"
QUESTION = "Why is the sky blue?"
STORY = "Write a very long story about a heron and a lighthouse. Do not stop."


@pytest.fixture(scope="module")
def baton():
    """The URL of an endpoint without /v1."""
    # The context bounds replies: this model does not always end them.
    args = ("--model", MODEL, "--mmproj", os.environ["MMPROJ"], "--slots", "2", "--ctx-size", "512")
    with server.running("serve", "--listen", "127.0.0.1:0", *args, output="stdout", ready="Stop with") as said:
        yield server.base_url(said).removesuffix("/v1")


@pytest.fixture(params=["ollama", "openai"])
def open_webui(request, baton, tmp_path):
    """The URL of an Open WebUI that is connected to Baton, and the API by which it is."""
    connections = {
        "ollama": {"OLLAMA_BASE_URL": baton, "ENABLE_OPENAI_API": "false"},
        "openai": {"OPENAI_API_BASE_URL": f"{baton}/v1", "OPENAI_API_KEY": "none", "ENABLE_OLLAMA_API": "false"},
    }
    with window.open_webui(connections[request.param], tmp_path) as url:
        yield url, request.param


@pytest.fixture
def page(open_webui):
    with window.page(open_webui[0]) as page:
        yield page


def picture(path):
    """Writes a red square as a PNG."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = 64
    rows = (b"\0" + b"\xff\0\0" * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


def ask(page, text):
    page.locator("#chat-input").click()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def replies(page):
    return page.locator(".chat-assistant")


def is_finished(page):
    """Waits until the last reply has its buttons, and returns its text."""
    page.get_by_role("button", name="Regenerate").last.wait_for()
    return replies(page).last.inner_text()


def test_open_webui(baton, open_webui, page, tmp_path):
    url, api = open_webui

    def busy():
        return [slot for slot in get(f"{baton}/slots") if slot["is_processing"]]

    def counted(metric):
        with urllib.request.urlopen(f"{baton}/metrics", timeout=10) as reply:
            return sum(int(n) for n in re.findall(rf"^{metric}(?:{{.*}})? (\d+)$", reply.read().decode(), re.M))

    # One entry for the model, under its name.
    page.locator("#model-selector-model-button").click()
    entries = page.get_by_role("option")
    expect(entries.first).to_be_visible()
    names = entries.all_inner_texts()
    assert len(names) == 1 and MODEL in names[0], names
    page.keyboard.press("Escape")

    ask(page, QUESTION)
    first = is_finished(page)
    assert "sky" in first, first
    if os.environ.get("OPEN_WEBUI_SCREENSHOT") and api == "openai":
        page.screenshot(path=os.environ["OPEN_WEBUI_SCREENSHOT"])

    n_asked = counted("baton_requests_total")
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_role("button", name="Try Again").click()
    eventually("a second reply", lambda: counted("baton_requests_total") == n_asked + 1 and not busy())
    assert is_finished(page)

    # Stop ends the reply in Baton, too.
    page.goto(url)
    ask(page, STORY)
    eventually("a reply to stop", lambda: busy() and replies(page).last.inner_text())
    page.get_by_role("button", name="Stop").click()
    stopped = time.monotonic()
    eventually("an idle engine", lambda: not busy())
    assert time.monotonic() - stopped < 10
    assert is_finished(page)

    page.goto(url)
    page.locator("input[type=file]").first.set_input_files(picture(tmp_path / "red.png"))
    expect(page.locator("img[alt='red.png'], form img").first).to_be_visible()
    n_tokens = counted("baton_prompt_tokens_total")
    ask(page, "What is this?")
    assert is_finished(page)
    # A picture is 16 tokens of the prompt.
    n_tokens = counted("baton_prompt_tokens_total") - n_tokens
    assert n_tokens == 16 + n_prompt_tokens(baton, "What is this?")


def n_prompt_tokens(baton, text):
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(f"{baton}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return json.load(reply)["usage"]["prompt_tokens"]
