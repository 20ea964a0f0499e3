#!/usr/bin/env python3
"""Runs clusters of this tree's program and an older commit's, as they are while a cluster is updated machine by machine.

In each of the six mixed clusters an endpoint, a prefill node and a decode node are of one of both versions, and not all of the
same. A long prompt is handed over, and the reply must be that of a cluster of the decode node's version alone. With a model it may differ
where two tokens are nearly as likely: versions that compute a prompt in other steps round differently. Versions that share no version of the
stream protocol must refuse each other by that name (docs/node-streams.md).

Usage: check-mixed.py [COMMIT]        default: the newest tag before HEAD, or the last commit that is a day older than HEAD
OLD=PATH    a program that is built already; BATON=PATH this tree's (default: target/release/baton)
MODEL=FILE  a model for both nodes instead of the simulator
"""
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The longest start of a process, and of the measurements before the first handoff.
START_SECONDS = 120
KEY = "a key for mixed versions"
WORD = "version_mismatch"
# By so many nats a token may be less likely than the one in whose place it is, as in the tests under faults.
NEAR_TIE = 0.3


def git(*args):
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def older_commit(named):
    """The commit to compare with."""
    if named:
        return git("rev-parse", "--verify", f"{named}^{{commit}}")
    try:
        return git("rev-parse", git("describe", "--tags", "--abbrev=0", "HEAD^") + "^{commit}")
    except subprocess.CalledProcessError:
        day_before = int(git("log", "-1", "--format=%ct")) - 86_400
        commit = git("rev-list", "-1", f"--before={day_before}", "HEAD")
        return commit or sys.exit("mixed: there is no older commit: name one")


def built(commit):
    """The older program, built in a worktree of its own, which stays for the next run."""
    folder = ROOT / "target/mixed"
    tree, program = folder / "tree", folder / "build/release/baton"
    marker = folder / "built"
    if program.exists() and marker.exists() and marker.read_text() == commit:
        return program
    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    print(f"mixed: building {commit[:12]} under target/mixed; this takes a while", flush=True)
    git("worktree", "prune")
    if tree.exists():
        subprocess.run(["git", "checkout", "--quiet", "--detach", "--force", commit], cwd=tree, check=True)
    else:
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    env = {**os.environ, "CARGO_TARGET_DIR": str(folder / "build")}
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=tree, env=env, check=True)
    marker.write_text(commit)
    return program


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Cluster:
    """An endpoint, a prefill node and a decode node, each with its own program."""

    def __init__(self, programs, log):
        endpoint, prefill, decode = programs
        model = os.environ.get("MODEL")
        engine = ["--model", model, "--threads", "1"] if model else ["--engine", "sim", "--sim-decode-tps", "500"]
        self.processes = []
        ports = [free_port() for _ in range(3)]
        env = {**os.environ, "BATON_CLUSTER_KEY": KEY, "HOME": log, "XDG_CONFIG_HOME": log, "XDG_STATE_HOME": log}

        def start(program, *args):
            output = open(Path(log) / f"{len(self.processes)}.log", "wb")
            self.processes.append(subprocess.Popen([program, *args], env=env, stdout=output, stderr=output))

        for program, role, port in [(prefill, "prefill", ports[0]), (decode, "decode", ports[1])]:
            start(program, "node", *engine, "--role", role, "--listen", f"127.0.0.1:{port}")
        self.base = f"http://127.0.0.1:{ports[2]}"
        start(endpoint, "serve", "--listen", f"127.0.0.1:{ports[2]}", "--policy", "always_handoff",
              "--prefill", f"http://127.0.0.1:{ports[0]}", "--decode", f"http://127.0.0.1:{ports[1]}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def get(self, path, body=None):
        request = urllib.request.Request(self.base + path, json.dumps(body).encode() if body else None,
                                         {"content-type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as reply:
            return reply.headers, json.load(reply)

    def outcome(self):
        """The text of a reply whose prompt was handed over, or `WORD` if the endpoint or the handoff names different versions."""
        end = time.monotonic() + START_SECONDS
        last = "no answer"
        for attempt in itertools.count():
            if time.monotonic() > end:
                raise SystemExit(f"mixed: no handoff within {START_SECONDS} s: {last}")
            if ended := [process for process in self.processes if process.poll() is not None]:
                raise SystemExit(f"mixed: {ended[0].args[:2]} has ended with {ended[0].returncode}")
            try:
                _, state = self.get("/baton/state")
                if WORD in json.dumps(state["models"]):
                    return WORD
                model = self.get("/v1/models")[1]["data"][0]["id"]
                # Each attempt has a prompt of its own: a cached one is not handed over. The question is the same.
                text = f"Note {attempt}. " + " ".join(f"Fact {i}: box {i} holds {i * 7 % 93} marbles." for i in range(100))
                headers, reply = self.get("/v1/chat/completions", {
                    "model": model, "max_tokens": 24, "temperature": 0, "seed": 1,
                    "messages": [{"role": "user", "content": text}]})
                handoff = reply.get("timings", {}).get("handoff") or {}
                last = f"{headers.get('x-baton-route')}: {json.dumps(handoff)}"
                if handoff.get("failure") == WORD:
                    return WORD
                if handoff and not handoff.get("failure"):
                    return self.fixed_reply(model)
            except (urllib.error.URLError, ConnectionError, KeyError, IndexError, TimeoutError) as error:
                last = str(error)
            time.sleep(0.3)

    def fixed_reply(self, model):
        """The text and the tokens with their likelihoods of a reply to a prompt that is the same in all clusters. It is handed over as
        the one before was."""
        text = "A fixed question. " + " ".join(f"Line {i}: number {i * 13 % 101}." for i in range(100))
        headers, reply = self.get("/v1/chat/completions", {
            "model": model, "max_tokens": 24, "temperature": 0, "seed": 1, "logprobs": True, "top_logprobs": 5,
            "messages": [{"role": "user", "content": text}]})
        route = headers.get("x-baton-route") or ""
        if not route.startswith("handoff"):
            raise SystemExit(f"mixed: the fixed prompt was not handed over: {route}")
        choice = reply["choices"][0]
        return choice["message"]["content"], (choice.get("logprobs") or {}).get("content") or []


def margin(got, expected):
    """By how many nats the first other token is less likely than the expected one: 0 for the same reply."""
    if got[0] == expected[0]:
        return 0.0
    for one, other in zip(got[1], expected[1]):
        if one["token"] != other["token"]:
            likely = {token["token"]: token["logprob"] for token in other["top_logprobs"]}
            return other["logprob"] - likely.get(one["token"], float("-inf"))
    # One of both ends before the other, or nothing says how likely a token was.
    return float("inf")


def run(versions, programs):
    with tempfile.TemporaryDirectory() as log:
        try:
            with Cluster([programs[version] for version in versions], log) as cluster:
                return cluster.outcome()
        except SystemExit:
            for file in sorted(Path(log).glob("*.log")):
                print(f"--- {file.name}\n" + file.read_text(errors="replace")[-2_000:], file=sys.stderr)
            raise


def main():
    new = Path(os.environ.get("BATON", ROOT / "target/release/baton"))
    old = Path(os.environ["OLD"]) if os.environ.get("OLD") else built(older_commit(sys.argv[1] if len(sys.argv) > 1 else None))
    programs = {"new": new.resolve(strict=True), "old": old.resolve(strict=True)}
    for version, program in programs.items():
        print(f"mixed: {version}: {subprocess.check_output([program, '--version'], text=True).strip()}", flush=True)
    expected = {version: run([version] * 3, programs) for version in programs}
    if WORD in expected.values():
        sys.exit("mixed: a cluster of one version refuses itself")
    outcomes = {}
    for versions in itertools.product(programs, repeat=3):
        if len(set(versions)) == 1:
            continue
        endpoint, prefill, decode = versions
        outcome = outcomes[versions] = run(versions, programs)
        apart = 0.0 if outcome == WORD else margin(outcome, expected[decode])
        same = "the same reply" if apart == 0 else f"another reply after two tokens that are {apart:.3f} nats apart"
        print(f"mixed: endpoint {endpoint}, prefill {prefill}, decode {decode}: "
              + ("the versions refuse each other" if outcome == WORD else same), flush=True)
        # The simulator does not round.
        if apart > (NEAR_TIE if os.environ.get("MODEL") else 0):
            sys.exit(f"mixed: {outcome[0]!r} instead of {expected[decode][0]!r}")
    refused = [versions for versions, outcome in outcomes.items() if outcome == WORD]
    if refused and len(refused) < len(outcomes):
        sys.exit("mixed: the versions refuse each other in some of the clusters only")
    if refused:
        sys.exit("mixed: the versions share no version of the protocol: say so in docs/node-streams.md before a release")


if __name__ == "__main__":
    main()
