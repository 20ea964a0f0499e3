"""Agents do a task with Baton: they ask an MCP server for a code word and write it into a file.

Each does it twice: in front of a scripted upstream, and on Baton's own engine with a scripted model. The agents are on PATH.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import server
from script import MODEL, Script, Turn, call
from upstream import playing

HERE = Path(__file__).parent
TASK = "Ask the tool code_word for the code word of Paris and put it into notes.txt instead of TODO."
DONE = "The code word is in notes.txt."
# Seconds for a task on a busy machine.
PATIENCE = 180


class Project:
    """A folder with a file to edit, a home of its own for the agent, and an MCP server."""

    def __init__(self, folder):
        self.folder, self.home, self.calls = folder / "project", folder / "home", folder / "calls"
        self.folder.mkdir()
        self.home.mkdir()
        self.notes.write_text("The code word is TODO.\n")
        subprocess.run(["git", "init", "-q", self.folder], check=True)
        self.mcp = [sys.executable, str(HERE / "mcp_server.py"), str(self.calls)]

    @property
    def notes(self):
        return self.folder / "notes.txt"

    def run(self, *command, **env):
        """What the agent printed. Only PATH comes from this environment, so no key or setting of the user does."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": str(self.home), "NO_COLOR": "1", "CI": "true", **env}
        ran = subprocess.run(
            command, cwd=self.folder, env=env, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, capture_output=True
        )
        said = ran.stdout + ran.stderr
        assert ran.returncode == 0, said
        return said

    def is_done(self, said):
        """Fails unless the file was edited, and by a model that has seen the result of the MCP tool's call."""
        calls = self.calls.read_text() if self.calls.exists() else "no call"
        assert calls == '{"city": "Paris"}\n', said
        assert self.notes.read_text() == "The code word is heron.\n", said
        assert DONE in said


@pytest.fixture
def project(request, tmp_path, record_property):
    """The project, with the version of the test's tool in the report."""
    project = Project(tmp_path)
    program = request.node.get_closest_marker("program").args[0]
    version = re.search(r"\d+\.\d+\.\d+", project.run(program, "--version"))[0]
    record_property("version", f"{program} {version}")
    return project


@pytest.fixture(params=["upstream", "engine"])
def baton(request, tmp_path):
    """Starts an endpoint that plays a script, and gives its URL without /v1."""
    stack = contextlib.ExitStack()

    def start(script):
        if request.param == "engine":
            model = tmp_path / "scripted.gguf"
            script.write_model(model)
            args = ("--model", str(model), "--name", MODEL, "--ctx-size", "131072", "--slots", "2", "--threads", "1")
        else:
            url = stack.enter_context(playing(script))
            config = tmp_path / "baton.toml"
            config.write_text(f'[[upstream]]\nname = "scripted"\nkind = "openai"\nurl = "{url}"\n')
            args = ("--config", str(config))
        serve = server.running("serve", "--listen", "127.0.0.1:0", *args, output="stdout", ready="Stop with")
        return server.base_url(stack.enter_context(serve)).removesuffix("/v1")

    with stack:
        yield start


@pytest.mark.program("codex")
def test_codex(baton, project):
    patch = "*** Begin Patch\n*** Update File: notes.txt\n@@\n-The code word is TODO.\n+The code word is heron.\n*** End Patch"
    script = Script([call("mcp__demo__code_word", city="Paris"), call("apply_patch", input=patch), Turn(DONE)])
    url = baton(script)
    # Codex offers apply_patch to models whose catalogue entry says so.
    home = project.home / ".codex"
    home.mkdir()
    entries = json.loads(project.run("codex", "debug", "models").splitlines()[0])["models"]
    entry = next(entry for entry in entries if entry["apply_patch_tool_type"] and not entry.get("tool_mode"))
    entry.update(slug=MODEL, display_name=MODEL, supports_search_tool=False)
    catalogue = home / "models.json"
    catalogue.write_text(json.dumps({"models": [entry]}))
    (home / "config.toml").write_text(
        f"""
model = "{MODEL}"
model_provider = "baton"
model_context_window = 65536
model_catalog_json = "{catalogue}"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.baton]
name = "Baton"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "BATON_API_KEY"

[mcp_servers.demo]
command = {json.dumps(project.mcp[0])}
args = {json.dumps(project.mcp[1:])}
"""
    )
    project.is_done(project.run("codex", "exec", TASK, BATON_API_KEY="none"))


@pytest.mark.program("claude")
def test_claude_code(baton, project):
    notes = str(project.notes)
    script = Script([
        call("ToolSearch", query="select:mcp__demo__code_word", max_results=5),
        call("mcp__demo__code_word", city="Paris"),
        call("Read", file_path=notes),
        call("Edit", file_path=notes, old_string="TODO", new_string="heron"),
        Turn(DONE),
    ])
    url = baton(script)
    servers = {"demo": {"command": project.mcp[0], "args": project.mcp[1:]}}
    allowed = "mcp__demo__code_word,Read,Edit"
    command = ["claude", "--model", MODEL, "--mcp-config", json.dumps({"mcpServers": servers}), "--allowedTools", allowed]
    said = project.run(
        *command,
        "-p",
        TASK,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    project.is_done(said)


@pytest.mark.program("opencode")
def test_opencode(baton, project):
    notes = str(project.notes)
    script = Script([
        call("demo_code_word", city="Paris"),
        call("read", filePath=notes),
        call("edit", filePath=notes, oldString="TODO", newString="heron"),
        Turn(DONE),
    ])
    url = baton(script)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": 65536, "output": 8192}}},
    }
    config = {
        "model": f"baton/{MODEL}",
        "provider": {"baton": provider},
        "mcp": {"demo": {"type": "local", "command": project.mcp}},
        "autoupdate": False,
        "share": "disabled",
        "lsp": False,
    }
    (project.folder / "opencode.json").write_text(json.dumps(config))
    project.is_done(project.run("opencode", "run", TASK))


@pytest.mark.program("qwen")
def test_qwen_code(baton, project):
    notes = str(project.notes)
    script = Script([
        # Qwen Code offers the tools of MCP servers through one of its own.
        call("tool_call", name="mcp__demo__code_word", arguments={"city": "Paris"}),
        call("read_file", file_path=notes),
        call("edit", file_path=notes, old_string="TODO", new_string="heron"),
        Turn(DONE),
    ])
    url = baton(script)
    home = project.home / ".qwen"
    home.mkdir()
    servers = {"demo": {"command": project.mcp[0], "args": project.mcp[1:]}}
    (home / "settings.json").write_text(json.dumps({"mcpServers": servers, "privacy": {"usageStatisticsEnabled": False}}))
    said = project.run(
        "qwen", "--yolo", "-p", TASK, OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY="none", OPENAI_MODEL=MODEL
    )
    project.is_done(said)


@pytest.mark.program("aider")
def test_aider(baton, project):
    """aider calls no tools: it reads files out of the reply."""
    url = baton(Script([], without_tools="notes.txt\n```\nThe code word is heron.\n```\n"))
    project.run(
        "aider",
        f"--model=openai/{MODEL}",
        "--yes-always",
        "--no-auto-commits",
        "--no-show-model-warnings",
        "--no-check-update",
        "--analytics-disable",
        "--message=Put heron instead of TODO.",
        "notes.txt",
        OPENAI_API_BASE=f"{url}/v1",
        OPENAI_API_KEY="none",
    )
    assert project.notes.read_text() == "The code word is heron.\n"


@pytest.mark.program("promptfoo")
def test_promptfoo(baton, project):
    """promptfoo calls the MCP tool and judges its result."""
    url = baton(Script([call("code_word", city="Paris")]))
    server = {"name": "demo", "command": project.mcp[0], "args": project.mcp[1:]}
    config = {"apiBaseUrl": f"{url}/v1", "apiKey": "none", "mcp": {"enabled": True, "server": server}}
    evaluation = {
        "providers": [{"id": f"openai:chat:{MODEL}", "config": config}],
        "prompts": ["What is the code word of {{city}}?"],
        "tests": [{"vars": {"city": "Paris"}, "assert": [{"type": "contains", "value": "is heron"}]}],
    }
    (project.folder / "promptfooconfig.yaml").write_text(json.dumps(evaluation))
    project.run("promptfoo", "eval", "--no-cache", PROMPTFOO_DISABLE_TELEMETRY="1", PROMPTFOO_DISABLE_UPDATE="1")
    assert project.calls.read_text() == '{"city": "Paris"}\n'
