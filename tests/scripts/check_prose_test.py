#!/usr/bin/env python3
"""scripts/check_prose.py reports prose that is too wide and wraps it without changing what it says."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/check_prose.py"
LONG = "word " * 30 + "end"  # 153 columns
WIDE = "w" * 120

# What has no place to break, or is no prose.
UNTOUCHED = f"""# A heading {LONG}

Short lines
stay where they are.

| a table | {LONG} |
| --- | --- |

    code {LONG}

    more of it {LONG}

```text
{LONG}

- {LONG}
```

- an item

      its code {LONG}

  ~~~
  {LONG}
  ~~~

[link]: https://example.org/{WIDE} "{LONG}"

<!-- {LONG}
{LONG} -->

[page](https://example.org/{WIDE})
{WIDE}
`a span {LONG}`
"""


class CheckProseTest(unittest.TestCase):
    def run_on(self, text: str, *options: str) -> tuple[int, list[str], str]:
        """Exit status, lines printed, and the file afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "page.md")
            page.write_text(text)
            run = subprocess.run(
                [sys.executable, str(SCRIPT), *options, folder], capture_output=True, text=True, check=False
            )
            self.assertEqual(run.stderr, "")
            lines = run.stdout.replace(f"{folder}/", "").splitlines()
            return run.returncode, lines, page.read_text()

    def expect(self, text: str, fixed: str) -> None:
        """``text`` is refused and becomes ``fixed``, which is accepted and stays as it is."""
        self.assertEqual(self.run_on(text)[0], 1)
        self.assertEqual(self.run_on(text, "--fix"), (0, [], fixed))
        self.assertEqual(self.run_on(fixed), (0, [], fixed))
        self.assertEqual(self.run_on(fixed, "--fix"), (0, [], fixed))

    def test_lines_are_named(self) -> None:
        lines = [f"page.md:{n}: 153 columns, but prose ends at 100: run `make format`" for n in (2, 5)]
        text = f"short\n{LONG}\n\n- item\n  {LONG[:-2]}\n"
        self.assertEqual(self.run_on(text), (1, lines, text))

    def test_what_is_no_prose(self) -> None:
        self.assertEqual(self.run_on(UNTOUCHED), (0, [], UNTOUCHED))
        self.assertEqual(self.run_on(UNTOUCHED, "--fix"), (0, [], UNTOUCHED))

    def test_exactly_the_columns(self) -> None:
        line = "a " * 48 + "bcde"
        self.assertEqual(len(line), 100)
        self.assertEqual(self.run_on(line)[0], 0)
        self.expect(line + "f\n", line[:-5] + "\nbcdef\n")

    def test_paragraphs(self) -> None:
        words = ("word " * 20).strip()  # 99 columns
        self.expect(f"{LONG}\ntail\n\nnext\n", f"{words}\n{'word ' * 10}end tail\n\nnext\n")

    def test_items_keep_their_margin(self) -> None:
        def item(first: str, rest: str) -> str:
            begin = len(first) + 5 * 19 - 1 <= 100
            self.assertTrue(begin)
            return f"{first}{('word ' * 19).strip()}\n{rest}{'word ' * 11}end\n"

        for first, rest in (("- ", "  "), ("12. ", "    "), ("  * ", "    "), ("> ", "> "), ("> - ", ">   ")):
            with self.subTest(first):
                self.expect(f"{first}{LONG}\n", item(first, rest))
        self.expect(f"- a\n- {LONG}\nlazy\n- b\n", "- a\n" + item("- ", "  ").replace("end", "end lazy") + "- b\n")
        self.expect(f"- a\n\n  {LONG}\n", "- a\n\n" + item("  ", "  "))

    def test_no_line_begins_a_block(self) -> None:
        for word in ("-", "+", "1.", "2)", "#", ">", "|", "=", "---", "<b>"):
            with self.subTest(word):
                fixed = f"{('word ' * 19).strip()}\nword {word} tail\n"
                self.expect(f"{'word ' * 20}{word} tail\n", fixed)

    def test_code_spans_stay_whole(self) -> None:
        self.expect(f"{'word ' * 19}`a span of code`, tail\n", f"{('word ' * 19).strip()}\n`a span of code`, tail\n")
        self.expect(f"{'word ' * 19}``a ` b c d e f g``\n", f"{('word ' * 19).strip()}\n``a ` b c d e f g``\n")

    def test_line_breaks_that_are_meant(self) -> None:
        words = ("word " * 20).strip()
        self.expect(f"short  \n{LONG}\\\nlast\n", f"short  \n{words}\n{'word ' * 10}end\\\nlast\n")


if __name__ == "__main__":
    unittest.main()
