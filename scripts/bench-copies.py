#!/usr/bin/env python3
"""Fetches a model once from a hub and copies it to two other machines, on links shaped by tc; prints the table of docs/results/machine-models.md.

    scripts/bench-copies.py

The machines are three network namespaces behind a bridge. Each copy stands beside a plain one: a program that sends the file into a
socket and one that writes what it reads, on the same link. Wrong bytes, or a second download, are errors. Linux, with ip and tc; as
another user than root, with user namespaces.

    BATON    the binary (default: target/release/baton)
    MIB      the size of the model (512)
    ROUNDS   copies of each kind on each link (3)
    FOLDER   where the machines' folders are (default: /dev/shm, so that no disk is measured)
"""

import contextlib
import hashlib
import http.server
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

BATON = os.environ.get("BATON", "target/release/baton")
SIZE = int(os.environ.get("MIB", "512")) << 20
ROUNDS = int(os.environ.get("ROUNDS", "3"))
LINKS = ("1gbit", "2.5gbit")
MODEL, FILE = "me/one:a-Q4_0.gguf", "a-Q4_0.gguf"
KEY = "bench-" + os.urandom(16).hex()
MACHINES = ("endpoint", "spark", "mac")
HERE = "10.78.0.254"
INSIDE = "BATON_BENCH_COPIES"
PATIENCE = 300


def address(machine):
    return f"10.78.0.{MACHINES.index(machine) + 1}"


def ip(line):
    subprocess.run(["ip", *line.split()], check=True)


def on(machine, *command, **options):
    return subprocess.Popen(["ip", "netns", "exec", machine, *command], **options)


def network():
    ip("link set lo up")
    ip("link add br0 type bridge")
    ip(f"addr add {HERE}/24 dev br0")
    ip("link set br0 up")
    for machine in MACHINES:
        ip(f"netns add {machine}")
        ip(f"link add {machine} type veth peer name eth0 netns {machine}")
        ip(f"link set {machine} master br0 up")
        ip(f"-n {machine} link set lo up")
        ip(f"-n {machine} addr add {address(machine)}/24 dev eth0")
        ip(f"-n {machine} link set eth0 up")


def shape(machine, rate):
    """Bounds what the machine sends."""
    tbf = f"qdisc replace dev eth0 root tbf rate {rate} burst 2mb latency 50ms"
    subprocess.run(["ip", "netns", "exec", machine, "tc", *tbf.split()], check=True)


def hub(path):
    """A hub with one file. Its `n_sent` counts the bytes of the file."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if "/api/models/" in self.path:
                body = json.dumps({"sha": "c0ffee", "siblings": [{"rfilename": FILE, "size": SIZE}]}).encode()
                self.answer(len(body))
                self.wfile.write(body)
                return
            self.answer(SIZE)
            # Whoever looks at the head alone hangs up.
            with path.open("rb") as file, contextlib.suppress(ConnectionError):
                while piece := file.read(1 << 20):
                    self.wfile.write(piece)
                    serving.n_sent += len(piece)

        def answer(self, n_bytes):
            self.send_response(200)
            self.send_header("Content-Length", str(n_bytes))
            self.end_headers()

        def log_message(self, *_):
            pass

    serving = http.server.ThreadingHTTPServer((HERE, 0), Hub)
    serving.n_sent = 0
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    return serving


def ask(method, path, body=None):
    request = urllib.request.Request(f"http://{address('endpoint')}:8080{path}", method=method)
    request.add_header("Authorization", f"Bearer {KEY}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def ordered(**order):
    """Returns when it was ordered."""
    began = time.monotonic()
    try:
        ask("POST", "/baton/models", order)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{order}: {error.code} {error.read().decode()}") from error
    return began


def listed():
    return {each["machine"] for each in ask("GET", "/baton/models")["machines"] if each.get("folder")}


def transfer(machine):
    machines = ask("GET", "/baton/models")["machines"]
    return next(each for each in machines if each["machine"] == machine)["folder"].get("transfer") or {}


def followed(machine, began):
    """Seconds until all bytes of the transfer have come, and until the file is verified and has its name."""
    came = None
    while True:
        state = transfer(machine)
        now = time.monotonic() - began
        if came is None and state.get("done_bytes") == SIZE:
            came = now
        if state.get("state") == "done":
            return came or now, now
        if state.get("state") not in ("preparing", "receiving") or now > PATIENCE:
            raise SystemExit(f"the transfer to {machine} ended: {state}")
        time.sleep(0.01)


def sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SENDER = """
import socket, sys
listener = socket.create_server(("0.0.0.0", 9009))
print("ready", flush=True)
with listener.accept()[0] as connection, open(sys.argv[1], "rb") as file:
    connection.sendfile(file)
"""
RECEIVER = """
import socket, sys, time
piece = memoryview(bytearray(1 << 20))
began = time.monotonic()
with socket.create_connection((sys.argv[1], 9009)) as connection, open(sys.argv[2], "wb", buffering=0) as file:
    while n := connection.recv_into(piece):
        file.write(piece[:n])
print(time.monotonic() - began)
"""


def plain(source, target):
    """Seconds of a copy by a plain socket from spark to mac."""
    sender = on("spark", sys.executable, "-c", SENDER, str(source), stdout=subprocess.PIPE)
    try:
        sender.stdout.readline()
        receiver = on("mac", sys.executable, "-c", RECEIVER, address("spark"), str(target), stdout=subprocess.PIPE, text=True)
        took, _ = receiver.communicate(timeout=PATIENCE)
        if receiver.returncode != 0:
            raise SystemExit("a plain copy failed")
    finally:
        sender.kill()
        sender.wait()
    if target.stat().st_size != SIZE:
        raise SystemExit("a plain copy is short")
    target.unlink()
    return float(took)


def started(machine, folder, hub_url, *args):
    env = dict(os.environ, BATON_CACHE=str(folder), BATON_CLUSTER_KEY=KEY, HF_ENDPOINT=hub_url)
    log = (folder.parent / f"{machine}.log").open("w")
    return on(machine, BATON, *args, "--allow-plain-http", env=env, stdout=log, stderr=log)


def eventually(what, so):
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            if so():
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"not within a minute: {what}")
        time.sleep(0.2)


def measure(work):
    source = work / "model"
    with source.open("wb") as file:
        rng = random.Random(48)
        file.writelines(rng.randbytes(1 << 20) for _ in range(SIZE >> 20))
    right = sha256(source)
    shop = hub(source)
    hub_url = f"http://{HERE}:{shop.server_port}"
    folders = {machine: work / machine / "models" for machine in MACHINES}
    for folder in folders.values():
        folder.mkdir(parents=True)
    nodes = [
        started(machine, folders[machine], hub_url, "node", "--engine", "sim", "--listen", "0.0.0.0:9000")
        for machine in ("spark", "mac")
    ]
    urls = [part for machine in ("spark", "mac") for part in ("--decode", f"http://{address(machine)}:9000")]
    options = ("--no-calibration", "--allow-model-management", "--api-key", KEY, "--state-folder", "")
    endpoint = started("endpoint", folders["endpoint"], hub_url, "serve", *urls, *options, "--listen", "0.0.0.0:8080")
    names = {"spark": "decode-1", "mac": "decode-2", "endpoint": "local"}

    def copied(machine):
        order = {"action": "copy", "model": MODEL, "from": names["spark"], "to": names[machine]}
        return followed(names[machine], ordered(**order))

    def delivered(machine):
        file = folders[machine] / "hub/me/one" / FILE
        if sha256(file) != right:
            raise SystemExit(f"the file on {machine} is wrong")

    try:
        eventually("both nodes", lambda: set(names.values()) <= listed())
        followed(names["spark"], ordered(action="pull", model=MODEL, on=names["spark"]))
        delivered("spark")
        rows = []
        for link in LINKS:
            shape("spark", link)
            alone, copies, whole = [], [], []
            for _ in range(ROUNDS):
                alone.append(plain(folders["spark"] / "hub/me/one" / FILE, work / "plain"))
                came, done = copied("mac")
                copies.append(came)
                whole.append(done)
                delivered("mac")
                ordered(action="delete", model=MODEL, on=names["mac"])
            rows.append((link, *map(statistics.median, (alone, copies, whole))))
        # And once more, to the second machine.
        for machine in ("mac", "endpoint"):
            copied(machine)
            delivered(machine)
        # A look at the head has a few megabytes in its sockets.
        if not SIZE <= shop.n_sent < SIZE + (32 << 20):
            raise SystemExit(f"the hub sent {shop.n_sent} bytes")
    except BaseException:
        for log in sorted(work.glob("*/*.log")):
            sys.stderr.write(f"{log.name}: {''.join(log.read_text().splitlines(keepends=True)[-5:])}\n")
        raise
    finally:
        for process in (endpoint, *nodes):
            process.terminate()
        for process in (endpoint, *nodes):
            process.wait()
    return rows


def report(rows):
    print(f"{SIZE >> 20} MiB, downloaded once ({SIZE:,} bytes left the hub), then copied between machines; medians of {ROUNDS}:\n")
    print("| link | plain socket | copy, until the last byte | of the plain rate | until verified |")
    print("|---|---|---|---|---|")
    for link, alone, came, done in rows:
        gigabits = [SIZE * 8e-9 / seconds for seconds in (alone, came)]
        label = re.sub("gbit", " Gb/s", link)
        print(f"| {label} | {gigabits[0]:.2f} Gb/s | {gigabits[1]:.2f} Gb/s | {alone / came:.2f} | {alone / done:.2f} |")


def main():
    if INSIDE not in os.environ:
        user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        inside = 'mount -t tmpfs tmpfs /run && exec "$0" "$@"'
        unshare = ["unshare", *user, "--net", "--mount", "--fork", "--kill-child", "sh", "-c", inside, sys.executable, __file__]
        raise SystemExit(subprocess.run(unshare, env=dict(os.environ, **{INSIDE: "1"})).returncode)
    network()
    with tempfile.TemporaryDirectory(dir=os.environ.get("FOLDER", "/dev/shm")) as work:
        report(measure(Path(work)))


main()
