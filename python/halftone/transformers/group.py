"""Layers of one window: their pages, which share a block table, and the schedules of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import KVCacheSpec, LayeredKVCache, Plan, Schedule, attend, plan, schedule
from .columns import Columns

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_EXACT = 16  # queries of a request up to which a plan is made for their very number


def dtype_name(dtype: torch.dtype) -> str:
    """halftone's name of a dtype; of one that it lacks torch's, which it then refuses by name."""
    return _DTYPES.get(dtype, str(dtype))


@dataclass
class Step:
    """What all layers of a forward call share.

    Attributes:
        q_length: columns of queries.
        counts: tokens that each request gets.
        rows: int64, which rows of [batch * q_length] are tokens; None means all.
        cu_q: int32 [batch + 1], running sum of ``counts``; None means as many queries for each request.
        before: the columns before this call.
        missing: layers that have not appended these tokens.
    """

    q_length: int
    counts: list[int]
    rows: Tensor | None
    cu_q: Tensor | None
    before: Columns
    missing: set[int] = field(default_factory=set)

    @property
    def bound(self) -> int:
        """An upper bound of a request's queries, one for many lengths so that they share a plan."""
        if self.cu_q is None:
            return self.q_length
        return 1 << (max(self.q_length, 1) - 1).bit_length()

    @property
    def shortest(self) -> int:
        """What requests with queries have at least: 1, or more than half the bound, so that few plans are made."""
        half = self.bound // 2
        if self.cu_q is None:
            return max(self.q_length, 1)
        return half + 1 if all(count > half for count in self.counts if count) else 1

    @property
    def is_decode(self) -> bool:
        """One token for every request."""
        return self.q_length == 1 and self.rows is None

    @staticmethod
    def needs_cu(q_length: int, has_gaps: bool) -> bool:
        """True where requests differ, or where the plan's bound is not their number of queries."""
        return has_gaps or q_length > _EXACT


class LayerGroup:
    """The layers that have one sliding window, or those that have none.

    Attributes:
        window: keys that a query sees at most, itself included; None means all.
        layers: their numbers in the model.
        cache: what they append to and attend, layer ``layers[i]`` at ``i``.
        gone: of each request, the token before which pages have been returned.
    """

    def __init__(
        self,
        window: int | None,
        layers: Sequence[int],
        specs: Sequence[KVCacheSpec],
        batch: int,
        max_len: int,
        num_pages: int | None,
        device: str,
        scales: dict[str, Any],
    ) -> None:
        self.window = window
        self.layers = list(layers)
        self.cache = LayeredKVCache(
            batch, max_len, layers=list(specs), num_pages=num_pages, framework="torch", device=device, **scales
        )
        self.gone = [0] * batch
        self._scheduled: dict[Plan, tuple[Schedule, Step]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scheduled": {}}  # schedules cannot be copied, and are made again when needed

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.cache.layer(0).spec.page_size

    def evict(self, rollback: int) -> None:
        """Returns the pages that no query to come reads, unless more than ``rollback`` tokens are dropped before."""
        if self.window is None:
            return
        size, reach = self.page_size, self.window - 1 + rollback
        lengths = self.cache.host_lengths
        gone = [max(old, (n - reach) // size * size) for n, old in zip(lengths, self.gone)]
        if gone != self.gone:
            self.cache.evict_before(gone)
            self.gone = gone

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Appends the tokens of a step to ``layer``: k and v [tokens, kv_heads, head_dim]."""
        counts = None if step.is_decode else step.counts  # for which the cache keeps what it needs on the device
        self.cache.layer(self.layers.index(layer)).append(k, v, counts)

    def attend(self, layer: int, q: Tensor, step: Step, sinks: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Attention of ``layer``: q [tokens, q_heads, head_dim] to [tokens, q_heads, v_head_dim]."""
        cache = self.cache.layer(self.layers.index(layer))
        made = plan(
            cache, q_heads=q.shape[1], max_q_len=step.bound, min_q_len=step.shortest, q_dtype=dtype_name(q.dtype),
            sinks=sinks is not None, **options,
        )  # fmt: skip
        out: Tensor = attend(q, cache, schedule=self._schedule(made, step), sinks=sinks)
        return out

    def _schedule(self, made: Plan, step: Step) -> Schedule:
        found, of = self._scheduled.get(made, (None, None))
        if found is not None and of is step:
            return found
        if found is not None and of is not None and of.cu_q is None and step.cu_q is None:
            found.update()  # the lengths are the same array: every step of decode
        else:
            self._scheduled = {p: (s, of) for p, (s, of) in self._scheduled.items() if of is step}
            found = schedule(made, self.cache.lengths, cu_q=step.cu_q)
        self._scheduled[made] = (found, step)
        return found

    def truncate(self, lengths: list[int]) -> None:
        """Drops tokens; see LayeredKVCache.truncate()."""
        self.cache.truncate(lengths)
        self.gone = [old if length else 0 for old, length in zip(self.gone, lengths)]

    def select(self, index: list[int]) -> None:
        """Request ``i`` is then what ``index[i]`` was; there are as many as ``index`` has."""
        batch, count = self.cache.batch, len(index)
        if count > batch:
            self.cache.resize(count)
        self.cache.reorder(index + list(range(count, batch)))
        if count < batch:
            self.cache.resize(count)
        if count != batch:
            self._scheduled = {}  # of other arrays
        self.gone = [self.gone[i] for i in index]
