"""Open WebUI as a process, and its page in a headless browser."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

# Seconds for a reply or a start on a busy machine.
PATIENCE = 120


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def eventually(what, so):
    deadline = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@contextlib.contextmanager
def open_webui(connection, folder):
    """Runs Open WebUI with the variables of a connection, and yields its URL."""
    # Requests of its own after each reply would be mistaken for replies that were not stopped.
    settings = {f"ENABLE_{what}_GENERATION": "false" for what in ("TITLE", "TAGS", "FOLLOW_UP")}
    # Its own tools, 6,000 tokens, are for models that call tools.
    settings["DEFAULT_MODEL_METADATA"] = json.dumps({"capabilities": {"builtin_tools": False}})
    offline = {"OFFLINE_MODE": "true", "RAG_EMBEDDING_ENGINE": "openai", "ANONYMIZED_TELEMETRY": "false"}
    home = {"HOME": str(folder), "DATA_DIR": str(folder / "data"), "WEBUI_SECRET_KEY": "none", "WEBUI_AUTH": "false"}
    env = {"PATH": os.environ["PATH"], **connection, **settings, **offline, **home}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).parent / "open-webui"
    with (folder / "log").open("w") as log:
        command = [program, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError):
            return get(f"{url}/health")["status"]

    try:
        eventually("Open WebUI's start", is_ready)
        yield url
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def page(url):
    """A browser's page of an Open WebUI that nobody has used."""
    browsers = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=next(filter(None, browsers), None), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 640})
        page.set_default_timeout(PATIENCE * 1000)
        expect.set_options(timeout=PATIENCE * 1000)
        page.goto(url)
        page.get_by_role("button", name="Okay, Let's Go!").click()
        yield page
        browser.close()
