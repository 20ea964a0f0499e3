"""Packaging files refer to things that exist, in formats that service managers, containers and CI can read."""

import plistlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/operations.md", "docs/two-machines.md", "docs/configuration.md", "docs/handoff.md", "docs/install.md", "docs/security.md"]


def test_launchd_reads_the_plist():
    path = ROOT / "packaging/launchd/net.baton.serve.plist"
    plist = plistlib.loads(path.read_bytes())
    assert plist["Label"] == path.stem
    shell, dash_c, script = plist["ProgramArguments"]
    assert (shell, dash_c) == ("/bin/sh", "-c")
    subprocess.run([shell, "-n", dash_c, script], check=True)
    assert "exec /usr/local/bin/baton serve --config" in script
    # The program bounds the file that the shell's messages go to, too.
    log = '"$HOME/Library/Logs/baton.log"'
    assert script.endswith(f" --log-file {log} 2>>{log}")
    # Longer than running streams may take.
    assert plist["ExitTimeOut"] > 35


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("baton.service", "proxy/src/serve/endpoint.rs"),
        ("baton-node.service", "engines/link/src/node/server.rs"),
    ],
)
def test_systemd_waits_for_longer_than_streams_are_let_finish(unit, source):
    text = (ROOT / "packaging/systemd" / unit).read_text()
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1])
    drain = re.search(r"const DRAIN_DEADLINE: Duration = Duration::from_secs\((\d+)\)", (ROOT / source).read_text())
    assert stop >= int(drain[1]) + 10
    # The main process first: its engines must run while it drains.
    assert "KillMode=mixed" in text


def version(text):
    return [int(part) for part in text.split(".")]


@pytest.mark.parametrize("path", ["packaging/Containerfile", ".github/workflows/release.yml"])
def test_files_copied_or_called_exist(path):
    text = (ROOT / path).read_text()
    for name in re.findall(r"scripts/(?:[\w-]+/)*[\w.-]+", text):
        assert (ROOT / name).is_file(), name
    if "release" in path:
        assert "scripts/release.sh pack" in text and "scripts/package/all.sh" in (ROOT / "scripts/release.sh").read_text()
        stage = (ROOT / "scripts/package/stage.sh").read_text()
        copied = " ".join(re.findall(r"^cp (?:-R )?([^$\"]+) \"\$tree/", stage, re.M)).split()
        assert "LICENSE" in copied and all((ROOT / name).exists() for name in copied), copied
        assert text.splitlines()[0].startswith("# NOT YET RUN")
        assert "third-party-notices.py" in stage and "THIRD-PARTY-NOTICES" in stage
        toolchain = re.search(r"--default-toolchain ([\d.]+)", text)[1]
    else:
        # Not as root, with a health check.
        assert re.search(r"^USER \d+$", text, re.M) and "HEALTHCHECK" in text
        toolchain = re.search(r"rust:([\d.]+)-", text)[1]
        assert "third-party-notices.py" in text and "THIRD-PARTY-NOTICES" in text
    oldest = re.search(r'rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text())[1]
    assert version(toolchain) >= version(oldest)


@pytest.mark.parametrize("kind", ["release", "cuda"])
def test_images_of_packages_run_as_a_user_with_a_health_check(kind):
    text = (ROOT / f"packaging/Containerfile.{kind}").read_text()
    assert re.search(r"^USER \d+$", text, re.M) and "HEALTHCHECK" in text
    package = re.search(r"^COPY (\S+)", text, re.M)[1]
    assert {"release": "baton-serve_", "cuda": "baton_serve_cuda-"}[kind] in package
    assert f"packaging/Containerfile.{kind}" in (ROOT / "scripts/package/image.sh").read_text()


def test_ci_runs_what_the_repository_says():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run: .ci/run" in text and (ROOT / ".ci/run").stat().st_mode & 0o111


def test_every_list_of_dependencies_is_kept_up_to_date():
    text = (ROOT / ".github/dependabot.yml").read_text()
    lists = subprocess.check_output(["git", "ls-files", "*requirements.txt", "*package.json", "*Cargo.lock"], cwd=ROOT)
    for name in lists.decode().split():
        folder = "/" + str(Path(name).parent).replace(".", "", 1).lstrip("/")
        assert f'"{folder}"' in text or f"directory: {folder}\n" in text, name


def test_the_notices_name_what_is_linked_in():
    run = subprocess.run([ROOT / "scripts/third-party-notices.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for part in ["The ggml authors", "Niels Lohmann", "Tokio Contributors", "\nllama-cpp-sys-2 ", "Apache License"]:
        assert part in run.stdout, part
    # Tools of builds and tests are not linked in, and our own crates need no notice.
    for part in ["\ncmake ", "\nproptest ", "\nbaton-engines "]:
        assert part not in run.stdout, part


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_docs_exist(page):
    """`baton COMMAND --help` lists every `baton COMMAND --flag` of a page, and so does `baton-bench`."""
    import os

    folder = Path(os.environ["BATON"]).parent
    text = (ROOT / page).read_text().replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S) + re.findall(r"`(baton(?:-bench)? [^`\n]*)`", text)
    helps = {}
    n_checked = 0
    for line in "\n".join(blocks).splitlines():
        line = line.split(" #")[0]
        for call in re.findall(r"(?:^|[\s/|])(baton(?:-bench)? (?:key )?[a-z][a-z-]*)([^|;&>)]*)", line):
            key, rest = call
            program, *command = key.split()
            if key not in helps:
                run = subprocess.run([folder / program, *command, "--help"], capture_output=True, text=True)
                assert run.returncode == 0, f"{page}: no command `{key}`"
                helps[key] = run.stdout
            for flag in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", rest):
                assert flag in helps[key] or flag in ("--help", "--log-format"), f"{page}: {key} {flag}"
            n_checked += 1
    assert n_checked > 0
