"""What docs/integrations.md, README.md and docs/recipe.md show works as it stands there, on a model in a folder."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tokenizers
import transformers as tf

from halftone.capture.__main__ import main

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/integrations.md").read_text()


@pytest.fixture
def my_model(tmp_path, monkeypatch, llama):
    """A folder with weights and a tokenizer of words."""
    words = ["<pad>", "<bos>", "low", "precision", "keys", "and", "values"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    llama.save_pretrained(tmp_path / "my-model")
    tf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>").save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)


def test_the_example(my_model, capsys):
    example = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(compile(example, "docs/integrations.md", "exec"), {})
    said = capsys.readouterr().out
    assert "low precision" in said and "bytes per token" in said


def test_the_command(my_model, capsys):
    pathlib.Path("book.txt").write_text("Low precision keys and values " * 300)
    line = re.search(r"^    python -m halftone.capture (.*)$", PAGE, re.MULTILINE)[1]
    assert main(line.split()) == 0
    assert "2 layers, 1024 tokens, 4.2 MB" in capsys.readouterr().out


def five_commands(page):
    """Those of a page, less the installation."""
    block = next(b for b in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if "halftone recipe" in b)
    install, *commands = block.splitlines()
    assert install.startswith("pip install") and len(commands) == 4
    return commands


def test_five_commands(my_model):
    """From a model in a folder to a recipe, what it costs, and a generation on it; and the program after them."""
    commands = five_commands("README.md")
    assert commands == five_commands("docs/recipe.md")
    pathlib.Path("book.txt").write_text("Low precision keys and values " * 300)
    path = os.pathsep.join([str(ROOT / "python"), *sys.path])
    said = []
    for command in commands:
        words = re.sub("^python ", f"{sys.executable} ", re.sub("^halftone ", f"{os.environ['HALFTONE_COMMAND']} ", command))
        run = subprocess.run(words, shell=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        assert run.returncode == 0, f"{command}: {run.stderr}"
        said.append(run.stdout)
    assert "Wrote recipe.json." in said[1] and "Wrote quality.json." in said[2]
    assert re.search(r"^recipe +\d+ +0\.0\d+ +\d", said[2], re.MULTILINE)
    assert said[3].startswith("low precision ")
    assert "The recipe" in pathlib.Path("report.html").read_text()
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/recipe.md").read_text(), re.DOTALL)[1]
    exec(compile(example, "docs/recipe.md", "exec"), {})
