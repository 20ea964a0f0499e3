"""llama-server and llama-cpp-python's server with the real model, and endpoints in front of them.

scripts/check-upstreams.sh builds both and says where they are; without it these tests are skipped.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

import server

if "BATON_UPSTREAMS" not in os.environ:
    reason = "llama-server and llama-cpp-python are not built here: `make upstreams` builds them and runs this"
    pytest.skip(reason, allow_module_level=True)

BUILT = Path(os.environ["BATON_UPSTREAMS"])
LIBRARIES = BUILT / "build/bin"
SOURCE = BUILT / "source"
# The default model's own template knows no tools, and llama-server then leaves them out, `tool_choice` too.
TOOLS_TEMPLATE = SOURCE / "vendor/llama.cpp/models/templates/Qwen-Qwen2.5-7B-Instruct.jinja"
THINKING_TEMPLATE = SOURCE / "vendor/llama.cpp/models/templates/Qwen-Qwen3-0.6B.jinja"
# Seconds for a server to load the model, and for a reply on a busy machine.
PATIENCE = 120
ASK = [{"role": "user", "content": "What is the capital of France?"}]
JSON = {"content-type": "application/json"}
GREEDY = {"temperature": 0, "max_tokens": 16}


def tool(name, description):
    city = {"type": "string", "enum": ["Paris", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool("get_weather", "The weather of a city.")
TIME = tool("get_time", "The time in a city.")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Upstream:
    """A server on a port of its own, which can be killed and started again there."""

    def __init__(self, command, port, env=None):
        self.root, self.command, self.process = f"http://127.0.0.1:{port}", command, None
        self.env = {**os.environ, "GOMP_SPINCOUNT": "5000", **(env or {})}

    @property
    def v1(self):
        return f"{self.root}/v1"

    def start(self, is_ready=True):
        """Starts the server and, by default, waits until its model answers."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self.command, env=self.env, start_new_session=True, **quiet)
        if is_ready:
            eventually(self.answers, "the upstream's answer", PATIENCE)
        return self

    def answers(self):
        assert self.process.poll() is None, f"{self.command} ended with {self.process.returncode}"
        try:
            urllib.request.urlopen(f"{self.v1}/models", timeout=5).close()
        except urllib.error.HTTPError as refused:
            return refused.code == 401
        except OSError:
            return False
        # llama-server lists its models while it still loads them; the other one has no such route.
        return http(f"{self.root}/health")[0] != 503

    def kill(self):
        """Kills the server and its children. A second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command, port, env=None):
    """Runs a server for the block, in which it may be killed and started again."""
    upstream = Upstream([*command, "--host", "127.0.0.1", "--port", str(port)], port, env)
    try:
        yield upstream.start()
    finally:
        upstream.kill()


def llama_server(*args):
    """llama-server with the default model as `theirs` and two slots of 1024 positions."""
    small = ("--ctx-size", "2048", "--parallel", "2", "--no-kv-unified", "--threads", "1", "--offline")
    command = [str(LIBRARIES / "llama-server"), "--model", gguf(), "--alias", "theirs", *small, *args]
    return running(command, free_port())


def llama_server_of(folder):
    """llama-server with all models of a folder, each in a process that it starts on demand."""
    small = ("--ctx-size", "1024", "--parallel", "1", "--threads", "1", "--offline")
    return running([str(LIBRARIES / "llama-server"), "--models-dir", str(folder), *small], free_port())


def llama_cpp_python(*args):
    """llama-cpp-python's server with the default model as `theirs`."""
    small = ("--n_ctx", "1024", "--n_threads", "1", "--n_threads_batch", "1", "--verbose", "false")
    command = [sys.executable, "-m", "llama_cpp.server", "--model", gguf(), "--model_alias", "theirs", *small, *args]
    # It loads the libraries of llama-server.
    return running(command, free_port(), {"PYTHONPATH": str(SOURCE), "LLAMA_CPP_LIB_PATH": str(LIBRARIES)})


class Node:
    """A node that may be killed."""

    def __init__(self, *args):
        command = [server.BATON, "node", "--listen", "127.0.0.1:0", "--threads", "1", *args]
        env = {**os.environ, "BATON_CLUSTER_KEY": server.CLUSTER_KEY}
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        ready = " is ready on "
        said = next(line for line in self.process.stderr if ready in line)
        self.url = "http://" + said.split(ready)[1].split()[0]
        # The pipe is read to the end, so that the process never blocks on it.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()


@contextlib.contextmanager
def killable_node(*args):
    node = Node(*args)
    try:
        yield node
    finally:
        node.process.kill()
        node.process.wait()


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


@functools.cache
def gguf():
    """The real model's file."""
    return subprocess.run([server.BATON, "pull", "smollm2"], check=True, capture_output=True, text=True).stdout.strip()
