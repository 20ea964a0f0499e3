#!/usr/bin/env python3
"""Shows that each gate of scripts/gates.py lets a small workspace pass, and can fail."""
import tempfile
import unittest
from pathlib import Path

from gates import problems

CONFIG = """
crates = ["upper", "lower"]
dialects = ["lower/src/one", "lower/src/two"]
[words]
"README.md" = 5
[edges]
"lower/src/one" = "bodies"
[floors]
upper = ["roof", "cellar"]
lower = ["one", "two"]
"""
FILES = {
    "Cargo.toml": '[workspace]\nmembers = ["lower", "upper", "tests/harness"]\n',
    "README.md": "Four words, no more.\n",
    "ARCHITECTURE.md": "## To add X, touch Y\n\n| to add | files |\n|---|---|\n| a room | `upper/src/roof.rs`, `cellar.rs` next to it |\n",
    "scripts/gates.toml": CONFIG,
    "upper/Cargo.toml": '[package]\nname = "upper"\n[dependencies]\nlower = "1"\n',
    "upper/src/lib.rs": "mod roof;\nmod cellar;\n",
    "upper/src/roof.rs": "use super::cellar::Wine;\nfn drink(_: Wine) {}\n",
    "upper/src/cellar.rs": "pub struct Wine;\n",
    "lower/Cargo.toml": '[package]\nname = "lower"\n',
    "lower/src/lib.rs": "mod one;\nmod two;\n",
    "lower/src/one/mod.rs": 'pub struct Body;\nfn is_text(kind: &str) -> bool { kind == "text" }\n',
    "lower/src/two/mod.rs": "pub struct Body;\n",
}


ROOF = "upper/src/roof.rs"


def found(added=None, replaced=None):
    """The problems of the small workspace, with texts added to files and files replaced, both by path."""
    files = FILES | (replaced or {})
    for path, text in (added or {}).items():
        files[path] = files.get(path, "") + text
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return [problem for problem in problems(root) if problem]


class Gates(unittest.TestCase):
    def refused(self, words, added=None, replaced=None):
        every = found(added, replaced)
        self.assertEqual(len(every), 1, every)
        self.assertIn(words, every[0])

    def test_a_workspace_without_faults_passes(self):
        self.assertEqual(found(), [])

    def test_a_long_file_is_refused_and_tests_do_not_count(self):
        lines = "// A line.\n"
        self.refused("upper/src/roof.rs: 402 lines", {ROOF: lines * 400})
        self.assertEqual(found({ROOF: "#[cfg(test)]\nmod tests {\n" + lines * 400 + "}\n"}), [])

    def test_a_long_function_is_refused(self):
        self.refused("a function of 81 lines", {ROOF: "fn long() {\n" + "    drink();\n" * 79 + "}\n"})
        # A brace in a string or in a comment ends nothing.
        body = '    // }\n    let _ = ("}", \'}\', r#"}"#);\n'
        self.refused("a function of 82 lines", {ROOF: "fn long<'a>() {\n" + body * 40 + "}\n"})

    def test_a_name_with_two_meanings_is_refused(self):
        self.refused("Wine: a type's name with 2 meanings", {ROOF: "enum Wine {}\n"})
        self.refused("Body: a type's name with 2 meanings", {ROOF: "type Body = ();\n"})
        self.assertEqual(found({ROOF: "#[cfg(test)]\nstruct Wine;\n"}), [])

    def test_a_decision_on_a_string_is_refused(self):
        for line in [
            'if name == "red" {}', 'if "red" != name {}', 'match name { "red" => 1, _ => 2 }', 'match name {\n    "a" | "b" => 1,',
            'match name {\n    Some("red") if late => 1,', 'match name {\n    "a"\n    | "b" => 1,', 'matches!(name, Some("red" | "white"))',
            'match pair {\n    (_, "red") => 1,',
        ]:
            with self.subTest(line):
                self.refused("decisions on a string", {ROOF: line + "\n"})
        self.refused("decides by the words of an error", {ROOF: 'error.to_string().contains("red")\n'})
        for line in [
            'let name = "red";', 'match wine { Wine::Red => "red", _ => "white" }', '// name == "red"', 'assert(name, "red");',
            'if path.starts_with("/api") => {}', 'if code == "" {}', 'if cfg!(target_os = "macos") => 1,',
            '#[cfg(test)]\nfn test() { name == "red" }',
        ]:
            with self.subTest(line):
                self.assertEqual(found({ROOF: line + "\n"}), [])

    def test_an_exception_holds_for_its_figure_and_only_as_long_as_it_is_needed(self):
        entry = '[functions]\n"upper/src/roof.rs::long" = { n = 90, why = "a table" }\n'

        def with_function(n, entry=entry):
            return {"scripts/gates.toml": entry, ROOF: "fn long() {\n" + "    drink();\n" * (n - 2) + "}\n"}

        self.assertEqual(found(with_function(90)), [])
        self.refused("which may only shrink", with_function(91))
        self.refused("that nothing needs: remove it", with_function(80))
        self.refused("gives no reason", with_function(90, entry.replace('"a table"', '""')))

    def test_too_many_words_are_refused(self):
        self.refused("README.md: 6 words; 5 at most", {"README.md": "Two more.\n"})

    def test_a_crate_that_uses_one_above_it_is_refused(self):
        self.refused("upper stands above it", {"lower/Cargo.toml": '[dependencies]\nupper = "1"\n'})

    def test_a_crate_without_a_floor_is_refused(self):
        crate = {"third/Cargo.toml": '[package]\nname = "third"\n', "third/src/lib.rs": ""}
        members = {"Cargo.toml": '[workspace]\nmembers = ["lower", "upper", "third"]\n'}
        self.refused("third: this crate has no place", crate, members)

    def test_a_circle_of_files_and_an_import_that_runs_up_are_refused(self):
        every = found({"upper/src/cellar.rs": "use crate::roof::drink;\n"})
        self.assertEqual(len(every), 2, every)
        self.assertIn("a circle of imports: upper/src/cellar.rs -> upper/src/roof.rs", every[0])
        self.assertIn("upper: cellar -> roof: imports run up", every[1])
        self.assertEqual(found({"upper/src/cellar.rs": "#[cfg(test)]\nuse crate::roof::drink;\n"}), [])

    def test_a_room_without_a_floor_and_one_that_is_gone_are_refused(self):
        self.refused("the room attic has no place in [floors]", {"upper/src/attic.rs": "pub struct Dust;\n"})
        floors = {"scripts/gates.toml": CONFIG.replace('"cellar"]', '"cellar", "attic"]')}
        self.refused("names attic, a room that upper does not have", replaced=floors)

    def test_an_edge_that_compares_no_text_is_refused(self):
        edge = {"scripts/gates.toml": CONFIG.replace("[edges]", '[edges]\n"lower/src/two" = "bodies"')}
        self.refused("which decides on no string: remove it", replaced=edge)

    def test_a_row_that_names_a_file_that_is_not_there_is_refused(self):
        row = "| dust | `upper/src/roof.rs`, `attic.rs` next to it |\n"
        self.refused("names attic.rs, which is not there", {"ARCHITECTURE.md": row})
        self.refused("names upper/src/attic.rs, which", {"ARCHITECTURE.md": "| dust | `upper/src/attic.rs` |\n"})
        self.refused("is gone", replaced={"ARCHITECTURE.md": "# Architecture\n"})


if __name__ == "__main__":
    unittest.main()
