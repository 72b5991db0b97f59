"""docs/python.md is what the docstrings say, and every public name is in it."""

import pathlib
import subprocess
import sys

import halftone as ht

ROOT = pathlib.Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    subprocess.run([sys.executable, ROOT / "scripts/python_reference.py", "--check"], check=True)


def test_every_public_name_is_there():
    page = (ROOT / "docs/python.md").read_text()
    missing = [
        n for n in ht.__all__ if f"# {n}\n" not in page and f"`{n}`" not in page and n not in ("Error", "has_cuda")
    ]
    assert not missing
