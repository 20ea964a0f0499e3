#!/usr/bin/env python3
"""What a program and its libraries need of a system, read from their headers: which wheels and packages may say.

    elf.py wheel FILE...   the tag of a wheel, such as manylinux_2_35_x86_64. Refuses what no such tag covers
    elf.py cuda FILE...    the same of a wheel that depends on NVIDIA's wheels
    elf.py deb FILE...     the field Depends of a Debian package
    elf.py arch FILE...    their processor as Debian names it, such as amd64
    elf.py machine FILE... their processor as Linux names it, such as x86_64

A file that is not for Linux is a Mac's: its tag has the oldest macOS that the program's header names.
"""

import re
import struct
import subprocess
import sys
from pathlib import Path

# By the newest version of libstdc++'s symbols: Debian's version of libstdc++6 that brings it, and the first glibc whose
# manylinux policy promises it (PEP 600; auditwheel's policies).
LIBSTDCXX = {
    (3, 4, 19): ("4.8", (2, 17)),
    (3, 4, 22): ("6", (2, 24)),
    (3, 4, 24): ("8", (2, 27)),
    (3, 4, 28): ("10", (2, 31)),
    (3, 4, 29): ("11", (2, 34)),
    (3, 4, 30): ("12", (2, 35)),
    (3, 4, 31): ("13.1", (2, 39)),
    (3, 4, 32): ("13.2", (2, 39)),
    (3, 4, 33): ("14", (2, 39)),
}

# Libraries that every system with such a glibc has, as manylinux defines it; and the Debian package of each library.
SYSTEM = {
    "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}
# Libraries of NVIDIA's wheels of CUDA 13, in this folder of site-packages. A wheel that needs them depends on these packages.
OF_NVIDIA = {"libcudart.so.13": "nvidia-cuda-runtime", "libcublas.so.13": "nvidia-cublas", "libcublasLt.so.13": "nvidia-cublas"}
NVIDIA_FOLDER = "nvidia/cu13/lib"
# Only a driver brings it. The library that needs it is not loaded where there is none.
OF_DRIVER = {"libcuda.so.1"}
OF_DEBIAN = {"libgomp.so.1": "libgomp1", "libgcc_s.so.1": "libgcc-s1"}
MACHINES = {"Advanced Micro Devices X86-64": ("x86_64", "amd64"), "AArch64": ("aarch64", "arm64")}


class Unfit(Exception):
    """A program that the package may not carry."""


def readelf(option, path):
    command = ["readelf", "-W", option, str(path)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}).stdout


def version(text):
    return tuple(int(part) for part in text.split("."))


def newest(files, name):
    """The newest needed version of a name such as GLIBC, or None."""
    needed = (re.findall(rf"Name: {name}_([0-9.]+)\s", readelf("-V", path)) for path in files)
    return max((version(text) for found in needed for text in found), default=None)


def glibc(files):
    """The oldest glibc that has what is needed, and no less than manylinux2014's."""
    found = (newest(files, "GLIBC") or (2, 17))[:2]
    # Packed relocations are a need without a number.
    packed = any("GLIBC_ABI_DT_RELR" in readelf("-V", path) for path in files)
    return max(found, (2, 36) if packed else (2, 17))


def machine(files):
    found = {re.search(r"Machine:\s+(.*)", readelf("-h", path))[1].strip() for path in files}
    if len(found) != 1 or not found <= set(MACHINES):
        raise Unfit(f"no one kind of processor: {', '.join(sorted(found))}")
    return MACHINES[found.pop()]


def outside(files):
    """The libraries that are needed and not among the files. A program finds those beside it by its RUNPATH alone."""
    beside = {path.name for path in files}
    needed = {}
    for path in files:
        dynamic = readelf("-d", path)
        finds = "$ORIGIN" in "".join(re.findall(r"\(RU?N?PATH\).*", dynamic))
        for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
            if library not in beside or not finds:
                needed.setdefault(library, path.name)
    return needed


def libstdcxx(files):
    """What the newest symbols of libstdc++ need: Debian's version and glibc's, or None without any."""
    needed = newest(files, "GLIBCXX")
    if needed is None:
        return None
    row = next((row for known, row in sorted(LIBSTDCXX.items()) if known >= needed), None)
    if row is None:
        raise Unfit(f"GLIBCXX_{'.'.join(map(str, needed))} is newer than any that scripts/package/elf.py knows")
    return row


def wheel_tag(files, allowed=frozenset()):
    foreign = {library: user for library, user in outside(files).items() if library not in SYSTEM | allowed}
    if foreign:
        words = ", ".join(f"{user} needs {library}" for library, user in sorted(foreign.items()))
        raise Unfit(f"not every Linux has these libraries, so they must lie in lib: {words}")
    cxx = libstdcxx(files)
    major, minor = max(glibc(files), cxx[1] if cxx else (2, 17))
    return f"manylinux_{major}_{minor}_{machine(files)[0]}"


def of_nvidia(files):
    """NVIDIA's packages whose libraries are needed. Each library must look for them beside the wheel's own folder."""
    packages = set()
    for path in files:
        dynamic = readelf("-d", path)
        needed = {OF_NVIDIA[library] for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) if library in OF_NVIDIA}
        if needed and f"$ORIGIN/../../../{NVIDIA_FOLDER}" not in "".join(re.findall(r"\(RU?N?PATH\).*", dynamic)):
            raise Unfit(f"{path.name} does not look for NVIDIA's libraries in {NVIDIA_FOLDER} of site-packages")
        packages |= needed
    return packages


def cuda_tag(files):
    if not of_nvidia(files):
        raise Unfit(f"no file needs any of {', '.join(sorted(OF_NVIDIA))}: pack it without VARIANT=cuda")
    return wheel_tag(files, set(OF_NVIDIA) | OF_DRIVER)


def depends(files):
    packages = [f"libc6 (>= {'.'.join(map(str, glibc(files)))})"]
    cxx = libstdcxx(files)
    if cxx:
        packages.append(f"libstdc++6 (>= {cxx[0]})")
    for library, user in sorted(outside(files).items()):
        if library in OF_DEBIAN:
            packages.append(OF_DEBIAN[library])
        elif library not in SYSTEM:
            raise Unfit(f"{user} needs {library}, whose Debian package scripts/package/elf.py does not know")
    return ", ".join(packages)


def mac_tag(path):
    """From the load command LC_BUILD_VERSION of a 64-bit Mach-O file (mach-o/loader.h)."""
    data = path.read_bytes()[:1 << 16]
    n_commands, = struct.unpack_from("<I", data, 16)
    at = 32
    for _ in range(n_commands):
        if at + 16 > len(data):
            break
        command, size = struct.unpack_from("<II", data, at)
        if command == 0x32:
            oldest, = struct.unpack_from("<I", data, at + 12)
            # Since macOS 11 only the major version counts in a tag, so 13.3 is what every 14 has.
            return f"macosx_{(oldest >> 16) + (oldest & 0xffff > 0)}_0_arm64"
        at += max(size, 8)
    raise Unfit(f"{path} does not say which macOS it needs")


def tag(kind, files):
    """The tag of a wheel that carries these files; `kind` is a word of the command line."""
    # A file of a Mac begins so.
    if files[0].read_bytes()[:4] == b"\xcf\xfa\xed\xfe":
        return mac_tag(files[0])
    return {"wheel": wheel_tag, "cuda": cuda_tag}[kind](files)


def main():
    kind, files = sys.argv[1], [Path(name) for name in sys.argv[2:]]
    try:
        if kind in ("wheel", "cuda"):
            print(tag(kind, files))
        else:
            named = {"machine": lambda files: machine(files)[0], "arch": lambda files: machine(files)[1]}
            print({"deb": depends, **named}[kind](files))
    except Unfit as problem:
        sys.exit(f"package: {problem}")


if __name__ == "__main__":
    main()
