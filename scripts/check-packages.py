#!/usr/bin/env python3
"""Packs a ready program, then installs, runs, upgrades and removes each package in bare Debians, and times it. Needs root.

    scripts/check-packages.py [FOLDER]      default: target/portable/dist, which `make portable` fills

SUITES names the systems (default: bookworm trixie). INSTALL_PAGE=docs/install.md gets the table. Bare means debootstrap's
smallest: no toolchain, no Python, no model. The systems share this machine's network and nothing else; each package gets a copy
that is thrown away.
"""

import datetime
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "target/packages"
NAMES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
REQUEST = {"model": "smollm2", "stream": True, "temperature": 0, "messages": [{"role": "user", "content": "Count from one to fifty."}]}
# What a package manager keeps of every package.
KEPT = ("var/lib/dpkg/", "var/lib/apt/", "var/cache/", "var/log/", "tmp/", "dev/", "proc/", "sys/", "run/", "etc/ld.so.cache", "var/lib/systemd/")


class System:
    """A bare Debian, of which a layer above takes every change. Leaving it throws the changes away."""

    def __init__(self, suite):
        self.suite, self.name = suite, NAMES.get(suite, suite)
        self.bare = OUT / "roots" / suite
        if not (self.bare / ".complete").exists():
            print(f"packages: {self.name} goes to {self.bare.relative_to(ROOT)}", flush=True)
            subprocess.run([ROOT / "scripts/debian-root.sh", suite, self.bare], check=True)
            (self.bare / ".complete").touch()

    def __enter__(self):
        self.layers = Path(tempfile.mkdtemp(prefix=f"baton-{self.suite}-"))
        # In memory: a container's own file system is such a layer, and cannot carry another.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6g", "tmpfs", self.layers], check=True)
        for name in ("upper", "work", "root"):
            (self.layers / name).mkdir()
        self.root = self.layers / "root"
        options = f"lowerdir={self.bare},upperdir={self.layers}/upper,workdir={self.layers}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.root], check=True)
        for name in ("proc", "dev", "sys"):
            subprocess.run(["mount", "--rbind", f"/{name}", self.root / name], check=True)
            subprocess.run(["mount", "--make-rslave", self.root / name], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.root / "run"], check=True)
        (self.root / "packages").mkdir()
        # Which index pip asks here.
        if Path("/etc/pip.conf").exists():
            shutil.copy("/etc/pip.conf", self.root / "etc/pip.conf")
        self.programs = []
        return self

    def __exit__(self, *_):
        for program in self.programs:
            if program.poll() is None:
                program.kill()
                program.wait()
        subprocess.run(["umount", "--recursive", "--lazy", self.layers], check=True)
        self.layers.rmdir()

    def environment(self):
        own = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return {"PATH": "/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8",
                "DEBIAN_FRONTEND": "noninteractive", "BATON_CACHE": "/models", **own}

    def run(self, command):
        """Runs a command line. Returns its output and its seconds."""
        began = time.monotonic()
        ran = subprocess.run(
            ["chroot", self.root, "sh", "-ec", command], env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800,
        )
        if ran.returncode != 0:
            sys.exit(f"packages: on {self.name}, `{command}` ended with {ran.returncode}:\n{ran.stdout[-4000:]}")
        return ran.stdout, time.monotonic() - began

    def start(self, command):
        log = (self.layers / "log").open("a")
        # `exec`, so that a signal reaches the program.
        program = subprocess.Popen(["chroot", self.root, "sh", "-c", f"exec {command}"], env=self.environment(),
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.programs.append(program)
        return program

    def log(self):
        return (self.layers / "log").read_text()[-4000:]

    def files(self):
        found = subprocess.run(["find", self.root, "-xdev", "-not", "-type", "d", "-printf", "%P\\n"], check=True, stdout=subprocess.PIPE, text=True)
        return {line for line in found.stdout.splitlines() if not line.startswith(KEPT) and "__pycache__" not in line}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def stream(port, n_tokens, on_token=lambda: None, **more):
    """Streams one reply. Returns its text and its finish reason; a reply that breaks off raises."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps({**REQUEST, "max_tokens": n_tokens, **more}), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ConnectionError(f"{response.status}: {response.read()[:300]}")
    text, reason = "", None
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ConnectionError(f"the stream ended with {event['error']} after {len(text)} characters")
        choice = event["choices"][0]
        if choice["delta"].get("content"):
            text += choice["delta"]["content"]
            on_token()
        reason = choice.get("finish_reason") or reason
    return text, reason


def first_token(system, program, port, deadline=600):
    """The seconds until a started endpoint has sent its first token."""
    began = time.monotonic()
    at = []
    while time.monotonic() - began < deadline:
        if program.poll() is not None:
            sys.exit(f"packages: on {system.name}, baton ended with {program.returncode}:\n{system.log()}")
        try:
            stream(port, 4, lambda: at.append(time.monotonic()))
            return at[0] - began
        except (ConnectionError, OSError):
            time.sleep(0.05)
    sys.exit(f"packages: on {system.name}, no token came in {deadline} s:\n{system.log()}")


def stop(program):
    program.send_signal(signal.SIGTERM)
    program.wait(timeout=60)


def serve_twice(system):
    """The seconds from the command to a token: with the download of the default model, and with the model there."""
    seconds = []
    for _ in range(2):
        port = free_port()
        program = system.start(f"baton serve --listen 127.0.0.1:{port}")
        seconds.append(first_token(system, program, port))
        stop(program)
    return seconds


# Stands in for systemd, which needs a machine of its own: what the package asks of it, it does to one process.
SERVICE = """#!/bin/sh
echo "$0 $*" >> /run/asked
case $* in *"try-restart baton.service"*) ;; *) exit 0 ;; esac
kill -TERM "$(cat /run/baton.pid)"
while kill -0 "$(cat /run/baton.pid)" 2>/dev/null; do sleep 0.05; done
touch /run/stopped
"""


def upgrade_under_a_stream(system, port, install):
    """Upgrades while a reply streams. The reply must end as it would have."""
    # Where apt looks for programs; a bare system has the first one.
    tools = [system.root / "usr/bin" / name for name in ("deb-systemd-invoke", "systemctl")]
    original = tools[0].read_text()
    for tool in tools:
        tool.write_text(SERVICE)
        tool.chmod(0o755)
    (system.root / "run/systemd/system").mkdir(parents=True)
    program = system.start(f"baton serve --listen 127.0.0.1:{port}")
    first_token(system, program, port)
    (system.root / "run/baton.pid").write_text(f"{program.pid}\n")
    # A reply of 12 s: longer than the installation, and short enough for the 30 s that running streams have.
    began = time.monotonic()
    stream(port, 100, ignore_eos=True)
    n_tokens = int(100 * 12 / (time.monotonic() - began))
    long = lambda on_token=lambda: None: stream(port, n_tokens, on_token, ignore_eos=True)
    expected = long()
    got, begun, at = [], threading.Event(), []

    def on_token():
        begun.set()
        at.append(time.time())

    def read():
        try:
            got.append(long(on_token))
        except ConnectionError as problem:
            got.append(problem)

    client = threading.Thread(target=read)
    client.start()
    begun.wait(timeout=60)
    # The stand-in waits for the process, whose parent is here.
    reaper = threading.Thread(target=program.wait)
    reaper.start()
    seconds = system.run(install)[1]
    client.join(timeout=60)
    reaper.join(timeout=60)
    assert got == [expected] and expected[1] == "length", f"the stream of the upgrade: {got}\nwithout: {expected}\n{system.log()}"
    asked, stopped = system.root / "run/asked", system.root / "run/stopped"
    assert stopped.exists(), "the package asked for no restart"
    assert at[-1] > asked.stat().st_mtime, "the reply had ended before the package asked for the restart: no test of it"
    tools[0].write_text(original)
    tools[1].unlink()
    shutil.rmtree(system.root / "run/systemd")
    program = system.start(f"baton serve --listen 127.0.0.1:{port}")
    first_token(system, program, port)
    stop(program)
    return seconds


def check_left(system, before, what):
    left = {file for file in system.files() - before if "baton" in file and not file.startswith(("models/", "packages/"))}
    assert not left, f"on {system.name}, {what} leaves {sorted(left)}"


def check_deb(suite, older, newer):
    with System(suite) as system:
        for package in (older, newer):
            shutil.copy(package, system.root / "packages")
        # Before it, so that only this package's traces are looked for.
        before = system.files()
        install = f"apt-get install -y --no-install-recommends /packages/{older.name} ca-certificates python3-pip"
        installing = system.run(install)[1]
        system.run("baton check-config /etc/baton/baton.toml && test -e /usr/share/man/man1/baton.1.gz")
        first, second = serve_twice(system)
        system.run("echo '# mine' >> /etc/baton/baton.toml")
        upgrading = upgrade_under_a_stream(system, free_port(), f"apt-get install -y --no-install-recommends /packages/{newer.name}")
        system.run("grep -q '# mine' /etc/baton/baton.toml")
        removing = system.run("apt-get purge -y baton-serve")[1]
        check_left(system, before, "apt-get purge")
        command = f"apt install --no-install-recommends ./{re.sub('_.*_', '_…_', older.name)} ca-certificates python3-pip"
        return [system.name, ".deb", command, installing, first, second, upgrading, removing]


def check_wheel(suite, older, newer):
    with System(suite) as system:
        for package in (older, newer):
            shutil.copy(package, system.root / "packages")
        system.run("apt-get install -y --no-install-recommends ca-certificates pipx")
        before = system.files()
        installing = system.run(f"pipx install /packages/{older.name}")[1]
        first, second = serve_twice(system)
        upgrading = system.run(f"pipx install --force /packages/{newer.name}")[1]
        program = system.start(f"baton serve --listen 127.0.0.1:{(port := free_port())}")
        first_token(system, program, port)
        stop(program)
        removing = system.run("pipx uninstall baton-serve")[1]
        check_left(system, before, "pipx uninstall")
        return [system.name, "wheel", "pipx install ./baton_serve-….whl", installing, first, second, upgrading, removing]


def check_tarball(suite, tarball):
    with System(suite) as system:
        shutil.copy(tarball, system.root / "packages")
        system.run("apt-get install -y --no-install-recommends ca-certificates libstdc++6 python3-pip")
        before = system.files()
        install = f"cd /tmp && tar xf /packages/{tarball.name} && ./{tarball.name.removesuffix('.tar.gz')}/install.sh"
        installing = system.run(install)[1]
        first, second = serve_twice(system)
        upgrading = system.run(install)[1]
        removing = system.run(f"/tmp/{tarball.name.removesuffix('.tar.gz')}/install.sh --remove")[1]
        check_left(system, before, "install.sh --remove")
        return [system.name, "tarball", "tar xf baton-….tar.gz && baton-…/install.sh", installing, first, second, upgrading, removing]


def check_bundle(suite, deb):
    """Installs program and model from one file, and chats, where there is no network but the loopback interface."""
    with System(suite) as connected:
        shutil.copy(deb, connected.root / "packages")
        connected.run(f"apt-get install -y --no-install-recommends /packages/{deb.name} ca-certificates python3-pip")
        connected.run("cd /packages && baton bundle baton.tar --model smollm2")
        # Of the home folder alone, so the libraries of the package have to lie in the bundle.
        bundle = OUT / "bundle.tar"
        shutil.move(connected.root / "packages/baton.tar", bundle)
    with System(suite) as alone:
        shutil.move(bundle, alone.root / "packages/baton.tar")
        command = "cd /packages && tar xf baton.tar && unset BATON_CACHE && baton-bundle/install.sh && echo Hello | baton chat smollm2"
        isolated = subprocess.run(
            ["unshare", "--net", "sh", "-ec", 'ip link set lo up && ! ip route get 192.0.2.1 2>/dev/null && exec chroot "$@"', "sh",
             alone.root, "sh", "-ec", command],
            env=alone.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        )
        assert isolated.returncode == 0, f"without a network: {isolated.stdout[-4000:]}"
        return isolated.stdout.splitlines()[-1]


def cell(value):
    return f"{value:.1f}" if isinstance(value, float) else value if " " not in value or value.startswith("Debian") else f"`{value}`"


def write(page, rows, sizes, program):
    head = "| system | package | command | installed | first token, with the model's download | again | upgraded | removed |\n|---|---|---|---|---|---|---|---|\n"
    table = head + "".join("| " + " | ".join(cell(value) for value in row) + " |\n" for row in rows)
    begin = f"Seconds of {datetime.date.today()}, on {os.cpu_count()} cores, with {program}. Packed: {sizes}."
    text, n = re.subn(r"<!-- packages -->.*<!-- end -->", lambda _: f"<!-- packages -->\n{begin}\n\n{table}<!-- end -->", page.read_text(), flags=re.S)
    assert n == 1, f"{page} has no place for the table"
    page.write_text(text)


def packed(folder, out):
    subprocess.run([ROOT / "scripts/package/all.sh", folder, out], check=True, cwd=ROOT)
    one = lambda pattern: next(iter(out.glob(pattern)))
    return one("*[!s].tar.gz"), one("*.deb"), one("*.whl")


def main():
    if os.getuid() != 0:
        sys.exit("packages: this needs root, for debootstrap, mounts and chroot")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/portable/dist").resolve()
    OUT.mkdir(parents=True, exist_ok=True)
    tarball, deb, wheel = packed(folder, OUT)
    # The same program under a later version.
    version = subprocess.run([OUT / "tree/bin/baton", "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[1]
    newer = OUT / "newer"
    newer.mkdir(exist_ok=True)
    shutil.copytree(OUT / "tree", newer / "tree", dirs_exist_ok=True)
    made = lambda *command: Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.strip())
    newer_deb = made(ROOT / "scripts/package/deb.sh", newer, f"{version}+later")
    newer_wheel = made(ROOT / "scripts/package/wheel.py", newer, f"{version}.post1")
    rows = []
    for suite in os.environ.get("SUITES", "bookworm trixie").split():
        for check in (lambda: check_deb(suite, deb, newer_deb), lambda: check_wheel(suite, wheel, newer_wheel), lambda: check_tarball(suite, tarball)):
            rows.append(check())
            print("packages: " + "  ".join(cell(value) for value in rows[-1]), flush=True)
        print(f"packages: without a network, the bundle answered: {check_bundle(suite, deb)}", flush=True)
    page = os.environ.get("INSTALL_PAGE")
    if page:
        sizes = ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in (tarball, deb, wheel))
        write(ROOT / page, rows, sizes, os.environ.get("PROGRAM_WORDS", "the portable program"))


main()
