#!/usr/bin/env python3
"""Checks that everything the documentation refers to exists: files, headings, `make` targets, and tests.

Reads every tracked Markdown file. Prints each broken reference with its place and exits with 1 if there is one.
"""
import re
import subprocess
import sys
from pathlib import Path

TOP = ("proxy", "engines", "schemas", "configs", "tests", "examples", "docs", "scripts", "packaging", ".github", ".ci")


def anchor(heading):
    """The fragment that hosts make from a heading."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {anchor(found[1]) for found in re.finditer(r"^#+ (.+)$", text, re.M)}


def main():
    root = Path(subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip())
    pages = subprocess.check_output(["git", "ls-files", "*.md"], text=True, cwd=root).split()
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.M))
    problems = []
    for name in pages:
        page = root / name
        text = page.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            for link in re.findall(r"\]\(([^)\s]+)\)", line):
                if re.match(r"[a-z]+:", link):
                    continue
                path, _, fragment = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                if not target.exists():
                    problems.append(f"{name}:{number}: no such file: {link}")
                elif fragment and target.suffix == ".md" and fragment not in anchors(target):
                    problems.append(f"{name}:{number}: no such heading: {link}")
            for quoted in re.findall(r"`([^`\s]+)`", line):
                path = re.sub(r"(::.*|:\d+)$", "", quoted)
                is_path = "/" in path and path.split("/")[0] in TOP and not re.search(r"[<>{}$…]", path)
                if is_path and not any(root.glob(path.rstrip("/"))):
                    problems.append(f"{name}:{number}: no such path: {quoted}")
                # `file.rs::a_test`: the file has a function of this name.
                function = re.fullmatch(r"(.*\.rs)::(\w+)", quoted)
                if is_path and function and (root / function[1]).is_file():
                    if not re.search(rf"\bfn {function[2]}\b", (root / function[1]).read_text()):
                        problems.append(f"{name}:{number}: no such test: {quoted}")
            for target in re.findall(r"`make ([a-z][a-z0-9-]*)`", line):
                if target not in targets:
                    problems.append(f"{name}:{number}: no such target: make {target}")
    print("\n".join(problems), file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
