"""The command: python -m halftone.capture MODEL --text FILE."""

from __future__ import annotations

import argparse
import os
import sys

from .. import Error, InvalidArgumentError
from .inputs import BYTES, load_model, read_text, tokens_of
from .run import DTYPES, Summary, capture

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_EPILOG = """examples:
  python -m halftone.capture ./my-model --text book.txt --out capture.safetensors
  python -m halftone.capture ./my-model --text book.txt --layers 0,8,-1 --tokens 4096 --before-rope
  halftone eval capture.safetensors --html report.html
"""


def size_of(text: str) -> int:
    """A number of bytes, such as 300M. Raises argparse.ArgumentTypeError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS and text else (text, "")
    if not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: give a number of bytes, such as 300M or 2G")
    return int(number) * _UNITS[unit]


def numbers_of(text: str) -> list[int] | None:
    """Layers, such as 0,5,-1, or None for "all". Raises argparse.ArgumentTypeError."""
    if text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no list of layers: give numbers, such as 0,5,-1, or all"
        ) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m halftone.capture",
        description="Writes q, k and v of a transformers model over a text, for halftone eval.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", metavar="MODEL", help="folder of a model, or its name")
    made.add_argument("--text", metavar="FILE", required=True, help="text to run through it, UTF-8; - reads stdin")
    made.add_argument("--out", metavar="FILE", default="capture.safetensors", help="file to write (%(default)s)")
    made.add_argument("--layers", type=numbers_of, metavar="LIST", help="as 0,5,-1; default: all")
    made.add_argument("--tokens", type=int, default=1024, help="capture at most as many (%(default)s)")
    made.add_argument("--skip", type=int, default=0, metavar="N", help="begin after the text's first N tokens")
    made.add_argument("--dtype", choices=list(DTYPES), help="of the values in the file; default: the model's")
    made.add_argument("--before-rope", action="store_true", help="also write q and k as they are before RoPE")
    made.add_argument("--max-size", type=size_of, default=1 << 30, metavar="SIZE", help="of the tensors (1G)")
    made.add_argument("--chunk", type=int, default=256, help="tokens in one call of the model (%(default)s)")
    made.add_argument("--device", default="cpu", help="cpu or cuda:<index> (%(default)s)")
    made.add_argument("--tokenizer", metavar="NAME", help=f"default: the model's; '{BYTES}': the text's bytes as ids")
    made.add_argument("--random-weights", type=int, metavar="SEED", help="of a configuration alone, for a trial")
    return made


def report(summary: Summary, path: str) -> str:
    """What was written, and the command that evaluates it."""
    return (
        f"Wrote {path}: {len(summary.layers)} layers, {summary.tokens} tokens, {summary.data_bytes / 1e6:.1f} MB.\n"
        f"Next: halftone eval {path} --html report.html"
    )


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; an error is a sentence on stderr."""
    line = parser().parse_args(arguments)
    try:
        if line.tokens < 1 or line.skip < 0:
            raise InvalidArgumentError(
                f"--tokens is {line.tokens} and --skip {line.skip}, but they must be at least 1 and 0: give counts."
            )
        text = read_text(line.text)
        model = load_model(line.model, line.random_weights, line.device)
        vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        ids = tokens_of(text, line.tokenizer or line.model, vocabulary)[line.skip : line.skip + line.tokens]
        about = {
            "model": os.path.basename(os.path.normpath(line.model)) + (
                "" if line.random_weights is None else f" with random weights of seed {line.random_weights}"
            ),
            "source_text": os.path.basename(line.text),
            "first_token": str(line.skip),
        }  # fmt: skip
        summary = capture(
            model, ids, line.out, layers=line.layers, dtype=line.dtype, before_rope=line.before_rope,
            max_bytes=line.max_size, chunk=line.chunk, metadata=about,
        )  # fmt: skip
    except (Error, OSError, ValueError) as error:
        print(f"halftone.capture: {error}", file=sys.stderr)
        return 1
    print(report(summary, line.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
