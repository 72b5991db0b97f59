"""Quantised caches under Hugging Face models.

``register()`` makes the attention known, ``model.set_attn_implementation("halftone")`` chooses it, and a
``HalftoneCache`` is passed to ``model.generate()`` as ``past_key_values``. docs/integrations.md has an example and says
what is supported. Tested with transformers 5.17 and 5.23.
"""

from .._transformers import check_versions

check_versions()

from .attention import register  # noqa: E402  after the check: an old transformers lacks what these modules import
from .cache import HalftoneCache  # noqa: E402

__all__ = ["HalftoneCache", "register"]
