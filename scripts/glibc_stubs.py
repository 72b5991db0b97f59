#!/usr/bin/env python3
"""Writes libraries to link with instead of this machine's glibc: glibc_stubs.py VERSION FOLDER [COMPILER].

What is linked with ``-L FOLDER`` needs no newer glibc than VERSION. glibc keeps the old version of a symbol whenever
it adds a new one, so that its own libraries tell what an older one had: a stub has every symbol in the newest version
that VERSION has, and lacks those that are newer, which are undefined at the link then. It has no code.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

# Linker names and the libraries behind them. Since 2.34 only the first two have more than leftovers.
LIBRARIES = {"c": "libc.so.6", "m": "libm.so.6", "pthread": "libpthread.so.0", "dl": "libdl.so.2", "rt": "librt.so.1"}
# Of `readelf --dyn-syms`: size, type, binding, visibility, section, name and version.
SYMBOL = re.compile(r"^ *\d+: \w+ +(\d+) (FUNC|IFUNC|OBJECT) +\w+ +\w+ +\d+ (\w+)@@?GLIBC_([\d.]+)$", re.MULTILINE)
LOADER = re.compile(r"\(NEEDED\).*\[(ld-linux[^]]*)\]")


def number(version: str) -> tuple[int, ...]:
    """What versions are compared by."""
    return tuple(map(int, version.split(".")))


def output_of(*command: str | pathlib.Path) -> str:
    """What a command prints; its failure ends this one."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def stub_of(library: pathlib.Path, newest: tuple[int, ...]) -> tuple[str, str]:
    """A stub of a library in assembler, and its version script."""
    symbols: dict[str, tuple[tuple[int, ...], str, str, str]] = {}
    for size, kind, name, version in SYMBOL.findall(output_of("readelf", "--wide", "--dyn-syms", library)):
        if symbols.get(name, ((),))[0] < number(version) <= newest:
            symbols[name] = number(version), version, "object" if kind == "OBJECT" else "function", size
    lines = [".data"]
    for name, (_, version, kind, size) in sorted(symbols.items()):
        lines += [f".globl stub_{name}", f".type stub_{name}, %{kind}", f".size stub_{name}, {size}"]
        lines += [f"stub_{name}:", f".symver stub_{name}, {name}@@@GLIBC_{version}"]
    versions = sorted({version for _, version, _, _ in symbols.values()}, key=number)
    return "\n".join(lines) + "\n", "".join(f"GLIBC_{version} {{}};\n" for version in versions)


def main() -> int:
    """Returns the exit status."""
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    newest, folder, compiler = number(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve(), (sys.argv[3:] or ["cc"])[0]
    folder.mkdir(parents=True, exist_ok=True)

    def find(name: str) -> pathlib.Path:
        path = pathlib.Path(output_of(compiler, f"-print-file-name={name}"))
        if not path.is_absolute():
            sys.exit(f"glibc_stubs.py: {compiler} has no {name}: this works where the C library is glibc.")
        return path

    loader = LOADER.search(output_of("readelf", "--wide", "--dynamic", find("libc.so.6")))[1]
    for name in [*LIBRARIES.values(), loader]:
        assembler, script = folder / f"{name}.s", folder / f"{name}.versions"
        for path, text in zip((assembler, script), stub_of(find(name), newest)):
            path.write_text(text, encoding="utf-8")
        flags = [f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
        output_of(compiler, "-shared", "-nostdlib", *flags, "-o", folder / name, assembler)
    for short, name in LIBRARIES.items():
        beside = f" {find('libc_nonshared.a')} AS_NEEDED ( {folder / loader} )" if short == "c" else ""
        (folder / f"lib{short}.so").write_text(f"GROUP ( {folder / name}{beside} )\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
