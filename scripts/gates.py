#!/usr/bin/env python3
"""Gates that take seconds: what `make check` refuses before it compiles anything.

Exceptions stand in scripts/gates.toml, each with its reason. That list may only shrink: an entry that nothing needs any
more is refused, too. scripts/test_gates.py shows that each gate can fail.

Usage: gates.py [ROOT]                 prints every problem, and exits with 1 if there is one
       gates.py --floors CRATE         prints an order of a crate's rooms in which imports run down
"""
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

from rust_source import Imports, Workspace, components

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# A string literal with a letter.
LITERAL = r'b?"[^"\n]*[A-Za-z][^"\n]*"'
COMPARISON = re.compile(rf"(?:==|!=)\s*&?\*?{LITERAL}|{LITERAL}\s*(?:==|!=)")
# A literal in the pattern of a match arm: what stands before it in its line, and behind it.
BEFORE_IN_ARM = re.compile(rf"(?:.*[{{,]\s*)?[\s|(&]*(?:(?:\w+::)*[A-Z]\w*\([\s(&]*|_,\s*|[a-z_]\w*,\s*)*(?:{LITERAL}[)\s]*\|\s*)*")
BEHIND_IN_ARM = re.compile(r"[)\s]*(?:=>|,[^=\"]*=>|\|(?!\|)|if\b.*=>|$)")
MATCHES = re.compile(rf"\bmatches!\([^;{{}}]*?,\s*(?:[A-Z]\w*\()*{LITERAL}")
# What an error says is for people.
MESSAGE = re.compile(rf"\bto_string\(\)\s*\.(?:contains|starts_with|ends_with)\(\s*{LITERAL}")


class Exceptions:
    """The exceptions of a gate: by their key, the highest figure that is accepted."""

    def __init__(self, gate, table):
        self.gate, self.table, self.used = gate, table, set()

    def problem(self, key, n, limit, what):
        """A problem if `n` is over the limit and over the exception's figure."""
        if n <= limit:
            return None
        allowed = self.table.get(key)
        if allowed is None:
            return f"{key}: {what}"
        self.used.add(key)
        if n > allowed["n"]:
            return f"{key}: {what}, and {allowed['n']} by its exception in scripts/gates.toml, which may only shrink"
        return None

    def unused(self):
        for key, entry in self.table.items():
            if key not in self.used:
                yield f"scripts/gates.toml: [{self.gate}] has an exception for {key} that nothing needs: remove it"
            elif not entry.get("why"):
                yield f"scripts/gates.toml: [{self.gate}] gives no reason (why) for {key}"


def check_files(sources, exceptions):
    for source in sources:
        n = source.n_lines - source.n_test_lines
        yield exceptions.problem(source.name, n, MAX_FILE_LINES, f"{n} lines without tests; {MAX_FILE_LINES} at most")


def check_functions(sources, exceptions):
    for source in sources:
        for function in source.functions():
            n = function.n_lines
            key = f"{source.name}::{function.name}"
            yield exceptions.problem(key, n, MAX_FUNCTION_LINES, f"a function of {n} lines; {MAX_FUNCTION_LINES} at most")


def meanings(sources, dialects):
    """Each type's name with the number of its meanings, and its files. The dialects' bodies of one shape may share a name."""
    files = defaultdict(list)
    for source in sources:
        for name in source.types():
            files[name].append(source.name)
    n_dialects = {name: sum(any(file.startswith(folder + "/") for folder in dialects) for file in of) for name, of in files.items()}
    return {name: (len(of) - n_dialects[name] + (n_dialects[name] > 0), of) for name, of in files.items()}


def check_names(sources, dialects, exceptions):
    for name, (n, files) in sorted(meanings(sources, dialects).items()):
        yield exceptions.problem(name, n, 1, f"a type's name with {n} meanings: {', '.join(files)}")


def is_in_arm(line, literal):
    """True if a match arm's pattern has this literal. A pattern of several lines has `|` at the begin of each."""
    before, behind = line[:literal.start()], line[literal.end():]
    ends = "=>" in behind or line.lstrip().startswith("|")
    return ends and bool(BEFORE_IN_ARM.fullmatch(before)) and bool(BEHIND_IN_ARM.match(behind))


def decisions(source):
    """Lines that decide by comparing with a text, and those that decide by what an error says."""
    code = source.product_with_strings
    lines = {source.line(found.start()) for form in (COMPARISON, MATCHES) for found in form.finditer(code)}
    for number, line in enumerate(code.split("\n"), 1):
        if '"' in line and any(is_in_arm(line, literal) for literal in re.finditer(LITERAL, line)):
            lines.add(number)
    return sorted(lines), sorted({source.line(found.start()) for found in MESSAGE.finditer(code)})


def check_strings(sources, edges, exceptions):
    """Decisions are made on enums. Text is compared where it comes in (`edges`), and where an exception says why."""
    used = set()
    for source in sources:
        lines, by_message = decisions(source)
        for line in by_message:
            yield f"{source.name}:{line}: decides by the words of an error"
        edge = next((edge for edge in edges if source.name == edge or source.name.startswith(edge + "/")), None)
        if lines and edge:
            used.add(edge)
        elif lines:
            where = ", ".join(map(str, lines))
            yield exceptions.problem(source.name, len(lines), 0, f"{len(lines)} decisions on a string (lines {where})")
    for edge in edges:
        if edge not in used:
            yield f"scripts/gates.toml: [edges] names {edge}, which decides on no string: remove it"


def check_crates(workspace, order):
    """A crate uses those after it in the order only."""
    names = {workspace.manifest(crate)["package"]["name"]: crate for crate in workspace.crates}
    for crate in workspace.crates:
        if crate not in order:
            yield f"{crate}: this crate has no place in `crates` (scripts/gates.toml)"
    for crate in order:
        if crate not in workspace.crates:
            yield f"scripts/gates.toml: `crates` names {crate}, which is no crate"
            continue
        for dependency in workspace.manifest(crate).get("dependencies", {}):
            below = names.get(dependency)
            if below in order and order.index(below) <= order.index(crate):
                yield f"{crate}/Cargo.toml: {dependency} stands above it"


def room(module):
    return module[0] if module else None


def check_rooms(crate, imports, floors, exceptions):
    """No circles between files, and no import from a room (a folder or file below src) to one above it.

    The root of the crate may import all.
    """
    edges = imports.edges()
    for group in (group for group in components(edges) if len(group) > 1):
        arrows = (f"{imports.file[one]} -> {imports.file[two]}" for one in group for two in sorted(edges[one]) if two in group)
        yield f"a circle of imports: {'; '.join(arrows)}"
    rooms = {room(module) for module in imports.text if module}
    for name in sorted(rooms - set(floors)):
        yield f"{crate}: the room {name} has no place in [floors] (scripts/gates.toml)"
    for name in sorted(set(floors) - rooms):
        yield f"scripts/gates.toml: [floors] names {name}, a room that {crate} does not have"
    if len(floors) != len(set(floors)):
        yield f"scripts/gates.toml: [floors] names a room of {crate} twice"
    upwards = defaultdict(list)
    for module, targets in edges.items():
        for target in targets:
            one, two = room(module), room(target)
            if one in floors and two in floors and floors.index(two) < floors.index(one):
                upwards[f"{crate}: {one} -> {two}"].append(f"{imports.file[module]} -> {imports.file[target]}")
    for arrow, files in sorted(upwards.items()):
        yield exceptions.problem(arrow, len(files), 0, f"imports run up: {'; '.join(sorted(files))}")


def check_words(root, limits):
    for name, limit in limits.items():
        n = len((root / name).read_text().split())
        if n > limit:
            yield f"{name}: {n} words; {limit} at most"


def check_rows(root):
    """Every file that ARCHITECTURE.md's table "To add X, touch Y" names is there."""
    section = (root / "ARCHITECTURE.md").read_text().partition("## To add X, touch Y")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| to add")]
    if not rows:
        yield "ARCHITECTURE.md: the table under \"To add X, touch Y\" is gone"
    for row in rows:
        folder = None
        for quoted in re.findall(r"`([^`]+)`", row):
            if not re.fullmatch(r"[\w./-]+(\.\w+|/)", quoted):
                continue
            path = root / quoted
            if "/" in quoted:
                folder = path if path.is_dir() else path.parent
            elif folder and not path.exists():
                # A file next to the one before, or the `mod.rs` of any folder.
                path = folder / quoted
            if not path.exists() and quoted != "mod.rs":
                yield f"ARCHITECTURE.md: a row of \"to add\" names {quoted}, which is not there: {row}"


def floors_of(imports):
    """Rooms from the top down. Rooms that import each other stand in any order."""
    rooms = {room(module): set() for module in imports.text if module}
    for module, targets in imports.edges().items():
        if module:
            rooms[room(module)] |= {room(target) for target in targets if target and room(target) != room(module)}
    return [name for group in reversed(components(rooms)) for name in group]


def problems(root):
    config = tomllib.loads((root / "scripts/gates.toml").read_text())
    gates = {name: Exceptions(name, config.get(name, {})) for name in ("files", "functions", "names", "strings", "upwards")}
    workspace = Workspace(root)
    yield from check_crates(workspace, config["crates"])
    sources = []
    for crate in workspace.crates:
        of_crate = workspace.sources(crate)
        sources += of_crate
        floors = config["floors"].get(crate, [])
        yield from check_rooms(crate, Imports(root / crate / "src", of_crate), floors, gates["upwards"])
    yield from check_files(sources, gates["files"])
    yield from check_functions(sources, gates["functions"])
    yield from check_names(sources, config["dialects"], gates["names"])
    yield from check_strings(sources, config["edges"], gates["strings"])
    for exceptions in gates.values():
        yield from exceptions.unused()
    yield from check_words(root, config["words"])
    yield from check_rows(root)


def main():
    args = sys.argv[1:]
    root = subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip()
    if args[:1] == ["--floors"]:
        workspace = Workspace(Path(root))
        crate = args[1]
        rooms = floors_of(Imports(workspace.root / crate / "src", workspace.sources(crate)))
        print(f'"{crate}" = {rooms}'.replace("'", '"'))
        return
    found = [problem for problem in problems(Path(args[0] if args else root)) if problem]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
