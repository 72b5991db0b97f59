"""What passes between a model, its cache and the attention function."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .. import InvalidArgumentError
from .columns import Columns

_NOT_OURS = (
    "the keys of a HalftoneCache lie in its pages, but the model's attention is another than halftone's: call "
    "halftone.transformers.register() and model.set_attn_implementation('halftone'); a model that computes attention "
    "by itself needs transformers' own cache."
)


class Seen:
    """What the layers read of their cache."""

    def __init__(self) -> None:
        self.columns = Columns.none(0)


class Pending:
    """K and V of a layer on their way to its pages: what update() gives the model and the attention function gets.

    It has a shape, and refuses to be computed with: an attention that is not halftone's would see the new tokens only.

    Attributes:
        cache, layer: whose they are.
        k, v: [batch, kv_heads, columns, head_dim].
        is_appended: they are in the pages; a layer that shares another's keys gets them a second time.
    """

    def __init__(self, cache: Any, layer: int, k: Tensor, v: Tensor) -> None:
        self.cache, self.layer, self.k, self.v = cache, layer, k, v
        self.is_appended = False
        self.shape, self.dtype, self.device = k.shape, k.dtype, k.device

    def to(self, device: Any) -> Pending:
        """Itself: a layer that shares keys asks for them on its device, which appending them has checked."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise InvalidArgumentError(_NOT_OURS)

    def __getitem__(self, index: Any) -> NoReturn:
        raise InvalidArgumentError(_NOT_OURS)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidArgumentError(_NOT_OURS)


class HalftoneLayer(CacheLayerMixin):
    """What transformers asks of a layer. The cache does the work, for all layers at once.

    Attributes:
        is_sliding, sliding_window: whether its queries see only the last keys, and how many.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, seen: Seen, max_len: int, window: int | None) -> None:
        super().__init__()
        self._seen, self._max_len = seen, max_len
        self.is_sliding = window is not None
        self.sliding_window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache allocates for all layers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a layer does not know its number."""
        raise InvalidArgumentError("a layer of a HalftoneCache cannot be updated alone: call the cache's update().")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of keys, and the first one."""
        return self._seen.columns.count + query_length, 0

    def get_seq_length(self) -> int:
        """Columns that the model has seen."""
        return self._seen.columns.count

    def get_max_length(self) -> int:
        """Most tokens of a request."""
        return self._max_len

    get_max_cache_shape = get_max_length  # its name in transformers 5.17
