#!/usr/bin/env python3
"""Prints the licences of everything linked into baton: scripts/third-party-notices.py [--sbom] [cargo's feature flags].
With --sbom, a list of what is linked in, as CycloneDX has it.

Each crate's own licence files are quoted, those of the C++ that it brings along too; equal texts once. A crate whose
package has no licence file is quoted with the text that its licence expression names. A licence without a text is an
error: then this file would not say what it has to.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Compiled-in code that is not Rust: globs in the folders of the crates that contain it.
BUNDLED = {
    "llama-cpp-sys-2": ["llama.cpp/LICENSE", "llama.cpp/licenses/*", "llama.cpp/vendor/**/[Ll][Ii][Cc]*"],
    "zstd-sys": ["zstd/LICENSE"],
}

# Files of those crates that name their licence, MIT, only in their first lines.
HEADERS = {"llama-cpp-sys-2": ["llama.cpp/vendor/nlohmann/json.hpp"]}

# Who owns what the live page's script contains (proxy/page/package-lock.json).
PAGE = {
    "dequal": "Luke Edwards",
    "devlop": "2023 Titus Wormer",
    "highlight.js": "2006, Ivan Sagalaev",
    "idb-keyval": "2016, Jake Archibald",
    "lowlight": "Titus Wormer",
    "marked": "2018+, MarkedJS; 2011-2018, Christopher Jeffrey; and for Markdown, under the BSD licence: 2004, John Gruber",
    "preact": "2015-present Jason Miller",
    "uplot": "2022 Leon Sorokin",
}

LICENCE_FILE = re.compile(r"^(licen[cs]e|copying|notice|unlicense|copyright)([-_. ].*)?$", re.I)

MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""


BSD = """Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met:

* Redistributions of source code must retain the above copyright notice, this list of conditions and the following disclaimer.
* Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
  disclaimer in the documentation and/or other materials provided with the distribution.
* Neither the name of the copyright holder nor the names of its contributors may be used to endorse or promote products
  derived from this software without specific prior written permission.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING,
BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT
SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS
INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING
NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE."""


def run(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked(features):
    """The packages that end up in the binary: normal dependencies on its platform, not those of builds and tests."""
    platform = os.environ.get("CARGO_BUILD_TARGET") or re.search(r"^host: (.*)$", run("rustc", "-vV"), re.M)[1]
    metadata = json.loads(
        run("cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", platform, *features)
    )
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}
    own, found, waiting = set(metadata["workspace_members"]), set(), [metadata["resolve"]["root"]]
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_linked and dependency["pkg"] not in found:
                found.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    # Macros and their dependencies run in the compiler and are not linked in.
    kinds = lambda package: {kind for target in package["targets"] for kind in target["kind"]}
    others = (packages[id] for id in found - own)
    return sorted((p for p in others if "proc-macro" not in kinds(p)), key=lambda p: (p["name"], p["version"]))


def texts(package):
    folder = Path(package["manifest_path"]).parent
    files = [path for path in folder.iterdir() if path.is_file() and LICENCE_FILE.match(path.name)]
    if package.get("license_file"):
        files.append(folder / package["license_file"])
    for pattern in BUNDLED.get(package["name"], []):
        bundled = [path for path in folder.glob(pattern) if path.is_file()]
        if not bundled and "**" not in pattern and "*" not in pattern:
            sys.exit(f"third-party-notices: {package['name']} {package['version']} has no {pattern}")
        files += bundled
    headers = [in_header(folder / path) for path in HEADERS.get(package["name"], [])]
    quoted = headers + [path.read_text(errors="replace").strip() for path in sorted(set(files))]
    return [text for text in quoted if text] or [by_expression(package)]


def in_header(path):
    """The copyright lines of a file that is under MIT's licence, and that licence."""
    opening = path.read_text(errors="replace")[:2000]
    owners = re.findall(r"SPDX-FileCopyrightText: (.*)", opening)
    if not owners or "SPDX-License-Identifier: MIT" not in opening:
        sys.exit(f"third-party-notices: {path} does not name its licence where it did")
    lines = "\n".join(f"Copyright (c) {owner}" for owner in dict.fromkeys(owners))
    return f"{path.parent.name}/{path.name}\n{lines}\n\n{MIT}"


def by_expression(package):
    licence = package.get("license") or ""
    authors = ", ".join(re.sub(r"\s*<.*?>", "", author) for author in package["authors"]) or "its authors"
    choices = re.split(r"\s+OR\s+|/", licence.strip("()"))
    if "MIT" in choices:
        return f"Copyright (c) {authors} ({package['name']})\n\n{MIT}"
    if "Apache-2.0" in choices:
        return (ROOT / "LICENSE").read_text().strip()
    sys.exit(f"third-party-notices: {package['name']} {package['version']} ({licence!r}) has no licence text")


def of_page():
    """Name, version, licence and its text, of each package in the live page."""
    texts = {"MIT": MIT, "BSD-3-Clause": BSD, "Apache-2.0": (ROOT / "LICENSE").read_text().strip()}
    locked = json.loads((ROOT / "proxy/page/package-lock.json").read_text())["packages"]
    # Types have no code.
    built_in = {path.removeprefix("node_modules/"): package for path, package in locked.items() if path and not package.get("dev")}
    for name, package in built_in.items():
        if name.startswith("@types/"):
            continue
        licence = package["license"]
        if licence not in texts or name not in PAGE:
            sys.exit(f"third-party-notices: {name} of the live page is not listed in PAGE, or its licence ({licence}) has no text")
        text = f"Copyright (c) {PAGE[name]}\n\n{texts[licence]}"
        # Its patterns come from Markdown.
        yield name, package["version"], licence, f"{text}\n\n{BSD}" if name == "marked" else text


def sbom(packages):
    def component(package):
        name, version, licence = package["name"], package["version"], package.get("license")
        # An old form of "one of these".
        licences = [{"expression": licence.replace("/", " OR ")}] if licence else []
        return {"type": "library", "name": name, "version": version, "purl": f"pkg:cargo/{name}@{version}", "licenses": licences}

    of_the_page = [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:npm/{name}@{version}", "licenses": [{"expression": licence}]}
        for name, version, licence, _ in of_page()
    ]
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    about = {"component": {"type": "application", "name": "baton", "version": version}}
    components = [component(package) for package in packages] + of_the_page
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "metadata": about, "components": components}, indent=1)


def main():
    flags = [flag for flag in sys.argv[1:] if flag != "--sbom"]
    packages = linked(flags)
    if "--sbom" in sys.argv:
        print(sbom(packages))
        return
    by_text = {}
    for package in packages:
        for text in texts(package):
            # Line ends and indents differ between copies of one text.
            digest = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
            by_text.setdefault(digest, (text, []))[1].append(f"{package['name']} {package['version']}")
    out = ["Baton contains the software listed here, under the licences quoted below.", ""]
    for package in packages:
        where = package.get("repository") or package.get("homepage") or ""
        out.append(f"{package['name']} {package['version']}  {package.get('license') or 'see below'}  {where}".rstrip())
    for name, version, licence, text in of_page():
        out.append(f"{name} {version}  {licence}  https://www.npmjs.com/package/{name}")
        by_text[name] = (text, [f"{name} {version}"])
    for text, users in by_text.values():
        out += ["", "=" * 80, ", ".join(dict.fromkeys(users)), "-" * 80, text]
    print("\n".join(out))


main()
