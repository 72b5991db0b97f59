"""What a recipe costs a model of transformers: KL divergence and perplexity beside the model's own cache.

``python -m halftone.recipe MODEL recipe.json --text FILE`` is the command, ``measure()`` does the same with a model and
tokens at hand. ``halftone.load_recipe`` reads recipes without transformers.
"""

from .._transformers import check_versions

check_versions()

from .quality import Quality, Report, measure  # noqa: E402  after the check, as in halftone.capture

__all__ = ["Quality", "Report", "measure"]
