#!/usr/bin/env python3
"""Counts what a closing note reports: lines of each crate, words of the documentation, long files and functions, names of
types with several meanings. It judges nothing: scripts/gates.py does.

Usage: count.py [ROOT]
"""
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from gates import MAX_FILE_LINES, MAX_FUNCTION_LINES, decisions, meanings
from rust_source import Workspace


def main():
    default = subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip()
    root = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    workspace = Workspace(root)
    sources = {crate: workspace.sources(crate) for crate in workspace.crates}
    print(f"{'crate':<16}{'files':>7}{'product':>9}{'tests':>8}")
    total = Counter()
    for crate, of_crate in sources.items():
        n = Counter(files=len(of_crate), tests=sum(source.n_test_lines for source in of_crate))
        n["product"] = sum(source.n_lines for source in of_crate) - n["tests"]
        total += n
        print(f"{crate:<16}{n['files']:>7}{n['product']:>9}{n['tests']:>8}")
    print(f"{'all':<16}{total['files']:>7}{total['product']:>9}{total['tests']:>8}")
    tracked = subprocess.check_output(["git", "ls-files", "*.rs", "*.md"], text=True, cwd=root).split()
    rest = [name for name in tracked if name.endswith(".rs") and not any(name.startswith(f"{crate}/src/") for crate in sources)]
    print(f"other Rust (tests, benchmarks, clients): {sum((root / name).read_text().count(chr(10)) for name in rest)} lines")

    words = {name: len((root / name).read_text().split()) for name in tracked if name.endswith(".md")}
    docs = sum(n for name, n in words.items() if name.startswith("docs/"))
    print(f"words: README {words['README.md']}, ARCHITECTURE {words['ARCHITECTURE.md']}, docs {docs}, all {sum(words.values())}")

    everything = [source for of_crate in sources.values() for source in of_crate]
    n_files = sum(source.n_lines - source.n_test_lines > MAX_FILE_LINES for source in everything)
    lengths = sorted(function.n_lines for source in everything for function in source.functions())
    n_functions = sum(n > MAX_FUNCTION_LINES for n in lengths)
    print(f"files over {MAX_FILE_LINES} lines: {n_files}; functions over {MAX_FUNCTION_LINES}: {n_functions}")
    print(f"functions: {len(lengths)}, median {lengths[len(lengths) // 2]} lines, p90 {lengths[len(lengths) * 9 // 10]}")
    dialects = tomllib.loads((root / "scripts/gates.toml").read_text())["dialects"]
    print(f"names of types with several meanings: {sum(n > 1 for n, _ in meanings(everything, dialects).values())}")
    print(f"decisions on a string: {sum(len(decisions(source)[0]) for source in everything)}")


if __name__ == "__main__":
    main()
