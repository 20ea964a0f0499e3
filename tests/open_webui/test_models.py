"""The page on which Open WebUI's administrator manages Ollama's models, against an endpoint that allows it, with a stand-in for the hub."""

import os
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import expect

import server
import window
from hub import PULLED, hub_of


@pytest.fixture
def baton(tmp_path, monkeypatch):
    """The URL of an endpoint whose cache is a folder of the test's own."""
    file = subprocess.run([server.BATON, "pull", "smollm2"], check=True, capture_output=True, text=True).stdout.strip()
    hub = hub_of(Path(file))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    args = ("--listen", "127.0.0.1:0", "--engine", "sim", "--allow-model-management")
    with server.running("serve", *args, output="stdout", ready="Stop with") as said:
        yield server.base_url(said).removesuffix("/v1")
    hub.shutdown()


def models(baton):
    return [model["name"] for model in window.get(f"{baton}/api/tags")["models"]]


def test_a_model_is_pulled_used_and_deleted(baton, tmp_path):
    connection = {"OLLAMA_BASE_URL": baton, "ENABLE_OPENAI_API": "false"}
    with window.open_webui(connection, tmp_path) as url, window.page(url) as page:

        def manage():
            page.goto(f"{url}/admin/settings/models")
            page.get_by_role("button", name="Actions").click()
            page.get_by_text("Manage", exact=True).click()
            expect(page.get_by_text("Pull a model from Ollama.com")).to_be_visible()

        manage()
        tag = page.get_by_placeholder("Enter model tag (e.g. mistral:7b)")
        tag.fill(PULLED)
        tag.locator("xpath=ancestor::div[.//button][1]//button").last.click()
        window.eventually("a pulled model", lambda: PULLED in models(baton))
        expect(page.get_by_text("has been successfully downloaded", exact=False)).to_be_visible()
        if os.environ.get("OPEN_WEBUI_SCREENSHOT"):
            page.screenshot(path=os.environ["OPEN_WEBUI_SCREENSHOT"])

        page.goto(f"{url}/?models={PULLED}")
        page.locator("#chat-input").click()
        page.keyboard.type("What is the capital of France?")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").last.wait_for()
        assert page.locator(".chat-assistant").last.inner_text()
        assert [model["name"] for model in window.get(f"{baton}/api/ps")["models"]].count(PULLED) == 1

        manage()
        choice = page.locator("select", has_text="Select a model")
        choice.select_option(label=next(label for label in choice.locator("option").all_inner_texts() if PULLED in label))
        choice.locator("xpath=ancestor::div[.//button][1]//button").last.click()
        page.get_by_role("button", name="Confirm").click()
        window.eventually("a deleted model", lambda: PULLED not in models(baton))
        window.eventually("a removed file", lambda: not list((tmp_path / "cache").rglob("*.gguf")))
