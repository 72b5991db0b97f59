"""Quantised caches under Hugging Face models: one line registers the attention, one makes the cache of a generation.

    import halftone.transformers as hf

    hf.register()  # attention and masks under the name "halftone"
    model.set_attn_implementation("halftone")
    cache = hf.HalftoneCache(model.config, max_len=4096, formats="int8-head")
    model.generate(**inputs, past_key_values=cache, max_new_tokens=200)

docs/integrations.md says what is supported. Tested with transformers 5.17 and 5.23.
"""

from .._transformers import check_versions

check_versions()

from .attention import register  # noqa: E402  after the check: an old transformers lacks what these modules import
from .cache import HalftoneCache  # noqa: E402

__all__ = ["HalftoneCache", "register"]
