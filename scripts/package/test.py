#!/usr/bin/env python3
"""Packs a stub program and installs, upgrades and removes it in each form, in folders of its own: seconds, no network.

`make package-long` does the same with the real program in whole systems (scripts/check-packages.py).
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import elf  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LINUX = sys.platform == "linux"


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, **options
    )
    return done.returncode, done.stdout


def done(*command, **options):
    code, output = run(*command, **options)
    assert code == 0, f"{command} ended with {code}:\n{output}"
    return output


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if not path.is_dir())


def compile_stub(folder, version, *flags):
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    shared = ["-shared", "-fPIC", "-g", "-x", "c", "-", "-Wl,-soname,libengine.so.0", "-o", folder / "lib/libengine.so.0"]
    done("cc", *shared, input="int engine(void) { return 1; }\n")
    rpath = "-Wl,-rpath,$ORIGIN/lib:$ORIGIN/../lib/baton"
    # -no-as-needed: the stub calls nothing of its library.
    linked = ["-Wl,--no-as-needed", folder / "lib/libengine.so.0"]
    done("cc", "-g", "-Wl,--build-id", f'-DVERSION="{version}"', HERE / "stub.c", *linked, rpath, *flags, "-o", folder / "baton")


@unittest.skipUnless(LINUX, "the packages of this system are those of Linux")
class Packages(unittest.TestCase):
    """Two versions, packed once for all tests."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp(prefix="baton-packages-"))
        notices = cls.folder / "notices"
        notices.write_text("notices\n")
        cls.out = {}
        for version in ("0.1.0", "0.2.0"):
            compile_stub(cls.folder / version, version)
            out = cls.out[version] = cls.folder / "out" / version
            done(HERE / "all.sh", cls.folder / version, out, cwd=ROOT, env={**os.environ, "NOTICES": str(notices)})

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def one(self, version, pattern):
        found = list(self.out[version].glob(pattern))
        self.assertEqual(len(found), 1, f"{pattern} in {files_below(self.out[version])}")
        return found[0]

    def test_the_checksums_name_every_package(self):
        lines = self.one("0.1.0", "SHA256SUMS-*").read_text().split("\n")[:-1]
        # Three packages, and the symbols.
        self.assertEqual(len(lines), 4)
        for line in lines:
            digest, name = line.split("  ")
            self.assertEqual(digest, hashlib.sha256((self.out["0.1.0"] / name).read_bytes()).hexdigest())

    def test_the_program_is_stripped_and_its_symbols_lie_apart(self):
        program = self.out["0.1.0"] / "tree/bin/baton"
        sections = done("readelf", "-W", "-S", program)
        self.assertNotIn(".debug_info", sections)
        self.assertNotIn(".symtab", sections)
        self.assertIn(".gnu_debuglink", sections)
        self.assertIn(".debug_info", done("readelf", "-W", "-S", self.out["0.1.0"] / "symbols/baton.debug"))
        self.assertNotIn(".debug_info", done("readelf", "-W", "-S", self.out["0.1.0"] / "tree/lib/baton/libengine.so.0"))

    def test_the_same_tree_gives_the_same_wheel(self):
        wheel = self.one("0.1.0", "*.whl")
        before = wheel.read_bytes()
        done(HERE / "wheel.py", self.out["0.1.0"], "0.1.0")
        self.assertEqual(before, wheel.read_bytes())

    def test_a_wheel_installs_runs_upgrades_and_leaves_nothing(self):
        venv = self.folder / "venv"
        done(sys.executable, "-m", "venv", venv)
        before = files_below(venv)
        pip = [venv / "bin/python", "-m", "pip", "--disable-pip-version-check"]
        for version in ("0.1.0", "0.2.0"):
            done(*pip, "install", "--no-index", self.one(version, "*.whl"))
            self.assertEqual(done(venv / "bin/baton", "--version"), f"baton {version}\n")
            self.assertTrue((venv / "share/man/man1/baton.1.gz").exists())
        done(*pip, "uninstall", "--yes", "baton-serve")
        self.assertEqual([file for file in files_below(venv) if file not in before and "__pycache__" not in file], [])

    def test_a_wheel_says_what_its_program_needs(self):
        wheel = self.one("0.1.0", "*.whl")
        tag = wheel.stem.removeprefix("baton_serve-0.1.0-")
        self.assertRegex(tag, r"^py3-none-manylinux_2_\d+_(x86_64|aarch64)$")
        with zipfile.ZipFile(wheel) as archive:
            self.assertIn(f"Tag: {tag}\n", archive.read("baton_serve-0.1.0.dist-info/WHEEL").decode())
            names = archive.namelist()
        self.assertIn("baton_serve-0.1.0.data/data/lib/baton/libengine.so.0", names)
        self.assertEqual(len(names), len(set(names)))

    def test_no_wheel_is_made_of_a_program_whose_library_lies_nowhere(self):
        folder = self.folder / "foreign"
        compile_stub(folder, "0.1.0")
        (folder / "bin").mkdir()
        (folder / "baton").rename(folder / "bin/baton")
        code, output = run(HERE / "elf.py", "wheel", folder / "bin/baton")
        self.assertEqual(code, 1)
        self.assertIn("baton needs libengine.so.0", output)
        # And none if it lies beside a program that does not look there.
        done("cc", '-DVERSION="1"', HERE / "stub.c", "-Wl,--no-as-needed", folder / "lib/libengine.so.0", "-o", folder / "bin/baton")
        code, output = run(HERE / "elf.py", "wheel", folder / "bin/baton", folder / "lib/libengine.so.0")
        self.assertEqual(code, 1, output)

    def test_the_tag_follows_the_newest_symbol(self):
        for needs, tag in [
            ({"GLIBC": (2, 2, 5)}, (2, 17)),
            ({"GLIBC": (2, 34)}, (2, 34)),
            ({"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30)}, (2, 35)),
            ({"GLIBC": (2, 39), "GLIBCXX": (3, 4, 20)}, (2, 39)),
        ]:
            original = elf.newest, elf.outside, elf.machine
            elf.newest, elf.outside, elf.machine = lambda _, name: needs.get(name), lambda _: {}, lambda _: ("x86_64", "amd64")
            try:
                self.assertEqual(elf.wheel_tag([]), "manylinux_{}_{}_x86_64".format(*tag))
                needs["GLIBCXX"] = (3, 5, 0)
                self.assertRaises(elf.Unfit, elf.wheel_tag, [])
            finally:
                elf.newest, elf.outside, elf.machine = original

    def dpkg(self, root, *command):
        """dpkg below a folder. Its scripts run outside of it, with DPKG_ROOT."""
        forced = ["--force-script-chrootless", "--force-depends", "--force-not-root", "--force-confold"]
        # Also without root: files of root are this user's.
        own = [] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user"]
        return done(*own, "dpkg", f"--root={root}", *forced, *command, env={**os.environ, "LC_ALL": "C"})

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg here")
    def test_a_deb_installs_upgrades_keeps_changes_and_leaves_nothing(self):
        root = self.folder / "root"
        (root / "var/lib/dpkg").mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
        for folder in ("info", "updates"):
            (root / "var/lib/dpkg" / folder).mkdir()
        outside_dpkg = lambda: [file for file in files_below(root) if not file.startswith("var/lib/dpkg/")]
        self.dpkg(root, "--install", self.one("0.1.0", "*.deb"))
        self.assertEqual(done(root / "usr/bin/baton", "--version"), "baton 0.1.0\n")
        for file in (
            "usr/lib/systemd/system/baton.service", "usr/lib/systemd/system/baton-node.service", "etc/baton/baton.toml",
            "usr/share/man/man1/baton.1.gz", "usr/share/bash-completion/completions/baton", "usr/share/doc/baton-serve/copyright",
        ):
            self.assertIn(file, outside_dpkg())
        unit = (root / "usr/lib/systemd/system/baton.service").read_text()
        self.assertIn("ExecStart=/usr/bin/baton serve --config /etc/baton/baton.toml", unit)
        self.assertNotIn("/usr/local", unit)

        config = root / "etc/baton/baton.toml"
        config.write_text("# mine\n")
        self.dpkg(root, "--install", self.one("0.2.0", "*.deb"))
        self.assertEqual(done(root / "usr/bin/baton", "--version"), "baton 0.2.0\n")
        self.assertEqual(config.read_text(), "# mine\n")

        (root / "etc/baton/cluster").mkdir()
        (root / "etc/baton/cluster/cluster.key").write_text("key")
        (root / "var/cache/baton/models").mkdir(parents=True)
        (root / "var/cache/baton/models/m.gguf").write_text("model")
        self.dpkg(root, "--remove", "baton-serve")
        self.assertEqual(outside_dpkg(), ["etc/baton/baton.toml", "etc/baton/cluster/cluster.key", "var/cache/baton/models/m.gguf"])
        self.dpkg(root, "--purge", "baton-serve")
        self.assertEqual(outside_dpkg(), [])

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg here")
    def test_an_upgrade_restarts_what_runs_and_a_first_installation_starts_nothing(self):
        fake = self.folder / "fake"
        fake.mkdir()
        for name in ("systemctl", "deb-systemd-invoke"):
            (fake / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "$CALLS"\n')
            (fake / name).chmod(0o755)
        namespace = ["unshare", "--mount"] + ([] if os.getuid() == 0 else ["--user", "--map-root-user"])
        calls = self.folder / "calls"

        def calls_of(script, *args):
            calls.write_text("")
            # A machine that runs systemd, for this script alone.
            inside = 'mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec "$@"'
            environment = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}", "CALLS": str(calls)}
            environment.pop("DPKG_ROOT", None)
            done(*namespace, "sh", "-c", inside, "sh", ROOT / "packaging/debian" / script, *args, env=environment)
            return calls.read_text().splitlines()

        if run(*namespace, "mount", "-t", "tmpfs", "none", "/run")[0] != 0:
            # .ci/run has found out what this machine does not allow.
            self.assertTrue("CI" not in os.environ or "namespaces" in os.environ.get("BATON_CI_LACKS", ""), "a mount namespace")
            self.skipTest("no mount namespaces here")
        reload, units = "systemctl --system daemon-reload", "baton.service baton-node.service"
        self.assertEqual(calls_of("postinst", "configure", "0.1.0"), [reload, f"deb-systemd-invoke try-restart {units}"])
        self.assertEqual(calls_of("postinst", "configure", ""), [reload])
        self.assertEqual(calls_of("prerm", "upgrade", "0.2.0"), [])
        self.assertEqual(calls_of("prerm", "remove"), [f"deb-systemd-invoke stop {units}"])
        self.assertEqual(calls_of("postrm", "remove"), [reload])

    def unpack(self, version):
        folder = self.folder / "unpacked"
        with tarfile.open(self.one(version, "*[!s].tar.gz")) as archive:
            archive.extractall(folder)
        return next(folder.glob(f"baton-{version}-*")) / "install.sh"

    def test_a_tarball_installs_upgrades_under_a_running_program_and_leaves_nothing(self):
        # A folder with a space, as a home folder on a Mac may have.
        prefix = self.folder / "home folder/.local"
        (prefix / "share").mkdir(parents=True)
        (prefix / "share/mine").write_text("mine")
        install = [self.unpack("0.1.0"), "--prefix", prefix]
        done(*install)
        first = files_below(prefix)
        done(*install)
        self.assertEqual(files_below(prefix), first)
        with subprocess.Popen([prefix / "bin/baton", "serve"], stdout=subprocess.PIPE, text=True) as running:
            self.assertEqual(running.stdout.readline(), "serving 0.1.0\n")
            # A file of the older version that the newer one does not have.
            listed = prefix / "share/baton/installed-files"
            (prefix / "lib/baton/libold.so").touch()
            listed.write_text(listed.read_text() + "lib/baton/libold.so\n")
            self.assertIn(f"Installed baton 0.2.0 in {prefix}", done(self.unpack("0.2.0"), "--prefix", prefix))
            self.assertIsNone(running.poll())
            running.kill()
        self.assertEqual(done(prefix / "bin/baton", "--version"), "baton 0.2.0\n")
        self.assertFalse((prefix / "lib/baton/libold.so").exists())
        done(self.unpack("0.2.0"), "--prefix", prefix, "--remove")
        self.assertEqual(files_below(prefix), ["share/mine"])
        self.assertEqual(sorted(path.name for path in prefix.iterdir()), ["share"])

    def test_a_broken_list_of_files_reaches_nothing_outside_the_prefix(self):
        prefix = self.folder / "prefix"
        done(self.unpack("0.1.0"), "--prefix", prefix)
        outside = self.folder / "outside"
        outside.write_text("mine")
        listed = prefix / "share/baton/installed-files"
        listed.write_text(listed.read_text() + f"../outside\n{outside}\n\n")
        done(self.unpack("0.1.0"), "--prefix", prefix, "--remove")
        self.assertTrue(outside.exists())

    def test_the_formula_has_the_checksums_of_its_tarballs(self):
        folder = self.folder / "release"
        folder.mkdir()
        for system in ("macos-arm64", "linux-x86_64", "linux-aarch64"):
            (folder / f"baton-0.1.0-{system}.tar.gz").write_text(system)
        done(HERE / "formula.sh", folder, "0.1.0", "https://example.invalid/v0.1.0")
        formula = (folder / "baton-serve.rb").read_text()
        self.assertNotIn("@", formula)
        for system in ("macos-arm64", "linux-x86_64", "linux-aarch64"):
            self.assertIn(hashlib.sha256(system.encode()).hexdigest(), formula)

    def test_the_notes_of_a_release_are_its_part_of_the_changelog(self):
        changelog = self.folder / "CHANGELOG.md"
        changelog.write_text("# Changelog\n\nWords.\n\n## 0.2.0\n\n- New.\n\n## 0.1.0\n\n- First.\n")
        self.assertEqual(done(HERE / "notes.py", changelog, "0.2.0"), "- New.\n")
        code, output = run(HERE / "notes.py", changelog, "0.3.0")
        self.assertEqual((code, "0.3.0" in output), (1, True))


class MacTags(unittest.TestCase):
    def test_the_tag_is_the_oldest_macos_of_the_header(self):
        header = bytes.fromhex("cffaedfe") + (0).to_bytes(12, "little") + (2).to_bytes(4, "little") + bytes(12)
        other = (0x19).to_bytes(4, "little") + (16).to_bytes(4, "little") + bytes(8)
        build = (0x32).to_bytes(4, "little") + (24).to_bytes(4, "little") + (1).to_bytes(4, "little") + (11 << 16).to_bytes(4, "little")
        with tempfile.NamedTemporaryFile() as file:
            file.write(header + other + build + bytes(8))
            file.flush()
            self.assertEqual(elf.mac_tag(Path(file.name)), "macosx_11_0_arm64")
            file.truncate(36)
            self.assertRaises(elf.Unfit, elf.mac_tag, Path(file.name))


class Image(unittest.TestCase):
    """With a docker that only takes notes."""

    def calls(self, *args):
        with tempfile.TemporaryDirectory() as folder:
            docker = Path(folder) / "docker"
            docker.write_text('#!/bin/sh\necho "$*" >> "$CALLS"\n')
            docker.chmod(0o755)
            notes = Path(folder) / "notes"
            known = {"REGISTRY": "images.example", "REPOSITORY": "Someone/Baton", "ACTOR": "someone", "TOKEN": "secret"}
            path = f"{folder}:{os.environ['PATH']}"
            done(HERE / "image.sh", *args, cwd=ROOT, env={**os.environ, **known, "PATH": path, "CALLS": str(notes)})
            text = notes.read_text()
        self.assertNotIn("secret", text)
        return text.splitlines()[1:]

    def test_an_image_is_a_draft_until_its_release_is_published(self):
        [built] = self.calls("draft", "1.2.3", "dist")
        self.assertEqual(re.findall(r"--tag (\S+)", built), ["images.example/someone/baton:1.2.3-draft"])
        [named] = self.calls("publish", "1.2.3", "latest")
        tags = "--tag images.example/someone/baton:1.2.3 --tag images.example/someone/baton:latest"
        self.assertEqual(named, f"buildx imagetools create {tags} images.example/someone/baton:1.2.3-draft")
        [early] = self.calls("publish", "1.3.0-rc.1", "")
        self.assertNotIn("latest", early)

    def test_the_workflows_push_drafts_and_publish_them_with_the_release(self):
        release, publish = ((ROOT / ".github/workflows" / name).read_text() for name in ("release.yml", "publish.yml"))
        self.assertIn("scripts/package/image.sh draft", release)
        self.assertNotRegex(release, r"docker (buildx|push)|image.sh publish")
        self.assertRegex(publish, r"on:\n  release:\n    types: \[published\]\n")
        self.assertIn("scripts/package/image.sh publish", publish)


if __name__ == "__main__":
    unittest.main()
