"""Starts the servers of the client tests. BATON names the binary."""

import contextlib
import os
import subprocess
import threading

import pytest

BATON = os.environ["BATON"]
CLUSTER_KEY = "the clients' cluster key"


def need(found, reason):
    """Skips the test, or the whole module, unless something was found. Under CI it fails instead."""
    if not found and os.environ.get("CI"):
        pytest.fail(reason)
    if not found:
        pytest.skip(reason, allow_module_level=True)


@contextlib.contextmanager
def running(*args, output, ready):
    """Runs a process and yields what it printed to `output` until it was ready. The process must stop on SIGTERM."""
    process = subprocess.Popen(
        [BATON, *args], text=True, env={**os.environ, "BATON_CLUSTER_KEY": CLUSTER_KEY}, **{output: subprocess.PIPE}
    )
    try:
        printed = []
        for line in getattr(process, output):
            printed.append(line)
            if ready in line:
                break
        else:
            raise AssertionError(f"{args} ended before it was ready: {''.join(printed)}")
        # Keeps reading, so the process never blocks on a full pipe.
        threading.Thread(target=getattr(process, output).read, daemon=True).start()
        yield "".join(printed)
    finally:
        process.terminate()
        try:
            code = process.wait(timeout=60)
        finally:
            process.kill()
    assert code == 0, f"{args} ended with {code}"


@contextlib.contextmanager
def node(*args):
    """The URL of a node with one compute thread."""
    with running("node", "--listen", "127.0.0.1:0", "--threads", "1", *args, output="stderr", ready=" is ready on ") as said:
        yield "http://" + said.split(" is ready on ")[1].split()[0]


@contextlib.contextmanager
def serve(*args):
    """What an endpoint with both listeners and one compute thread printed when it was ready."""
    listen = ("--listen", "127.0.0.1:0", "--ollama-listen", "127.0.0.1:0")
    with running("serve", *listen, "--threads", "1", *args, output="stdout", ready="Stop with") as said:
        yield said


def base_url(banner):
    return banner.split(" at ")[1].split()[0]


def ollama_url(banner):
    return banner.split("OLLAMA_HOST=")[1].split()[0]
