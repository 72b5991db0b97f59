"""Captures q, k and v of a transformers model for ``halftone eval``.

    python -m halftone.capture MODEL --text FILE --out capture.safetensors

docs/integrations.md describes the file. :func:`capture` does the same with a model and tokens at hand.
"""

from .._transformers import check_versions

check_versions()

from .run import Summary, capture  # noqa: E402  after the check: an old transformers lacks what this module imports

__all__ = ["Summary", "capture"]
