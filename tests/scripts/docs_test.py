#!/usr/bin/env python3
"""The pages name what is there: the map is the tree, and links and paths lead somewhere."""

from __future__ import annotations

import os
import pathlib
import re
import unittest
from typing import Iterator

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("include", "src", "python", "cli", "reference", "testing", "tests", "bench", "data", "docs", "scripts",
         "cmake", "requirements")  # fmt: skip
UNMAPPED = "tests/fuzz/corpus"


def folders() -> Iterator[str]:
    """Every folder with files in the rooms, as the map writes it."""
    for room in ROOMS:
        for folder, inner, files in os.walk(ROOT / room):
            inner[:] = [name for name in inner if name[0] not in "._"]
            path = pathlib.Path(folder).relative_to(ROOT).as_posix()
            if any(not name.startswith(".") for name in files) and not path.startswith(UNMAPPED):
                yield path + "/"


def pages() -> Iterator[pathlib.Path]:
    """The pages of the project."""
    yield from ROOT.glob("*.md")
    for room in ROOMS:
        yield from (ROOT / room).rglob("*.md")


def rows_of_the_map() -> Iterator[tuple[list[str], str]]:
    """Rows of the map of docs/architecture.md: folders, and what it says of them."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    house = text.partition("## The house")[2].partition("\n## ")[0]
    for line in house.splitlines():
        if line.startswith("| `"):
            yield re.findall(r"`([^`]+/)`", line.split("|")[1]), line.split("|")[2]


class DocsTest(unittest.TestCase):
    def test_the_map_is_the_tree(self) -> None:
        tree, there = set(folders()), {name for names, _ in rows_of_the_map() for name in names}
        self.assertEqual(sorted(tree - there), [], "not in the map of docs/architecture.md")
        self.assertEqual([name for name in sorted(there) if not (ROOT / name).is_dir()], [], "no such folder")

    def test_the_map_names_files_that_are_there(self) -> None:
        for names, text in rows_of_the_map():
            for file in re.findall(r"`([\w.*]+(?:\.(?:h|hpp|cc|cu|py)|_\*))`", text):
                with self.subTest(folder=names, file=file):
                    self.assertTrue([path for name in names for path in (ROOT / name).glob(file)])

    def test_links_lead_somewhere(self) -> None:
        for page in pages():
            text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
                if "://" not in target:
                    with self.subTest(page=page.name, target=target):
                        self.assertTrue((page.parent / target).exists())

    def test_named_paths_exist(self) -> None:
        for page in pages():
            if page.name == "CHANGELOG.md":  # tells of what was
                continue
            for name in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./*-]*)`", page.read_text(encoding="utf-8")):
                with self.subTest(page=page.name, path=name):
                    self.assertTrue(list(ROOT.glob(name.rstrip("/"))))

    def test_the_page_of_the_package_stands_alone(self) -> None:
        # An index shows it without the files beside it, and python/README.md is what pyproject.toml names.
        self.assertIn('readme = "python/README.md"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        text, home = ((ROOT / name).read_text(encoding="utf-8") for name in ("python/README.md", "README.md"))
        self.assertEqual([x for x in re.findall(r"\]\(([^)]+)\)", text) if "://" not in x], [])
        self.assertIn(re.search(r"```python\n.*?```", text, re.S)[0], home)
        for page in (text, home):
            self.assertRegex(page, r"package named `halftone` on\s+(PyPI|the\s+index)\s+is another project")

    def test_decisions_are_numbered_one_by_one(self) -> None:
        text = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
        numbers = [int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)]
        self.assertEqual(numbers, list(range(1, len(numbers) + 1)))
        self.assertGreater(len(numbers), 30)

    def test_the_umbrella_header_has_every_header(self) -> None:
        headers = {path.name for path in (ROOT / "include/halftone").glob("*.h")} | {"version.h"}
        text = (ROOT / "include/halftone/halftone.hpp").read_text(encoding="utf-8")
        self.assertEqual(set(re.findall(r'#include "halftone/(.*)"', text)), headers - {"halftone.h", "c_types.h"})


if __name__ == "__main__":
    unittest.main()
