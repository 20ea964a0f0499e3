"""What scripts/gates.py and scripts/count.py read in Rust's source, without a compiler.

Comments, strings and tests are blanked rather than cut, so every line keeps its number.
"""
import re
import tomllib
from collections import namedtuple
from functools import cached_property
from pathlib import Path

WORD = r"[A-Za-z_][A-Za-z0-9_]*"
VISIBLE = r"(?:pub(?:\([^)]*\))?\s+)?"
DEFINITION = re.compile(
    rf"^[ \t]*{VISIBLE}(?:async\s+|const\s+|unsafe\s+|extern\s+\"[^\"]*\"\s+)*"
    rf"(?:fn|struct|enum|trait|type|const|static|union|macro_rules!)\s+({WORD})", re.M)
TYPE = re.compile(rf"^{VISIBLE}(?:unsafe\s+)?(struct|enum|union|trait|type)\s+({WORD})", re.M)
FUNCTION = re.compile(rf"\bfn\s+({WORD})")
TEST_ITEM = re.compile(
    r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*"
    rf"{VISIBLE}(?:(?:async|const|unsafe)\s+)*(?:mod|use|fn|impl|struct|enum|const|static|trait|type)\b")
# A comment, a string or a character. A lifetime has no second quote.
TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(\#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\(?:u\{[^}]*\}|x..|.)|[^\\'\n])'""", re.S)

Function = namedtuple("Function", "name first_line n_lines")


def blanked(text):
    """Spaces for all but the ends of lines."""
    return re.sub(r"[^\n]", " ", text)


def without_comments(text):
    """The source with blank comments."""
    return TOKEN.sub(lambda found: blanked(found[0]) if found[0].startswith("/") else found[0], text)


def without_text(text):
    """The source with blank comments, strings and characters; the quotes stay."""
    def blank(found):
        token = found[0]
        return blanked(token) if token.startswith("/") else token[0] + blanked(token[1:-1]) + token[-1]
    return TOKEN.sub(blank, text)


def end_of_block(code, start):
    """The position after the item at `start`: after its `;`, or after the brace that closes it."""
    depth = 0
    for at in range(start, len(code)):
        if code[at] in "([":
            depth += 1
        elif code[at] in ")]":
            depth -= 1
        elif code[at] == ";" and depth == 0:
            return at + 1
        elif code[at] == "{":
            break
    else:
        return len(code)
    depth = 0
    for at in range(at, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return at + 1
    return len(code)


def test_spans(code):
    """Where the source holds tests: pairs of positions."""
    spans, at = [], 0
    for found in TEST_ITEM.finditer(code):
        if found.start() >= at:
            at = end_of_block(code, found.end())
            spans.append((found.start(), at))
    return spans


class Source:
    """A file of Rust."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        self.text = path.read_text()

    @property
    def is_test(self):
        parts = Path(self.name).parts
        return "tests" in parts or parts[-1] == "tests.rs" or parts[-1].endswith("_tests.rs") \
            or any(part.startswith("fake_") for part in parts)

    @cached_property
    def code(self):
        """Without comments and strings."""
        return without_text(self.text)

    @cached_property
    def spans(self):
        return [(0, len(self.text))] if self.is_test else test_spans(self.code)

    def product(self, text):
        """A form of the source without its tests."""
        for start, end in self.spans:
            text = text[:start] + blanked(text[start:end]) + text[end:]
        return text

    @cached_property
    def product_code(self):
        return self.product(self.code)

    @cached_property
    def product_with_strings(self):
        return self.product(without_comments(self.text))

    @property
    def n_lines(self):
        return self.text.count("\n")

    @property
    def n_test_lines(self):
        return self.n_lines if self.is_test else sum(self.text.count("\n", *span) for span in self.spans)

    def line(self, at):
        return self.text.count("\n", 0, at) + 1

    def functions(self):
        """Functions with a body, outside tests."""
        code = self.product_code
        for found in FUNCTION.finditer(code):
            end = end_of_block(code, found.end())
            if code[end - 1] == "}":
                yield Function(found[1], self.line(found.start()), code.count("\n", found.start(), end) + 1)

    def types(self):
        """Names of types at the top level of the file, outside tests."""
        return [found[2] for found in TYPE.finditer(self.product_code)]


class Workspace:
    """The crates of a repository, without those that only test."""

    def __init__(self, root):
        self.root = root
        members = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["members"]
        self.crates = [name for name in members if not name.startswith("tests/")]

    def manifest(self, crate):
        return tomllib.loads((self.root / crate / "Cargo.toml").read_text())

    def sources(self, crate):
        src = self.root / crate / "src"
        return [Source(path, path.relative_to(self.root).as_posix()) for path in sorted(src.rglob("*.rs"))]


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


class Imports:
    """The modules of a crate, and what they import of each other.

    Reads `use` statements and inline paths that start with `crate::`, `super::` or `self::`. A name that a module
    re-exports counts as an import of the file that defines it. An edge between a module and its own `mod.rs` counts like
    any other.
    """

    def __init__(self, src, sources):
        self.text, self.file = {}, {}
        for source in sources:
            parts = list(source.path.relative_to(src).with_suffix("").parts)
            if parts[-1] in ("mod", "lib", "main"):
                parts.pop()
            if source.is_test:
                continue
            # A visibility such as `pub(in crate::http)` is not an import.
            self.text[tuple(parts)] = re.sub(r"\bpub\(in [^)]*\)", "pub", source.product_code)
            self.file[tuple(parts)] = source.name
        self.defined = {module: set(DEFINITION.findall(text)) for module, text in self.text.items()}
        self.uses = {module: self.statements(module) for module in self.text}

    def statements(self, module):
        """Each import as (absolute path, whether it is exported again)."""
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
            if name in self.defined[module]:
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


def components(edges):
    """Strongly connected components of a graph, those below first (Tarjan's algorithm, without recursion)."""
    index, low, on, stack, out = {}, {}, set(), [], []
    for root in sorted(edges):
        if root in index:
            continue
        work = [(root, iter(sorted(edges.get(root, ()))))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on.add(root)
        while work:
            node, rest = work[-1]
            for following in rest:
                if following not in index:
                    index[following] = low[following] = len(index)
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
                    group = stack[stack.index(node):]
                    del stack[stack.index(node):]
                    on.difference_update(group)
                    out.append(sorted(group))
    return out
