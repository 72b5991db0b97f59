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
        self.batch = batch
        self.pages: list[list[int]] = [[] for _ in range(batch)]
        self._fresh = 0  # the first page never dealt
        self._returned: list[int] = []  # below it, in falling order
        self._lengths = [0] * batch
        self._steps = 0  # tokens that every request has beyond _lengths
        self._room: int | None = None  # tokens that every request may get on the pages it has, once asked for

    @property
    def lengths(self) -> list[int]:
        """Live tokens of each request."""
        if self._steps:
            self._lengths = [length + self._steps for length in self._lengths]
            self._steps = 0
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._steps = 0
        self._room = None

    def _measure(self) -> int:
        size, longest = self.page_size, self.max_len
        rooms = [min(len(own) * size, longest) - length for own, length in zip(self.pages, self.lengths)]
        return min(rooms, default=longest)

    def has_room(self, count: int) -> bool:
        """True if the pages of every request hold ``count`` more tokens; takes the same time for any batch while the
        pages stay as they are."""
        if self._room is None:
            self._room = self._measure()
        return 0 <= count <= self._room

    def advance(self, count: int) -> None:
        """Adds ``count`` tokens to every request, for which :meth:`has_room` was true."""
        self._steps += count
        if self._room is not None:
            self._room -= count

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
        if not 0 <= index < self.batch:
            raise OutOfRangeError(f"request is {index}, but the cache has {self.batch}: use 0 to {self.batch - 1}.")
        return index

    def grown(self, counts: Sequence[int]) -> list[int]:
        """The lengths after adding ``counts`` tokens. Raises InvalidArgumentError or OutOfRangeError."""
        if len(counts) != self.batch:
            raise InvalidArgumentError(
                f"counts has {len(counts)} entries, but the cache has {self.batch} requests: give one for each."
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

    def reserve(self, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """Gives every request pages for ``lengths`` tokens, all or nothing; returns (request, column, page) of each.

        Raises ResourceExhaustedError.
        """
        size = self.page_size
        needed = [-(-length // size) for length in lengths]
        missing = [n - len(own) if n > len(own) else 0 for n, own in zip(needed, self.pages)]
        if sum(missing) > self.free:
            request = next(i for i, m in enumerate(missing) if m > 0)
            raise ResourceExhaustedError(
                f"num_pages is {self.num_pages}, of which {self.free} are free, but {sum(missing)} more are "
                f"needed (request {request} needs {needed[request]} in all): make the cache larger or free() a request."
            )
        dealt = []
        for request, count in enumerate(missing):
            if count:
                own = self.pages[request]
                for column in range(len(own), len(own) + count):
                    own.append(self._deal())
                    dealt.append((request, column, own[column]))
        self._room = None
        return dealt

    def undo(self, dealt: Sequence[tuple[int, int, int]]) -> None:
        """Takes back what :meth:`reserve` has just dealt."""
        for request, _, page in reversed(dealt):
            self.pages[request].pop()
            self._returned.append(page)
        self._returned.sort(reverse=True)
        self._room = None

    def release(self, index: int) -> None:
        """Takes back the pages of a request and forgets its tokens."""
        own = self.pages[self.request(index)]
        self._returned.extend(reversed(own))
        self._returned.sort(reverse=True)
        own.clear()
        self.lengths[index] = 0
        self._room = None
