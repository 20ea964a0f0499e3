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


def compile_cuda_stub(folder, version, *flags):
    """A stub as scripts/cuda/build.sh makes it: its library needs NVIDIA's, which lie beside it, and looks in NVIDIA's wheels, too."""
    (folder / "lib").mkdir(parents=True)
    for library in elf.OF_NVIDIA:
        done("cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{library}", "-o", folder / "lib" / library)
    (folder / "lib/NVIDIA-LICENCE.txt").write_text("NVIDIA's\n")
    rpath = flags or [f"-Wl,-rpath,$ORIGIN:$ORIGIN/../../../{elf.NVIDIA_FOLDER}"]
    needed = ["-Wl,--no-as-needed", folder / "lib/libcudart.so.13", folder / "lib/libcublas.so.13"]
    done("cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libengine.so.0", "-x", "none", *needed, *rpath, "-o", folder / "lib/libengine.so.0")
    linked = ["-Wl,--no-as-needed", folder / "lib/libengine.so.0", "-Wl,-rpath,$ORIGIN/lib:$ORIGIN/../lib/baton", "-Wl,--allow-shlib-undefined"]
    done("cc", f'-DVERSION="{version}"', HERE / "stub.c", *linked, f"-Wl,-rpath-link,{folder}/lib", "-o", folder / "baton")
    (folder / "nvidia-wheels.txt").write_text("nvidia-cuda-runtime>=13.5,<14\nnvidia-cublas>=13.10,<14\n")


def fake_wheel(folder, name, version, files):
    """A wheel of these files, by their paths in it."""
    info = f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, source in files.items():
            archive.write(source, path)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        records = [*files, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in records))
    return wheel


@unittest.skipUnless(LINUX, "the packages of this system are those of Linux")
class CudaWheel(unittest.TestCase):
    """The wheel that depends on NVIDIA's wheels. Theirs are empty libraries of the same names."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="baton-cuda-"))
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "notices").write_text("notices\n")

    def pack(self, kinds="wheel"):
        environment = {**os.environ, "NOTICES": str(self.folder / "notices"), "VARIANT": "cuda", "KINDS": kinds}
        return run(HERE / "all.sh", self.folder / "build", self.folder / "out", cwd=ROOT, env=environment)

    def test_it_finds_nvidias_libraries_in_their_wheels(self):
        compile_cuda_stub(self.folder / "build", "0.1.0")
        code, output = self.pack("tarball wheel")
        self.assertEqual(code, 0, output)
        [wheel] = (self.folder / "out").glob("*.whl")
        self.assertRegex(wheel.name, r"^baton_serve_cuda-0\.1\.0-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl$")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = archive.read("baton_serve_cuda-0.1.0.dist-info/METADATA").decode()
        self.assertEqual([name for name in names if "libcu" in name or "NVIDIA" in name], [])
        self.assertEqual(
            re.findall(r"^Requires-Dist: (nvidia.*)$", metadata, re.M), ["nvidia-cuda-runtime>=13.5,<14", "nvidia-cublas>=13.10,<14"]
        )
        # The tarball brings them.
        with tarfile.open(next((self.folder / "out").glob("*-cuda.tar.gz"))) as archive:
            self.assertEqual(len([name for name in archive.getnames() if "/lib/baton/libcu" in name]), 3)

        shop = self.folder / "shop"
        shop.mkdir()
        at = lambda *libraries: {f"{elf.NVIDIA_FOLDER}/{library}": self.folder / "build/lib" / library for library in libraries}
        fake_wheel(shop, "nvidia_cuda_runtime", "13.5.1", at("libcudart.so.13"))
        fake_wheel(shop, "nvidia_cublas", "13.10.1", at("libcublas.so.13", "libcublasLt.so.13"))
        shutil.copy(wheel, shop)
        venv = self.folder / "venv"
        done(sys.executable, "-m", "venv", venv)
        before = files_below(venv)
        pip = [venv / "bin/python", "-m", "pip", "--disable-pip-version-check"]
        done(*pip, "install", "--no-index", "--find-links", shop, "baton-serve-cuda")
        # The build's own libraries must not help.
        shutil.rmtree(self.folder / "build")
        self.assertEqual(done(venv / "bin/baton", "--version"), "baton 0.1.0\n")
        with subprocess.Popen([venv / "bin/baton", "serve"], stdout=subprocess.PIPE, text=True) as running:
            self.assertEqual(running.stdout.readline(), "serving 0.1.0\n")
            # A signal reaches the program itself.
            self.assertTrue(os.readlink(f"/proc/{running.pid}/exe").endswith("site-packages/baton_serve_cuda/bin/baton"))
            running.terminate()
        done(*pip, "uninstall", "--yes", "nvidia-cublas")
        code, output = run(venv / "bin/baton", "--version")
        self.assertIn("libcublas.so.13", output)
        self.assertNotEqual(code, 0)
        done(*pip, "uninstall", "--yes", "baton-serve-cuda", "nvidia-cuda-runtime")
        self.assertEqual([file for file in files_below(venv) if file not in before and "__pycache__" not in file], [])

    def test_none_is_made_of_a_library_that_does_not_look_there_or_needs_nothing_of_nvidias(self):
        compile_cuda_stub(self.folder / "build", "0.1.0", "-Wl,-rpath,$ORIGIN")
        code, output = self.pack()
        self.assertEqual(code, 1, output)
        self.assertIn("libengine.so.0 does not look for NVIDIA's libraries", output)
        shutil.rmtree(self.folder / "build")
        compile_stub(self.folder / "build", "0.1.0")
        code, output = self.pack()
        self.assertEqual(code, 1, output)
        self.assertIn("no file needs any of libcublas.so.13", output)

    def test_none_is_made_without_the_versions_of_nvidias_wheels(self):
        compile_cuda_stub(self.folder / "build", "0.1.0")
        (self.folder / "build/nvidia-wheels.txt").write_text("nvidia-cublas>=13.10,<14\n")
        code, output = self.pack()
        self.assertEqual(code, 1, output)
        self.assertIn("needed are ['nvidia-cublas', 'nvidia-cuda-runtime']", output)


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
            metadata = archive.read("baton_serve-0.1.0.dist-info/METADATA").decode()
        self.assertIn("baton_serve-0.1.0.data/data/lib/baton/libengine.so.0", names)
        self.assertEqual(len(names), len(set(names)))
        licences = [name.rsplit("/", 1)[1] for name in names if "/licenses/" in name]
        self.assertEqual(re.findall(r"^License-File: (.*)$", metadata, re.M), licences)
        # Its own licence, which is not Baton's.
        brings_gomp = "baton_serve-0.1.0.data/data/lib/baton/libgomp.so.1" in names
        self.assertEqual("LICENSE-libgomp" in licences, brings_gomp)
        self.assertEqual("GPL-3.0-or-later WITH GCC-exception-3.1" in metadata, brings_gomp)

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg here")
    def test_packages_say_the_programs_processor_and_not_this_machines(self):
        # `make arm` packs a program of Arm; here the stub's headers say that it is one.
        out = self.folder / "arm"
        shutil.copytree(self.out["0.1.0"] / "tree", out / "tree")
        programs = [out / "tree/bin/baton", *(out / "tree/lib/baton").iterdir()]
        for program in programs:
            data = bytearray(program.read_bytes())
            data[18:20] = (183).to_bytes(2, "little")
            program.write_bytes(data)
        self.assertEqual(done(HERE / "elf.py", "machine", programs[0]), "aarch64\n")
        self.assertTrue(done(HERE / "wheel.py", out, "0.1.0").endswith("_aarch64.whl\n"))
        deb = done(HERE / "deb.sh", out, "0.1.0").strip()
        self.assertTrue(deb.endswith("/baton-serve_0.1.0_arm64.deb"), deb)
        self.assertEqual(done("dpkg-deb", "--field", deb, "Architecture"), "arm64\n")
        # One package of two kinds of processors is refused.
        code, output = run(HERE / "elf.py", "arch", programs[0], self.out["0.1.0"] / "tree/bin/baton")
        self.assertEqual(code, 1, output)
        self.assertIn("no one kind of processor", output)

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg here")
    def test_a_release_is_newer_than_what_was_tried_before_it(self):
        out = self.folder / "tried"
        shutil.copytree(self.out["0.1.0"] / "tree", out / "tree")
        debs = [done(HERE / "deb.sh", out, version).strip() for version in ("0.3.0-rc.1", "0.3.0")]
        # Hosts of downloads rename files with a tilde.
        self.assertTrue(Path(debs[0]).name.startswith("baton-serve_0.3.0-rc.1_"), debs)
        tried, final = (done("dpkg-deb", "--field", deb, "Version").strip() for deb in debs)
        done("dpkg", "--compare-versions", tried, "lt", final)
        for version, expected in [("0.3.0-rc.1", "0.3.0rc1"), ("0.3.0-alpha.12", "0.3.0a12"), ("0.3.0-beta.2", "0.3.0b2"), ("0.3.0.post1", "0.3.0.post1")]:
            self.assertIn(f"/baton_serve-{expected}-py3-none-", done(HERE / "wheel.py", out, version))
        for version in ("0.3.0-nightly", "0.3.0+later", "0.3"):
            code, output = run(HERE / "wheel.py", out, version)
            self.assertEqual((code, f"{version} is no version of a wheel" in output), (1, True), output)

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
        self.assertEqual([file for file in outside_dpkg() if "gomp" in file], [], "it is Debian's package")
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
        # As systemd makes them for a unit whose user exists only while it runs.
        written = {"var/cache": "models/m.gguf", "var/lib": "usage.sqlite3"}
        for folder, file in written.items():
            path = root / folder / "private/baton" / file
            path.parent.mkdir(parents=True)
            path.write_text("theirs")
            (root / folder / "baton").symlink_to("private/baton")
        self.dpkg(root, "--remove", "baton-serve")
        kept = [f"{folder}/private/baton/{file}" for folder, file in written.items()]
        self.assertEqual(outside_dpkg(), ["etc/baton/baton.toml", "etc/baton/cluster/cluster.key", *kept])
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
        # The program bounds the file that the service logs to.
        self.assertRegex(formula, r'\n    run \[.*"--log-file", var/"log/baton\.log"\]\n')
        self.assertIn('error_log_path var/"log/baton.log"', formula)
        for system in ("macos-arm64", "linux-x86_64", "linux-aarch64"):
            self.assertIn(hashlib.sha256(system.encode()).hexdigest(), formula)

    def test_the_notes_of_a_release_are_its_part_of_the_changelog(self):
        changelog = self.folder / "CHANGELOG.md"
        changelog.write_text("# Changelog\n\nWords.\n\n## 0.2.0\n\n- New.\n\n## 0.1.0\n\n- First.\n")
        self.assertEqual(done(HERE / "notes.py", changelog, "0.2.0"), "- New.\n")
        # A version's release candidates are not that version.
        changelog.write_text("# Changelog\n\n## [v0.3.0-rc.1] - 2026-12-01\n\n- Tried.\n")
        self.assertEqual(done(HERE / "notes.py", changelog, "0.3.0-rc.1"), "- Tried.\n")
        code, output = run(HERE / "notes.py", changelog, "0.3.0")
        self.assertEqual((code, "0.3.0" in output), (1, True))


@unittest.skipUnless(LINUX, "the packages of this system are those of Linux")
class ReleaseJobs(unittest.TestCase):
    """The steps of release.yml on a stub, which is there instead of `build`."""

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="baton-release-"))
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "notices").write_text("notices\n")

    def step(self, *args, **more):
        environment = {**os.environ, "FOLDER": str(self.folder), "NOTICES": str(self.folder / "notices"), **more}
        return run(ROOT / "scripts/release.sh", *args, env=environment)

    def check(self, kind, packages):
        self.assertEqual(self.step("answers", kind, TAG="v0.1.0")[0], 0)
        code, output = self.step("answers", kind, TAG="v0.2.0")
        self.assertEqual((code, "the tag is v0.2.0" in output), (1, True), output)
        code, output = self.step("pack", kind)
        self.assertEqual(code, 0, output)
        found = [path.name for path in (self.folder / "dist").iterdir() if path.suffix in (".gz", ".deb", ".whl") and "symbols" not in path.name]
        self.assertEqual(len(found), len(packages), found)
        for pattern in packages:
            self.assertTrue(any(re.fullmatch(pattern, name) for name in found), (pattern, found))
        code, output = self.step("install", kind)
        self.assertEqual(code, 0, output)
        self.assertIn("baton 0.1.0", output)

    @unittest.skipUnless(shutil.which("dpkg-deb"), "no dpkg here")
    def test_the_steps_of_a_processor_pack_each_form(self):
        compile_stub(self.folder / "bundle", "0.1.0")
        self.check(f"linux-{os.uname().machine}-cpu", [r"baton-0\.1\.0-linux-\w+\.tar\.gz", r"baton-serve_.*\.deb", r"baton_serve-.*\.whl"])

    def test_the_steps_of_cuda_pack_a_tarball_and_a_wheel(self):
        compile_cuda_stub(self.folder / "bundle", "0.1.0")
        self.check(f"linux-{os.uname().machine}-cuda", [r"baton-0\.1\.0-linux-\w+-cuda\.tar\.gz", r"baton_serve_cuda-.*\.whl"])

    def test_a_tag_that_nothing_names_is_refused_before_hours_of_building(self):
        version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
        self.assertEqual(self.step("check"), (0, ""))
        code, output = self.step("check", TAG="v999.0.0")
        self.assertEqual((code, output), (1, f"release: Cargo.toml has version {version}, and the tag is v999.0.0\n"))
        # The version's changes are named when it is released.
        named = f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
        code, output = self.step("check", TAG=f"v{version}")
        self.assertEqual((code, f"no heading for {version}" in output), (0, False) if named else (1, True), output)

    def test_the_workflow_runs_steps_that_there_are(self):
        workflow = (ROOT / ".github/workflows/release.yml").read_text()
        steps = re.findall(r"scripts/release\.sh (\S+)", workflow)
        self.assertEqual(steps, ["check", "build", "answers", "pack", "install", "describe"])
        kinds = re.findall(r"- \{ name: (\S+),", workflow)
        self.assertEqual(len(kinds), 5)
        # An unknown kind is refused before anything is built.
        code, output = self.step("build", "windows-x86_64-cpu")
        self.assertEqual((code, output), (2, "release: there is no kind windows-x86_64-cpu\n"))
        self.assertEqual(self.step("publish", "")[0], 2)


class MacTags(unittest.TestCase):
    def test_the_tag_is_the_oldest_macos_of_the_header(self):
        header = bytes.fromhex("cffaedfe") + (0).to_bytes(12, "little") + (2).to_bytes(4, "little") + bytes(12)
        other = (0x19).to_bytes(4, "little") + (16).to_bytes(4, "little") + bytes(8)
        build = (0x32).to_bytes(4, "little") + (24).to_bytes(4, "little") + (1).to_bytes(4, "little")
        with tempfile.NamedTemporaryFile() as file:
            for oldest, tag in [(11 << 16, "macosx_11_0_arm64"), (13 << 16 | 3 << 8, "macosx_14_0_arm64")]:
                file.seek(0)
                file.write(header + other + build + oldest.to_bytes(4, "little") + bytes(8))
                file.flush()
                self.assertEqual(elf.mac_tag(Path(file.name)), tag)
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
        image = "images.example/someone/baton"
        kinds = [("release", ""), ("cuda", "-cuda")]
        for (file, kind), built in zip(kinds, self.calls("draft", "1.2.3", "dist"), strict=True):
            self.assertEqual(re.findall(r"-f (\S+) --tag (\S+)", built), [(f"packaging/Containerfile.{file}", f"{image}:1.2.3{kind}-draft")])
        for (_, kind), named in zip(kinds, self.calls("publish", "1.2.3", "latest"), strict=True):
            tags = f"--tag {image}:1.2.3{kind} --tag {image}:latest{kind}"
            self.assertEqual(named, f"buildx imagetools create {tags} {image}:1.2.3{kind}-draft")
        for early in self.calls("publish", "1.3.0-rc.1", ""):
            self.assertNotIn("latest", early)

    def test_the_workflows_push_drafts_and_publish_them_with_the_release(self):
        release, publish = ((ROOT / ".github/workflows" / name).read_text() for name in ("release.yml", "publish.yml"))
        self.assertIn("scripts/package/image.sh draft", release)
        self.assertNotRegex(release, r"docker (buildx|push)|image.sh publish")
        self.assertRegex(publish, r"on:\n  release:\n    types: \[published\]\n")
        self.assertIn("scripts/package/image.sh publish", publish)


if __name__ == "__main__":
    unittest.main()
