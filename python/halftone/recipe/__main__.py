"""The command: python -m halftone.recipe MODEL recipe.json --text FILE."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from .. import Error, InvalidArgumentError, Recipe, load_recipe
from .._files import AtomicFile
from ..capture.inputs import BYTES, load_model, read_text, tokens_of
from ..transformers import HalftoneCache, register
from .quality import Report, measure

_NAME = "recipe"
_EPILOG = """examples:
  python -m halftone.recipe ./my-model recipe.json --text book.txt --skip 1024
  python -m halftone.recipe ./my-model recipe.json --text book.txt --formats int8-head,int4-g32+rot --json quality.json
  halftone eval capture.safetensors --recipe recipe.json --quality quality.json --html report.html
  python -m halftone.recipe ./my-model recipe.json --prompt "Once upon a time" --new-tokens 50
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m halftone.recipe",
        description="Measures what a recipe costs a transformers model, or generates text on its cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", metavar="MODEL", help="folder of a model, or its name")
    made.add_argument("recipe", metavar="RECIPE", help="file of halftone recipe --output")
    made.add_argument("--text", metavar="FILE", help="text to judge by, UTF-8; - reads stdin")
    made.add_argument("--prompt", metavar="TEXT", help="text to continue on a cache of the recipe")
    made.add_argument("--new-tokens", type=int, default=50, metavar="N", help="of the continuation (%(default)s)")
    made.add_argument("--formats", metavar="LIST", help="also measure these formats, comma-separated")
    made.add_argument("--tokens", type=int, default=1024, help="judge at most as many (%(default)s)")
    made.add_argument("--skip", type=int, default=0, metavar="N", help="begin after the text's first N tokens")
    made.add_argument("--json", metavar="FILE", help="write the figures, for halftone eval and recipe --quality")
    made.add_argument("--chunk", type=int, default=256, help="tokens in one call of the model (%(default)s)")
    made.add_argument("--device", default="cpu", help="cpu or cuda:<index> (%(default)s)")
    made.add_argument("--tokenizer", metavar="NAME", help=f"default: the model's; '{BYTES}': the text's bytes as ids")
    made.add_argument("--random-weights", type=int, metavar="SEED", help="of a configuration alone, for a trial")
    return made


def figures(report: Report, line: argparse.Namespace) -> dict[str, Any]:
    """The contents of the file."""
    rows = [
        {"name": name, "kl": row.kl, "perplexity": row.perplexity, "bytes_per_token": row.bytes_per_token}
        for name, row in report.rows.items()
    ]
    return {
        "halftone_quality": 1,
        "model": os.path.basename(os.path.normpath(line.model)),
        "text": os.path.basename(line.text),
        "recipe": os.path.basename(line.recipe),
        "tokens": report.tokens,
        "first_token": line.skip,
        "perplexity": report.perplexity,
        "rows": rows,
    }


def table(report: Report) -> str:
    """The same for people."""
    width = max(len("own cache"), *map(len, report.rows))
    lines = [f"{'cache':<{width}}  bytes/token  KL (nats/token)  perplexity"]
    lines.append(f"{'own cache':<{width}}  {'':>11}  {'':>15}  {report.perplexity:>10.4f}")
    for name, row in report.rows.items():
        lines.append(f"{name:<{width}}  {row.bytes_per_token:>11.0f}  {row.kl:>15.6f}  {row.perplexity:>10.4f}")
    return "\n".join(lines)


def judge(model: PreTrainedModel, recipe: Recipe, text: str, line: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = tokens_of(text, line.tokenizer or line.model, vocabulary)
    ids = ids[line.skip : line.skip + line.tokens]
    formats: dict[str, Any] = {_NAME: recipe}
    formats.update({name: name for name in (line.formats or "").split(",") if name})
    report = measure(model, ids, formats, chunk=line.chunk)
    if line.json:
        with AtomicFile(line.json) as file:
            file.write((json.dumps(figures(report, line), indent=1) + "\n").encode())
    print(table(report))
    if line.json:
        print(f"Wrote {line.json}.")


def continued(model: PreTrainedModel, recipe: Recipe, line: argparse.Namespace) -> str:
    """The prompt and what the model says then, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(line.tokenizer or line.model)
    register()
    model.set_attn_implementation("halftone")
    inputs = tokenizer(line.prompt, return_tensors="pt").to(model.device)
    cache = HalftoneCache(model.config, int(inputs["input_ids"].shape[1]) + line.new_tokens, recipe)
    with torch.no_grad():
        tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=line.new_tokens, do_sample=False)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; an error is a sentence on stderr."""
    line = parser().parse_args(arguments)
    try:
        if line.text is None and line.prompt is None:
            raise InvalidArgumentError("--text and --prompt are missing, but one is needed: give a text to judge by.")
        if min(line.tokens, line.new_tokens) < 1 or line.skip < 0:
            raise InvalidArgumentError(
                f"--tokens is {line.tokens}, --new-tokens {line.new_tokens} and --skip {line.skip}, but they must be "
                "at least 1, 1 and 0: give counts."
            )
        if line.prompt is not None and line.tokenizer == BYTES:
            raise InvalidArgumentError("--tokenizer is bytes, but --prompt needs texts of tokens: name a tokenizer.")
        recipe = load_recipe(line.recipe)
        text = "" if line.text is None else read_text(line.text)
        model = load_model(line.model, line.random_weights, line.device).eval()
        if line.text is not None:
            judge(model, recipe, text, line)
        if line.prompt is not None:
            print(continued(model, recipe, line))
    except (Error, OSError, ValueError) as error:
        print(f"halftone.recipe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
