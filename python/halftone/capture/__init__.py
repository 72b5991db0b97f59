"""Captures q, k and v of a transformers model for ``halftone eval``.

``python -m halftone.capture MODEL --text FILE --out capture.safetensors`` is the command, ``capture()`` does the same
with a model and tokens at hand. docs/integrations.md describes the file.
"""

from .._transformers import check_versions

check_versions()

from .run import Summary, capture  # noqa: E402  after the check: an old transformers lacks what this module imports

__all__ = ["Summary", "capture"]
