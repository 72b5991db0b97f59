"""Host-side bookkeeping of a cache that owns its pages: who has which page, and how long each request is."""

from __future__ import annotations

from typing import Sequence

from .errors import InvalidArgumentError, OutOfRangeError, ResourceExhaustedError


class PagePool:
    """Pages are dealt on demand, lowest free number first, so that a lone request has pages 0, 1, 2, ..."""

    def __init__(self, batch: int, max_len: int, page_size: int, num_pages: int) -> None:
        self.max_len = max_len
        self.page_size = page_size
        self.num_pages = num_pages
        self.width = max(1, -(-max_len // page_size))  # pages per request
        self.lengths = [0] * batch
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self._fresh = 0  # the first page never dealt
        self._returned: list[int] = []  # below it, in falling order

    @property
    def free(self) -> int:
        """Pages that no request has."""
        return len(self._returned) + self.num_pages - self._fresh

    def _deal(self) -> int:
        if self._returned:
            return self._returned.pop()
        self._fresh += 1
        return self._fresh - 1

    def request(self, index: int) -> int:
        """``index`` if it is a request. Raises OutOfRangeError."""
        if not 0 <= index < len(self.lengths):
            raise OutOfRangeError(
                f"request is {index}, but the cache has {len(self.lengths)}: use 0 to {len(self.lengths) - 1}."
            )
        return index

    def grown(self, counts: Sequence[int]) -> list[int]:
        """The lengths after adding ``counts`` tokens. Raises InvalidArgumentError or OutOfRangeError."""
        if len(counts) != len(self.lengths):
            raise InvalidArgumentError(
                f"counts has {len(counts)} entries, but the cache has {len(self.lengths)} requests: give one for each."
            )
        after = []
        for i, (length, count) in enumerate(zip(self.lengths, counts)):
            if count < 0:
                raise InvalidArgumentError(f"counts[{i}] is {count}, but must be 0 or more: use free() to drop tokens.")
            if length + count > self.max_len:
                raise OutOfRangeError(
                    f"request {i} would have {length + count} tokens, but max_len is {self.max_len}: "
                    "make the cache with a larger max_len."
                )
            after.append(length + count)
        return after

    def reserve(self, lengths: Sequence[int]) -> list[int]:
        """Gives every request pages for ``lengths`` tokens; returns the requests that got one. All or nothing.

        Raises ResourceExhaustedError.
        """
        needed = [-(-length // self.page_size) for length in lengths]
        missing = [max(0, n - len(own)) for n, own in zip(needed, self.pages)]
        if sum(missing) > self.free:
            request = next(i for i, m in enumerate(missing) if m > 0)
            raise ResourceExhaustedError(
                f"num_pages is {self.num_pages}, of which {self.free} are free, but {sum(missing)} more are "
                f"needed (request {request} needs {needed[request]} in all): make the cache larger or free() a request."
            )
        for own, count in zip(self.pages, missing):
            own.extend(self._deal() for _ in range(count))
        return [i for i, m in enumerate(missing) if m]

    def release(self, index: int) -> None:
        """Takes back the pages of a request and forgets its tokens."""
        own = self.pages[self.request(index)]
        self._returned.extend(reversed(own))
        self._returned.sort(reverse=True)
        own.clear()
        self.lengths[index] = 0

    def table(self) -> list[list[int]]:
        """The block table, [batch][width]; -1 where no page is."""
        return [own + [-1] * (self.width - len(own)) for own in self.pages]
