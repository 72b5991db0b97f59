#!/usr/bin/env python3
"""Fails if prose in a Markdown file is wider than 100 columns: check_prose.py [--fix] [FILE or FOLDER]...

Without a name, every .md file of the project. Prints each line as `path:line: ...`; --fix wraps the paragraphs that
have such lines instead. Tables, code blocks, headings, HTML and what has no place to break may be wider.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import pathlib
import re
import sys
from typing import Iterator

COLUMNS = 100
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:.*?[^`])?\1(?!`)")
# The margin of a paragraph: indentation, quote, and the marker of a list item.
MARGIN = re.compile(r"(\s*(?:> ?)*)((?:[-*+]|\d{1,9}[.)])\s+)?")
# Lines that are no prose: headings, table rows, HTML, rules, definitions of links.
VERBATIM = re.compile(r"\s*(?:#{1,6}\s|\||<|\[[^\]]+\]:\s|(?:[-*_=]\s*){3,}$)")
# Words that would begin a list item, a heading, a quote, a table or a rule if they began a line.
BLOCK_WORD = re.compile(r"(?:[-*+>|]|#{1,6}|\d{1,9}[.)]|=+|-+|>.*|\|.*|<.*|`{3,}.*|~{3,}.*)$")


def words_of(text: str) -> list[str]:
    """The pieces between which a line may end: code spans stay whole."""
    keep: list[str] = []

    def hide(match: re.Match[str]) -> str:
        keep.append(match[0])
        return f"\0{len(keep) - 1}\0"

    words: list[str] = []
    for word in CODE_SPAN.sub(hide, text).split():
        word = re.sub("\0(\\d+)\0", lambda m: keep[int(m[1])], word)
        if words and BLOCK_WORD.match(word):
            words[-1] += " " + word
        else:
            words.append(word)
    return words


def fill(words: list[str], first: str, rest: str) -> list[str]:
    """Lines of at most COLUMNS: the first one behind margin ``first``, the others behind ``rest``."""
    lines, line = [], first
    for word in words:
        begun = line not in (first, rest)
        if begun and len(line) + 1 + len(word) > COLUMNS:
            lines.append(line)
            line = rest + word
        else:
            line += (" " if begun else "") + word
    return [*lines, line]


def wrapped(lines: list[str]) -> list[str]:
    """A paragraph, wrapped if one of its lines is too wide."""
    if all(len(line) <= COLUMNS for line in lines):
        return lines
    margin = MARGIN.match(lines[0])
    assert margin is not None  # it matches the empty string
    first, rest = margin[0], margin[1] + " " * len(margin[2] or "")
    result: list[str] = []
    text = ""
    for number, line in enumerate(lines):
        text += " " + (line[len(first) :] if number == 0 else re.sub(r"^\s*(?:> ?)*", "", line))
        hard = re.search(r"(?: {2,}|\\)$", line)  # a line break that is meant
        if hard or number + 1 == len(lines):
            filled = fill(words_of(text), first if not result else rest, rest)
            result += [*filled[:-1], filled[-1].removesuffix("\\") + (hard[0] if hard else "")]
            text = ""
    return result


def paragraphs(lines: list[str]) -> Iterator[tuple[int, list[str], bool]]:
    """Runs of lines with the number of their first one, from 0, and whether they are prose."""
    begin, fence, blank, html, item = 0, "", True, False, 0

    for number, line in enumerate(lines):
        mark = FENCE.match(line)
        indent = len(line) - len(line.lstrip())
        was_blank, blank = blank, not line.strip()
        if fence:  # until its end
            prose = False
            if mark and mark[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        elif mark:
            prose, fence = False, mark[1]
        else:
            html = not blank and (html or line.lstrip().startswith("<"))  # until the next blank line
            margin = MARGIN.match(line)
            starts_item = bool(margin and margin[2])
            if not blank and was_blank and indent < item and not starts_item:
                item = 0  # the list has ended
            code = indent >= item + 4 and (was_blank or number == begin)
            prose = not (blank or html or code or VERBATIM.match(line))
            if prose and starts_item and margin:
                item = len(margin[0])
            if prose and not starts_item and number > begin:
                continue  # of the same paragraph
        if number > begin:
            yield begin, lines[begin:number], True
        begin = number
        if not prose:
            yield begin, lines[begin : number + 1], False
            begin = number + 1
    if begin < len(lines):
        yield begin, lines[begin:], True


def wrap(text: str) -> str:
    """A Markdown text with its prose wrapped."""
    lines: list[str] = []
    for _, part, prose in paragraphs(text.split("\n")):
        lines += wrapped(part) if prose else part
    return "\n".join(lines)


def problems(text: str) -> Iterator[tuple[int, int]]:
    """Line, from 1, and width of each line that should have been wrapped."""
    for begin, part, prose in paragraphs(text.split("\n")):
        if prose and wrapped(part) != part:
            yield from ((begin + i + 1, len(line)) for i, line in enumerate(part) if len(line) > COLUMNS)


def markdown_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Every .md file under ``root`` but for what was built there."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not fnmatch.fnmatch(f, ".*") and f != "build")
        yield from (pathlib.Path(folder, name) for name in sorted(names) if name.endswith(".md"))


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", type=pathlib.Path, metavar="FILE or FOLDER")
    parser.add_argument("--fix", action="store_true", help="wrap instead of failing")
    arguments = parser.parse_args()
    here = pathlib.Path.cwd()
    status = 0
    for name in arguments.names or [pathlib.Path(__file__).resolve().parents[1]]:
        for path in markdown_files(name) if name.is_dir() else [name]:
            text = path.read_text(encoding="utf-8")
            if arguments.fix:
                if (new := wrap(text)) != text:
                    path.write_text(new, encoding="utf-8")
                continue
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            for line, width in problems(text):
                print(f"{shown}:{line}: {width} columns, but prose ends at {COLUMNS}: run `make format`")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
