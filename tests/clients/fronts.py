"""Endpoints in front of other servers, and what their tests share."""

import contextlib
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request

from openai import OpenAI

import server

# Seconds for a server to load the model, and for a reply on a busy machine.
PATIENCE = int(os.environ.get("PATIENCE", "120"))
JSON = {"content-type": "application/json"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Front:
    """An endpoint in front of upstreams."""

    def __init__(self, banner):
        self.v1, self.ollama = server.base_url(banner), server.ollama_url(banner)
        self.root = self.v1.removesuffix("/v1")

    def client(self):
        return client(self.v1)

    def state(self):
        return http(f"{self.root}/baton/state")[1]


@contextlib.contextmanager
def front(tmp_path, config, *args):
    """An endpoint with this configuration."""
    file = tmp_path / "baton.toml"
    file.write_text(config)
    listen = ("--listen", "127.0.0.1:0", "--ollama-listen", "127.0.0.1:0")
    with server.running("serve", *listen, "--config", str(file), *args, output="stdout", ready="Stop with") as banner:
        yield Front(banner)


def entry(upstream, kind, name="one", models='{ smol = "theirs" }', more=""):
    """An upstream in a configuration."""
    models = f"models = {models}\n" if models else ""
    return f'[[upstream]]\nname = "{name}"\nkind = "{kind}"\nurl = "{upstream.root}"\n{models}{more}\n'


def client(url, key="none"):
    return OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)


def http(url, body=None):
    """The status and the JSON of a reply."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, JSON), timeout=PATIENCE) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def http_or_text(url, body=None):
    """The status, the headers and the text of a reply: not every error of another server is JSON."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, JSON), timeout=PATIENCE) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, refused.read().decode()


def metric(root, name, **labels):
    """The sum of a metric of the server at `root`, over all series with these labels."""
    with urllib.request.urlopen(f"{root}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    series = [line for line in lines if re.match(rf"{name}(\{{|\s)", line)]
    wanted = [line for line in series if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


def eventually(holds, what, seconds=30):
    """Waits until something holds; returns how many seconds that took."""
    begun = time.monotonic()
    while not (value := holds()):
        assert time.monotonic() - begun < seconds, f"{what} did not come in {seconds} s: {value}"
        time.sleep(0.05)
    return time.monotonic() - begun


def raw_stream(url, body):
    """The events of a streamed reply as they come, also of one that is cut off."""
    request = urllib.request.Request(url, json.dumps({**body, "stream": True}).encode(), JSON)
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        for line in reply:
            if line.startswith(b"data: "):
                yield line[6:].strip().decode()


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
