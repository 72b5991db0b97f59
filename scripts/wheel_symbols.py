#!/usr/bin/env python3
"""Fails if a library in a wheel needs a newer glibc than the wheel's tag promises: wheel_symbols.py WHEEL.

Prints the newest version that the libraries need of each family of symbols, and who needs it.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

TAG = re.compile(r"[-.]manylinux_(\d+)_(\d+)_")
NEEDED = re.compile(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+) ")  # in what `readelf --version-info` calls needs


def needs_of(library: pathlib.Path) -> list[tuple[str, tuple[int, ...]]]:
    """The families and versions of symbols that a library needs."""
    command = ["readelf", "--wide", "--version-info", str(library)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [(family, tuple(map(int, version.split(".")))) for family, version in NEEDED.findall(text)]


def main() -> int:
    """Returns the exit status."""
    wheel = pathlib.Path(sys.argv[1])
    tags = [tuple(map(int, tag)) for tag in TAG.findall(wheel.name)]
    if not tags:
        print(f"{wheel.name} has no manylinux tag: it promises nothing", file=sys.stderr)
        return 1
    newest: dict[str, tuple[tuple[int, ...], str]] = {}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".so" in pathlib.Path(name).name:
                for family, version in needs_of(pathlib.Path(archive.extract(name, folder))):
                    newest[family] = max(newest.get(family, ((), "")), (version, name))
    for family, (version, name) in newest.items():
        print(f"{family}_{'.'.join(map(str, version))} for {name}")
    if "GLIBC" not in newest:
        print(f"{wheel.name} has no library that needs glibc", file=sys.stderr)
        return 1
    if newest["GLIBC"][0] > min(tags):
        print(f"{wheel.name} promises glibc {'.'.join(map(str, min(tags)))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
