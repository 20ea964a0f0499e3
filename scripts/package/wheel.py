#!/usr/bin/env python3
"""Packs OUT/tree as a wheel that carries the program: OUT/baton_serve-VERSION-py3-none-TAG.whl.

    scripts/package/wheel.py OUT VERSION [cuda]

The tag says what the program needs, as scripts/package/elf.py reads it from the program; without a true tag there is no wheel.
An installer puts `scripts` into bin and `data` below the prefix, so the program finds its libraries in ../lib/baton.

With `cuda` the package is baton_serve_cuda. It leaves out NVIDIA's libraries and depends on NVIDIA's wheels, whose versions are in
OUT/nvidia-wheels.txt. Those lie in site-packages, whose name has Python's version. So the program and its libraries lie there,
too, where one relative path leads from one to the other, and the command is a launcher.
"""

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import elf  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent

# Where an installer's environment has no pip of its own (uv's has none), the default model could not be fetched.
METADATA = """Metadata-Version: 2.4
Name: {package}
Version: {version}
Summary: {summary}
License-Expression: {licence}
{licence_files}
Requires-Python: >=3.8
{requires}
Description-Content-Type: text/markdown

{readme}"""
SUMMARY = "One OpenAI- and Ollama-compatible endpoint for language models on your own machines"
OF_GOMP = "LICENSE-libgomp"

LAUNCHER = '''"""Baton with CUDA: starts the program that lies beside this file."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "baton")
    # In this process's place, so that signals reach it.
    os.execv(program, ["baton", *sys.argv[1:]])
'''


def contents(tree, name, cuda):
    """What the wheel has of the tree: names in the wheel, and files."""
    doc = tree / "share/doc/baton"
    folder = "baton_serve_cuda"
    files = {f"{folder}/bin/baton" if cuda else f"{name}.data/scripts/baton": tree / "bin/baton"}
    for path in sorted(tree.rglob("*")):
        within = path.relative_to(tree)
        if not path.is_file() or within.parts[0] == "bin" or path.parent == doc:
            continue
        if not cuda or within.parts[0] != "lib":
            files[f"{name}.data/data/{within}"] = path
        elif path.name not in elf.OF_NVIDIA and path.name != "NVIDIA-LICENCE.txt":
            files[f"{folder}/{within}"] = path
    for licence in licence_files(tree):
        files[f"{name}.dist-info/licenses/{licence}"] = doc / licence
    return files


def licence_files(tree):
    """The names of its licences. The last one is of a library that not every program brings."""
    return [name for name in ("LICENSE", "THIRD-PARTY-NOTICES", OF_GOMP) if (tree / "share/doc/baton" / name).exists()]


def requirements(out, programs):
    """NVIDIA's wheels with their versions, as many as the programs need."""
    versions = out / "nvidia-wheels.txt"
    if not versions.exists():
        raise elf.Unfit("the build has no nvidia-wheels.txt: make it with scripts/cuda/build.sh")
    known = versions.read_text().split()
    chosen = [line for line in known if line.split(">")[0] in elf.of_nvidia(programs)]
    if len(chosen) != len(elf.of_nvidia(programs)):
        raise elf.Unfit(f"{versions} names {known}, and needed are {sorted(elf.of_nvidia(programs))}")
    return chosen


def write(wheel, files, texts, record_name):
    record = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(path, data, mode=0o644):
            # The same bytes whenever it is packed.
            entry = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")

        for path, source in files.items():
            add(path, source.read_bytes(), 0o755 if source.parent.name == "bin" else 0o644)
        for path, text in texts.items():
            add(path, text.encode())
        record.append(f"{record_name},,\n")
        entry = zipfile.ZipInfo(record_name, (2020, 1, 1, 0, 0, 0))
        entry.external_attr = 0o100644 << 16
        archive.writestr(entry, "\n".join(record), zipfile.ZIP_DEFLATED)


def python_version(version):
    """SemVer's version as Python's (PEP 440). A wheel's own later versions (`.post1`) are taken, too."""
    found = re.fullmatch(r"(\d+\.\d+\.\d+)(?:-(alpha|beta|rc)\.(\d+)|(\.post\d+))?", version)
    if not found:
        sys.exit(f"package: {version} is no version of a wheel: 1.2.3, 1.2.3-alpha.1, -beta.1 and -rc.1 are")
    base, stage, number, later = found.groups(default="")
    return base + {"": "", "alpha": "a", "beta": "b", "rc": "rc"}[stage] + number + later


def main():
    out, version, variant = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if variant not in ([], ["cuda"]):
        sys.exit(f"package: there is no variant {variant}: cuda is one")
    cuda = bool(variant)
    tree = out / "tree"
    version = python_version(version)
    name = f"baton_serve_cuda-{version}" if cuda else f"baton_serve-{version}"
    info = f"{name}.dist-info"
    files = contents(tree, name, cuda)
    programs = [path for path in files.values() if path.parent in (tree / "bin", tree / "lib/baton")]
    try:
        tag = elf.tag("cuda" if cuda else "wheel", programs)
        nvidia = requirements(out, programs) if cuda else []
    except elf.Unfit as problem:
        sys.exit(f"package: {problem}")
    texts = {
        f"{info}/METADATA": METADATA.format(
            package="baton-serve-cuda" if cuda else "baton-serve",
            version=version,
            summary=f"{SUMMARY}, with CUDA" if cuda else SUMMARY,
            licence="Apache-2.0 AND GPL-3.0-or-later WITH GCC-exception-3.1" if OF_GOMP in licence_files(tree) else "Apache-2.0",
            licence_files="\n".join(f"License-File: {licence}" for licence in licence_files(tree)),
            requires="\n".join(f"Requires-Dist: {package}" for package in ["pip>=22.2", *nvidia]),
            readme=(ROOT / "README.md").read_text(),
        ),
        # NVIDIA's wheels lie in the folder for packages without a machine's code (purelib).
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: baton\nRoot-Is-Purelib: {str(cuda).lower()}\nTag: py3-none-{tag}\n",
    }
    if cuda:
        texts["baton_serve_cuda/__init__.py"] = LAUNCHER
        texts[f"{info}/entry_points.txt"] = "[console_scripts]\nbaton = baton_serve_cuda:main\n"
    wheel = out / f"{name}-py3-none-{tag}.whl"
    write(wheel, files, texts, f"{info}/RECORD")
    print(wheel)


main()
