"""What docs/integrations.md shows works as it stands there, on a model in a folder."""

import pathlib
import re

import pytest
import tokenizers
import transformers as tf

from halftone.capture.__main__ import main

PAGE = (pathlib.Path(__file__).parents[2] / "docs/integrations.md").read_text()


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
