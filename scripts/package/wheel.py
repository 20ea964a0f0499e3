#!/usr/bin/env python3
"""Packs OUT/tree as a wheel that carries the program: OUT/baton_serve-VERSION-py3-none-TAG.whl.

    scripts/package/wheel.py OUT VERSION

The tag says what the program needs, as scripts/package/elf.py reads it from the program; without a true tag there is no wheel.
An installer puts `scripts` into bin and `data` below the prefix, so the program finds its libraries in ../lib/baton.
"""

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Where an installer's environment has no pip of its own (uv's has none), the default model could not be fetched.
METADATA = """Metadata-Version: 2.4
Name: baton-serve
Version: {version}
Summary: One OpenAI- and Ollama-compatible endpoint for language models on your own machines
License-Expression: Apache-2.0
License-File: LICENSE
License-File: THIRD-PARTY-NOTICES
Requires-Python: >=3.8
Requires-Dist: pip>=22.2
Description-Content-Type: text/markdown

{readme}"""


def main():
    out, version = Path(sys.argv[1]), sys.argv[2]
    tree = out / "tree"
    programs = [tree / "bin/baton", *sorted((tree / "lib/baton").glob("*.so*"))]
    tag = subprocess.run(
        [ROOT / "scripts/package/elf.py", "wheel", *programs], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    # Python's form of a version, without what Debian's and SemVer's allow beyond it.
    version = version.replace("-rc.", "rc").replace("~", "")
    name = f"baton_serve-{version}"
    info = f"{name}.dist-info"
    doc = tree / "share/doc/baton"
    texts = {
        f"{info}/METADATA": METADATA.format(version=version, readme=(ROOT / "README.md").read_text()),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: baton\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n",
    }
    files = {f"{name}.data/scripts/baton": tree / "bin/baton"}
    for path in sorted(tree.rglob("*")):
        within = path.relative_to(tree)
        if path.is_file() and within.parts[0] != "bin" and path.parent != doc:
            files[f"{name}.data/data/{within}"] = path
    for licence in ("LICENSE", "THIRD-PARTY-NOTICES"):
        files[f"{info}/licenses/{licence}"] = doc / licence

    wheel = out / f"{name}-py3-none-{tag}.whl"
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
            add(path, source.read_bytes(), 0o755 if path.endswith("/scripts/baton") else 0o644)
        for path, text in texts.items():
            add(path, text.encode())
        record.append(f"{info}/RECORD,,\n")
        entry = zipfile.ZipInfo(f"{info}/RECORD", (2020, 1, 1, 0, 0, 0))
        entry.external_attr = 0o100644 << 16
        archive.writestr(entry, "\n".join(record), zipfile.ZIP_DEFLATED)
    print(wheel)


main()
