"""vLLM servers on the processor. scripts/check-vllm.sh says where the model is, and runs these tests in a network of its own."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fronts import eventually, metric

if "VLLM_MODEL" not in os.environ:
    reason = "vLLM is not installed here: `make vllm` installs it and runs this"
    pytest.skip(reason, allow_module_level=True)

PACKAGE = Path(__file__).parents[3] / "packaging" / "vllm"
# A start takes about a minute on two quiet cores.
START_SECONDS = int(os.environ.get("START_SECONDS", "400"))
MAX_CONTEXT = 4096
ports = itertools.count(8000)
side_channels = itertools.count(5600)

NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


class Vllm:
    """A server of this model, or of VLLM_MODEL. `transfer` is its --kv-transfer-config."""

    def __init__(self, folder, transfer=None, *args, model=None, **env):
        self.port = next(ports)
        self.root = f"http://127.0.0.1:{self.port}"
        self.v1 = f"{self.root}/v1"
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(side_channels)),
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
        }
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model or os.environ["VLLM_MODEL"], "--served-model-name", "theirs"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--dtype", "bfloat16"),
            *("--max-model-len", str(MAX_CONTEXT), "--max-num-batched-tokens", "512"),
            *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
            *args,
        ]
        self.log = folder / f"{self.port}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=env, start_new_session=True, stdout=log, stderr=log)

    def wait(self):
        def answers():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.root}/health", timeout=5):
                return True

        eventually(answers, "vLLM's start", START_SECONDS)
        return self

    def metric(self, name, **labels):
        return metric(self.root, f"vllm:{name}", **labels)

    def prompt_tokens(self, source):
        """Tokens of prompts that came from `local_compute`, `local_cache_hit` or `external_kv_transfer`."""
        return self.metric("prompt_tokens_by_source_total", source=source)

    def n_running(self):
        return self.metric("num_requests_running")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(*servers):
    """Servers that start at the same time."""
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
