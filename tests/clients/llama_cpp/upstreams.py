"""llama-server and llama-cpp-python's server with the real model, and endpoints in front of them.

scripts/check-upstreams.sh builds both and says where they are; without it these tests are skipped.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import server
from fronts import PATIENCE, client, entry, eventually, free_port, front, http, raw_stream, text_of  # noqa: F401

if "BATON_UPSTREAMS" not in os.environ:
    reason = "llama-server and llama-cpp-python are not built here: `make upstreams` builds them and runs this"
    pytest.skip(reason, allow_module_level=True)

BUILT = Path(os.environ["BATON_UPSTREAMS"])
LIBRARIES = BUILT / "build/bin"
SOURCE = BUILT / "source"
# The default model's own template knows no tools, and llama-server then leaves them out, `tool_choice` too.
TOOLS_TEMPLATE = SOURCE / "vendor/llama.cpp/models/templates/Qwen-Qwen2.5-7B-Instruct.jinja"
THINKING_TEMPLATE = SOURCE / "vendor/llama.cpp/models/templates/Qwen-Qwen3-0.6B.jinja"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
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


@functools.cache
def gguf():
    """The real model's file."""
    return subprocess.run([server.BATON, "pull", "smollm2"], check=True, capture_output=True, text=True).stdout.strip()
