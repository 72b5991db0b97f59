"""Models and texts as the commands name them."""

from __future__ import annotations

import pathlib
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .. import InvalidArgumentError

BYTES = "bytes"


def load_model(name: str, seed: int | None, device: str) -> PreTrainedModel:
    """The model in its own dtype, or one of random weights."""
    if seed is None:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)).to(device)


def tokens_of(text: str, tokenizer: str, vocabulary: int) -> list[int]:
    """Ids of the text."""
    if tokenizer == BYTES:
        return [byte % vocabulary for byte in text.encode()]
    return list(AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"])


def read_text(path: str) -> str:
    """A file's text, or that of the standard input. Raises InvalidArgumentError for what is no text."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"--text is {path}, but {error}: give a file in UTF-8.") from None
