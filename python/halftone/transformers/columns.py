"""Which columns of a batch of token ids are in a cache: all but those that the attention mask left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

Gap = tuple[int, int]  # of columns, the end excluded


@dataclass(frozen=True)
class Columns:
    """The columns that a model has seen. A cache holds those of each request that are in none of its gaps.

    Attributes:
        count: columns.
        gaps: of each request, in order; left padding is one that begins at 0.
    """

    count: int
    gaps: tuple[tuple[Gap, ...], ...]

    @staticmethod
    def none(batch: int) -> Columns:
        """No column yet of ``batch`` requests."""
        return Columns(0, ((),) * batch)

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.gaps)

    def lengths(self) -> list[int]:
        """Tokens of each request."""
        return [self.count - sum(end - begin for begin, end in gaps) for gaps in self.gaps]

    def extended(self, count: int, gaps: Sequence[Sequence[Gap]] | None) -> Columns:
        """With ``count`` columns more; ``gaps`` of each request lie among them, None means that there are none."""
        if gaps is None:
            return Columns(self.count + count, self.gaps)
        joined = (tuple(_joined(chain(old, new))) for old, new in zip(self.gaps, gaps))
        return Columns(self.count + count, tuple(joined))

    def cropped(self, count: int) -> Columns:
        """The first ``count`` columns."""
        kept = (tuple((b, min(e, count)) for b, e in gaps if b < count) for gaps in self.gaps)
        return Columns(count, tuple(kept))

    def selected(self, index: Sequence[int]) -> Columns:
        """Request ``i`` is what ``index[i]`` was."""
        return Columns(self.count, tuple(self.gaps[i] for i in index))

    def first_with_inner_gap(self) -> int | None:
        """A request with tokens before a gap and after it: distances in columns are then not those in tokens."""
        for request, gaps in enumerate(self.gaps):
            if any(begin > 0 and end < self.count for begin, end in gaps):
                return request
        return None


def _joined(gaps: Iterator[Gap]) -> Iterator[Gap]:
    """``gaps`` in order, those that touch made one."""
    last: Gap | None = None
    for begin, end in gaps:
        if last is not None and last[1] == begin:
            last = (last[0], end)
            continue
        if last is not None:
            yield last
        last = (begin, end)
    if last is not None:
        yield last
