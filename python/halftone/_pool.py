"""Host-side books of a cache that owns its pages: who has which page, and how long each request is."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, Sequence

from . import _native


class Changes(NamedTuple):
    """What arrays must do to follow the books: copy pages, then write the block table."""

    copies: list[tuple[int, int]]  # (from, to)
    entries: list[tuple[int, int, int]]  # (request, column, page)


NO_CHANGES = Changes([], [])


def _packed(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def _unpacked(data: Any) -> array[int]:
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


def _changes(data: Any) -> Changes:
    numbers = _unpacked(data)
    end = 1 + 2 * numbers[0]
    copies, entries = numbers[1:end], numbers[end:]
    return Changes(list(zip(copies[::2], copies[1::2])), list(zip(entries[::3], entries[1::3], entries[2::3])))


class PagePool:
    """C++'s ``SequenceTable``, with what every step of decode asks at hand. Errors are its own, and change nothing."""

    def __init__(self, books: Any, batch: int, max_len: int, page_size: int, num_pages: int) -> None:
        self._books = books
        self.batch = batch
        self.max_len = max_len
        self.page_size = page_size
        self.num_pages = num_pages
        self._lengths: list[int] | None = None  # those of the books, once asked for
        self._steps = 0  # tokens that every request has beyond them
        self._room: int | None = None  # tokens that every request may get on pages of its own, once asked for

    @classmethod
    def make(cls, batch: int, max_len: int, page_size: int, num_pages: int) -> PagePool:
        """Books of pages that are all free."""
        return cls(_native.sequences(batch, max_len, page_size, num_pages), batch, max_len, page_size, num_pages)

    @classmethod
    def restore(
        cls, max_len: int, page_size: int, num_pages: int, rows: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> PagePool:
        """Books of pages that are dealt already."""
        flat, sizes = [page for row in rows for page in row], [len(row) for row in rows]
        books = _native.sequences_restore(
            max_len, page_size, num_pages, _packed(flat), _packed(sizes), _packed(lengths)
        )
        return cls(books, len(rows), max_len, page_size, num_pages)

    def copy(self) -> PagePool:
        """Books of their own that say the same."""
        self._settle()
        books = _native.sequences_copy(self._books)
        return PagePool(books, self.batch, self.max_len, self.page_size, self.num_pages)

    def _settle(self) -> None:
        """Tells the books of steps that are counted here only."""
        if self._steps:
            _native.sequences_advance(self._books, _packed([self._steps] * self.batch))
            self._steps = 0
            self._lengths = None

    def _changed(self) -> None:
        self._lengths = self._room = None

    @property
    def lengths(self) -> list[int]:
        """Live tokens of each request."""
        self._settle()
        if self._lengths is None:
            self._lengths = list(_unpacked(_native.sequences_lengths(self._books)))
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        self._steps = 0
        self._changed()
        _native.sequences_set_lengths(self._books, _packed(lengths))

    @property
    def free(self) -> int:
        """Pages that no request has."""
        return int(_native.sequences_free_pages(self._books))

    def row(self, request: int) -> list[int]:
        """Pages of a request; -1 where evict_before() took one back."""
        return list(_unpacked(_native.sequences_pages(self._books, request)))

    def rows(self) -> list[list[int]]:
        """Pages of every request."""
        return [self.row(request) for request in range(self.batch)]

    def references(self, page: int) -> int:
        """Requests that have ``page``."""
        return int(_native.sequences_references(self._books, page))

    def has_room(self, count: int) -> bool:
        """True if pages of its own hold ``count`` more tokens of every request; takes the same time for any batch
        while the pages stay as they are."""
        if self._room is None:  # as after every change; steps that are counted here only lower it
            self._room = int(_native.sequences_room(self._books))
        return 0 <= count <= self._room

    def writes_shared(self) -> bool:
        """True if the next token of some request falls into a page that it shares."""
        self._settle()
        return bool(_native.sequences_writes_shared(self._books))

    def step(self, count: int) -> None:
        """Adds ``count`` tokens to every request, for which :meth:`has_room` was true."""
        self._steps += count
        if self._room is not None:
            self._room -= count

    def may_step(self, most: int) -> None:
        """As :meth:`step`, but of each request only the device knows how many tokens up to ``most`` it got."""
        assert self._room is not None
        self._room -= most

    def advance(self, counts: Sequence[int]) -> None:
        """Adds tokens that were written to pages of their requests' own."""
        self._settle()
        self._changed()
        _native.sequences_advance(self._books, _packed(counts))

    def reserve(self, counts: Sequence[int]) -> Changes:
        """Gives every request pages of its own for as many more tokens."""
        self._settle()
        self._room = None
        return _changes(_native.sequences_reserve(self._books, _packed(counts)))

    def truncate(self, lengths: Sequence[int], keep_pages: bool) -> Changes:
        """Drops the tokens from ``lengths`` on."""
        self._settle()
        self._changed()
        _native.sequences_truncate(self._books, _packed(lengths), keep_pages)
        return NO_CHANGES

    def release(self, request: int) -> Changes:
        """Drops all tokens of a request."""
        self._settle()
        self._changed()
        _native.sequences_free(self._books, request)
        return NO_CHANGES

    def fork(self, src: int, dst: Sequence[int], length: int) -> Changes:
        """Makes requests the first ``length`` tokens (-1: all) of another."""
        self._settle()
        self._changed()
        return _changes(_native.sequences_fork(self._books, src, _packed(dst), length))

    def reorder(self, index: Sequence[int]) -> Changes:
        """Makes request i what request ``index[i]`` was."""
        self._settle()
        self._changed()
        return _changes(_native.sequences_reorder(self._books, _packed(index)))

    def evict_before(self, positions: Sequence[int]) -> Changes:
        """Takes back pages wholly before ``positions``."""
        self._settle()
        return _changes(_native.sequences_evict_before(self._books, _packed(positions)))

    def resize(self, batch: int) -> Changes:
        """Adds empty requests at the end, or drops the last ones."""
        self._settle()
        self._changed()
        _native.sequences_resize(self._books, batch)
        self.batch = batch
        return NO_CHANGES
