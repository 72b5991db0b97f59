#!/usr/bin/env python3
"""Fails if an #include of the house points up: check_includes.py [ROOT].

Prints each as `path:line: includes "x", which is above`; rooms beside each other count as above.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib
import re
import sys
from typing import Iterator

# The house, from the roof down: a room, and the rooms that its files may include besides their own, all of them
# further down. A room is one folder, or one file of it that stands above the others; `x/**` is x with everything in it.
# A line that begins with spaces goes on with the row above. A source file in any other folder is an error.
HOUSE = """
tests/**             bench/** cli/** testing/** reference src/** include/halftone
bench/**             testing reference src/** include/halftone

cli                  cli/** reference src/** include/halftone
cli/commands         cli/report cli/recipe cli/eval cli/cuda cli/bench cli/options cli/files cli/host cli/terminal
                     src/** include/halftone
cli/report           cli/recipe cli/eval cli/figures cli/options cli/files cli/host cli/terminal src/** include/halftone
cli/recipe           cli/eval cli/figures cli/options cli/files cli/host cli/terminal src/** include/halftone
cli/eval             cli/figures cli/options cli/files cli/host cli/terminal reference src/** include/halftone
cli/cuda             cli/bench cli/figures cli/options cli/files cli/host cli/terminal reference src/** include/halftone
cli/without_cuda     cli/bench include/halftone
cli/bench            cli/figures cli/options cli/files cli/host cli/terminal reference src/** include/halftone

cli/figures          cli/terminal
cli/options          cli/terminal reference src/** include/halftone
cli/files            cli/terminal reference include/halftone
cli/host             src/cpu src/plan include/halftone
cli/terminal

python/native        src/** include/halftone
python/portable

testing/runners.cc   testing/** reference src/format include/halftone
testing/cuda         testing reference src/format include/halftone
testing/without_cuda testing reference src/format include/halftone
testing              reference src/format include/halftone
reference            src/format include/halftone

src                  src/** include/halftone
src/c_api            include/halftone

src/cpu/backend.cc   src/cpu/** src/plan src/format include/halftone
src/cpu/attention    src/cpu src/plan src/format include/halftone
src/cpu              src/plan src/format include/halftone

src/cuda             src/cuda/** src/plan src/format include/halftone
src/cuda/decode/**   src/cuda/attention src/cuda/append src/cuda/device src/plan src/format include/halftone
src/cuda/prefill     src/cuda/attention src/cuda/dequantize src/cuda/device src/plan src/format include/halftone
src/cuda/latent      src/cuda/latent/** src/cuda/append src/cuda/attention src/cuda/device src/plan src/format
                     include/halftone
src/cuda/latent/bf16 src/cuda/latent/wide src/cuda/append src/cuda/attention src/cuda/device src/plan src/format
                     include/halftone
src/cuda/latent/wide src/cuda/append src/cuda/attention src/cuda/device src/plan src/format include/halftone
src/cuda/latent/copied src/cuda/attention src/cuda/device src/plan src/format include/halftone
src/cuda/latent/few  src/cuda/append src/cuda/attention src/cuda/device src/plan src/format include/halftone
src/cuda/backward    src/cuda/attention src/cuda/device src/plan src/format include/halftone
src/cuda/schedule    src/cuda/attention src/cuda/device src/plan src/format include/halftone
src/cuda/append      src/cuda/attention src/cuda/device src/plan src/format include/halftone
src/cuda/attention   src/cuda/device src/plan src/format include/halftone

src/cuda/dequantize  src/cuda/device src/plan src/format include/halftone
src/cuda/merge       src/cuda/device src/plan src/format include/halftone
src/cuda/device      src/plan src/format include/halftone

src/plan             src/format include/halftone
src/format           include/halftone
include/halftone
"""

SOURCES = (".h", ".hpp", ".cc", ".c", ".cu", ".cuh")
INCLUDE_FOLDERS = ("", "include", "src")  # what CMakeLists.txt gives the compiler
INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)[">]')


def matches(folder: str, room: str) -> bool:
    """Whether ``folder`` belongs to ``room``."""
    return folder == room or room.endswith("/**") and f"{folder}/".startswith(room[:-2])


class House:
    """The rooms of a table in the form of ``HOUSE``."""

    def __init__(self, table: str) -> None:
        rows = [line.split() for line in re.sub(r"\n +", " ", table).splitlines() if line.strip()]
        self.below: dict[str, list[str]] = {room: rooms for room, *rooms in rows}

    def rising(self) -> Iterator[tuple[str, str]]:
        """Rooms of which a row says that it may include one above. Where there are none, no circle of rooms passes."""
        above: list[str] = []
        for room, rooms in self.below.items():
            yield from ((room, up) for other in rooms for up in above if matches(up.removesuffix("/**"), other))
            above.append(room)

    def room_of(self, path: pathlib.PurePath) -> str | None:
        """The room that a file is in."""
        if path.as_posix() in self.below:
            return path.as_posix()
        return next((room for room in self.below if matches(path.parent.as_posix(), room)), None)

    def allows(self, room: str, folder: str) -> bool:
        """Whether files of ``room`` may include those of ``folder``."""
        return any(matches(folder, other) for other in [room, *self.below[room]])


def source_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Every source file under ``root`` but for what was built there."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not fnmatch.fnmatch(f, ".*") and f != "build")
        yield from (pathlib.Path(folder, name) for name in sorted(names) if name.endswith(SOURCES))


def included_file(root: pathlib.Path, path: pathlib.Path, quote: str, name: str) -> pathlib.Path | None:
    """The file of the house that an #include in ``path`` finds, relative to ``root``; None: another library's."""
    folders = [path.parent] if quote == '"' else []
    for folder in [*folders, *(root / f for f in INCLUDE_FOLDERS)]:
        found = pathlib.Path(os.path.normpath(folder / name))
        if found.is_file() and found.is_relative_to(root):
            return found.relative_to(root)
    return None


def problems(root: pathlib.Path, house: House) -> Iterator[str]:
    """What is wrong under ``root``, a line each."""
    nameless = set()
    for path in source_files(root):
        here = path.relative_to(root)
        folder = here.parent.as_posix()
        room = house.room_of(here)
        if room is None:
            if folder not in nameless:
                yield f"{here}:1: is in {folder}, which has no rule: add one to scripts/check_includes.py"
            nameless.add(folder)
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            found = match and included_file(root, path, *match.groups())
            if found and not house.allows(room, found.parent.as_posix()):
                yield f'{here}:{number}: includes "{match[2]}", which is above'


def main() -> int:
    """Returns the exit status."""
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]).resolve()
    house = House(HOUSE)
    found = [f"HOUSE lets {room} include {up}, which is above" for room, up in house.rising()]
    found += problems(root, house)
    print("\n".join(found) or "every #include points down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
