"""What a model asks a layer's queries to see, in the terms of halftone's masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from .. import InvalidArgumentError, UnsupportedError
from .columns import Gap


@dataclass(frozen=True)
class Visible:
    """The keys that the queries of a forward call may see: what the attention function gets as its mask.

    Attributes:
        causal: no key behind the query.
        window: how many keys a query sees at most, itself included; None means all.
        q_length: columns of queries, the last ones that there are.
        end: columns of keys, from ``kv_offset`` on, that there are to be seen.
        columns: bool [batch, columns], False where a token is padding; None means nowhere.
        kv_offset: the column of the first key that is passed to the attention function.
        is_plain: False for a mask that halftone does not have.
    """

    causal: bool
    window: int | None
    q_length: int
    end: int
    columns: Tensor | None
    kv_offset: int
    is_plain: bool

    def __getattr__(self, name: str) -> Any:
        """An AttributeError that names the remedy: who asks a mask for what tensors have, as StaticCache does."""
        raise AttributeError(
            f"{name!r} is asked of the mask of 'halftone' attention, which is no tensor: use a HalftoneCache or "
            "transformers' DynamicCache (not StaticCache), or another attention implementation, such as 'sdpa'."
        )

    def check(self) -> None:
        """Raises UnsupportedError for a mask that halftone does not have."""
        if not self.is_plain:
            raise UnsupportedError(
                "the model asks for a mask of its own (chunks, blocks or an overlay), but halftone has causal, "
                "bidirectional and sliding ones: use another attention implementation, such as 'sdpa'."
            )


def make_visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_: Any,
) -> Visible:
    """The mask interface of transformers: describes the mask instead of making it, so that it costs no memory.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size: as those of
            transformers.masking_utils.sdpa_mask().
    """
    causal, window, is_plain = True, None, True
    if _alike(mask_function, bidirectional_mask_function):
        causal = False
    elif local_size is not None and _alike(mask_function, sliding_window_causal_mask_function(local_size)):
        window = int(local_size)
    elif not _alike(mask_function, causal_mask_function):
        is_plain = False
    offset, first = int(q_offset), int(kv_offset)
    end = offset + q_length - first if causal else kv_length
    return Visible(causal, window, q_length, min(end, kv_length), attention_mask, first, is_plain)


def gaps_of(columns: Tensor, first: int) -> list[list[Gap]] | None:
    """The gaps of each row of bool [batch, columns], numbered from ``first`` on; None if all is True.

    A device is asked, and waited for, at most twice.
    """
    if bool(columns.all()):
        return None
    hidden = torch.nn.functional.pad((~columns).to(torch.int8), (1, 1)).diff(dim=1)  # 1 begins a gap, -1 ends it
    gaps: list[list[Gap]] = [[] for _ in range(columns.shape[0])]
    begins, ends = (hidden == 1).nonzero().tolist(), (hidden == -1).nonzero().tolist()
    for (row, begin), (_, end) in zip(begins, ends):
        gaps[row].append((first + begin, first + end))
    return gaps


def check_sizes(visible: Visible, batch: int, count: int) -> None:
    """Raises InvalidArgumentError if ``visible`` has a mask of other than ``batch`` rows and ``count`` columns."""
    if visible.columns is not None and tuple(visible.columns.shape) != (batch, count):
        raise InvalidArgumentError(
            f"attention_mask is of shape {list(visible.columns.shape)}, but must be [{batch}, {count}] to say of every "
            "token, those in the cache included, whether it is padding: pass one, or None for no padding."
        )


def _alike(a: Any, b: Any) -> bool:
    """True if two functions are the same, or made by the same code of the same values."""
    if a is b:
        return True
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a.__code__ is b.__code__ and _alike(tuple(cells[0]), tuple(cells[1]))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return isinstance(a, int) and isinstance(b, int) and a == b
