#!/usr/bin/env python3
"""Finds circles of imports between the files of each crate, and imports that run up between the proxy's rooms.

Reads `use` statements and inline paths that start with `crate::`, `super::` or `self::`; test modules are left out.
A name that a module re-exports counts as an import of the file that defines it. An edge between a module and its own
`mod.rs` counts like any other. Prints every circle and exits with 1 if there is one.

Usage: check-circles.py [--count] [SRC ...]   (default: every crate of the workspace)
"""
import re
import subprocess
import sys
from pathlib import Path

CRATES = ["schemas", "engines/process", "engines", "proxy", "proxy/fetch", "proxy/pairing", "proxy/planner", "proxy/reply", "proxy/node", "proxy/tryout", "proxy/bench", "proxy/cli"]

# Rooms (folders and files) of proxy/src, from the top down: a room may import those below it, never one above.
FLOORS = [
    "serve", "config", "http", "request", "observe", "targets",
    "account", "reply_event", "choice_clock", "token_gaps", "latency_buckets", "model_name", "log_target", "error",
]

WORD = r"[A-Za-z_][A-Za-z0-9_]*"
DEFINITION = re.compile(
    rf"^\s*(?:pub(?:\([^)]*\))?\s+)?(?:async\s+|const\s+|unsafe\s+|extern\s+\"C\"\s+)*"
    rf"(?:fn|struct|enum|trait|type|const|static|union|macro_rules!)\s+({WORD})", re.M)


def strip(text):
    """The source without comments, strings and test modules."""
    text = re.sub(r'r(#*)".*?"\1', '""', text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    # A visibility such as `pub(in crate::http)` is not an import.
    text = re.sub(r"\bpub\(in [^)]*\)", "pub", text)
    out, at = [], 0
    for found in re.finditer(r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?(?:mod|use|fn|impl|struct)\b", text):
        if found.start() < at:
            continue
        end = found.end()
        brace, semi = text.find("{", end), text.find(";", end)
        if semi != -1 and (brace == -1 or semi < brace):
            stop = semi + 1
        else:
            depth, stop = 0, brace
            while stop < len(text):
                depth += {"{": 1, "}": -1}.get(text[stop], 0)
                stop += 1
                if depth == 0:
                    break
        out.append(text[at:found.start()])
        at = stop
    out.append(text[at:])
    return "".join(out)


def expand(tree):
    """The paths in the tree of a `use` statement, each a list of words."""
    tree = tree.strip()
    if not tree:
        return []
    brace = tree.find("{")
    if brace == -1:
        path = re.sub(r"\s+as\s+.*$", "", tree, flags=re.S).strip()
        return [[part.strip() for part in path.split("::") if part.strip()]]
    head = [part.strip() for part in tree[:brace].split("::") if part.strip()]
    depth, parts, last = 0, [], brace + 1
    for at in range(brace, len(tree)):
        if tree[at] == "{":
            depth += 1
        elif tree[at] == "}":
            depth -= 1
            if depth == 0:
                parts.append(tree[last:at])
                break
        elif tree[at] == "," and depth == 1:
            parts.append(tree[last:at])
            last = at + 1
    return [head + tail for part in parts for tail in expand(part)]


class Crate:
    """The modules of a crate and what they import of each other."""

    def __init__(self, src):
        self.text, self.file, self.public = {}, {}, {}
        for path in sorted(src.rglob("*.rs")):
            parts = list(path.relative_to(src).with_suffix("").parts)
            if parts[-1] in ("mod", "lib", "main"):
                parts.pop()
            if "tests" in parts or any(part.startswith("fake_") for part in parts):
                continue
            self.text[tuple(parts)] = strip(path.read_text())
            self.file[tuple(parts)] = path
        self.uses = {module: self.statements(module) for module in self.text}

    def statements(self, module):
        """Each import as (absolute path, name it is exported under or None)."""
        found = []
        for statement in re.finditer(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);", self.text[module]):
            for path in expand(statement[2]):
                absolute = self.absolute(module, path)
                if absolute is not None:
                    found.append((absolute, bool(statement[1])))
        body = re.sub(r"\buse\s+[^;]+;", "", self.text[module])
        for inline in re.finditer(rf"\b((?:crate|super|self)(?:::{WORD})+)", body):
            absolute = self.absolute(module, inline[1].split("::"))
            if absolute is not None:
                found.append((absolute, False))
        return found

    def absolute(self, module, path):
        if not path:
            return None
        if path[0] == "crate":
            return tuple(path[1:])
        if path[0] == "self":
            return module + tuple(path[1:])
        if path[0] == "super":
            base = list(module)
            while path and path[0] == "super":
                if base:
                    base.pop()
                path = path[1:]
            return tuple(base) + tuple(path)
        # A child that the module declares, as in `pub use child::Name`.
        return module + tuple(path) if module + (path[0],) in self.text else None

    def home(self, path, seen=()):
        """The module that defines what a path names."""
        if path in self.text:
            return path
        for cut in range(len(path) - 1, -1, -1):
            module, rest = path[:cut], path[cut:]
            if module not in self.text:
                continue
            name = rest[0]
            if name in DEFINITION.findall(self.text[module]):
                return module
            for target, is_public in self.uses.get(module, []):
                if is_public and target and target[-1] in (name, "*") and target not in seen:
                    full = target[:-1] + rest if target[-1] == "*" else target + rest[1:]
                    found = self.home(full, seen + (target,))
                    if found is not None:
                        return found
            return module
        return None

    def edges(self):
        edges = {}
        for module, uses in self.uses.items():
            for path, is_public in uses:
                target = self.home(path)
                # A re-export shows a child's name; it does not depend on it.
                if target is None or target == module or (is_public and target[:len(module)] == module):
                    continue
                edges.setdefault(module, set()).add(target)
        return edges


def circles(edges):
    """Strongly connected components of more than one module (Tarjan's algorithm, without recursion)."""
    index, low, on, stack, out, count = {}, {}, set(), [], [], 0
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(sorted(edges.get(root, ()))))]
        index[root] = low[root] = count
        count += 1
        stack.append(root)
        on.add(root)
        while work:
            node, rest = work[-1]
            for following in rest:
                if following not in index:
                    index[following] = low[following] = count
                    count += 1
                    stack.append(following)
                    on.add(following)
                    work.append((following, iter(sorted(edges.get(following, ())))))
                    break
                if following in on:
                    low[node] = min(low[node], index[following])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = []
                    while True:
                        member = stack.pop()
                        on.discard(member)
                        group.append(member)
                        if member == node:
                            break
                    if len(group) > 1:
                        out.append(sorted(group))
    return sorted(out, key=len, reverse=True)


def floor_problems(crate, edges):
    """Rooms without a place in FLOORS, places without a room, and imports that run up. The crate's root may import all."""
    rooms = {module[0] for module in crate.text if module}
    for room in sorted(rooms - set(FLOORS)):
        yield f"{room}: this room of proxy/src has no place in FLOORS (scripts/check-circles.py): add it between the rooms that import it and those it imports"
    for room in sorted(set(FLOORS) - rooms):
        yield f"{room}: FLOORS (scripts/check-circles.py) names a room that proxy/src does not have: remove it"
    placed = {module: FLOORS.index(module[0]) for module in crate.text if module and module[0] in FLOORS}
    for module, targets in sorted(edges.items()):
        for target in sorted(targets):
            if module in placed and target in placed and placed[target] < placed[module]:
                yield f"runs up: {crate.file[module]} -> {crate.file[target]}"


def main():
    args = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    count_only = "--count" in sys.argv
    root = Path(subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip())
    sources = [Path(arg) for arg in args] or [root / name / "src" for name in CRATES if (root / name / "src").is_dir()]
    failed = False
    for src in sources:
        crate = Crate(src)
        edges = crate.edges()
        found = circles(edges)
        if found or count_only:
            print(f"{src}: {len(found)} circles, {sum(map(len, found))} files")
        for group in [] if count_only else found:
            failed = True
            print(f"circle of {len(group)} files:", file=sys.stderr)
            for module in group:
                inside = sorted("::".join(target) or "lib" for target in edges.get(module, ()) if target in group)
                print(f"  {crate.file[module]} -> {', '.join(inside)}", file=sys.stderr)
        if src == root / "proxy" / "src" and not count_only:
            for problem in floor_problems(crate, edges):
                failed = True
                print(problem, file=sys.stderr)
    sys.exit(1 if failed and not count_only else 0)


if __name__ == "__main__":
    main()
