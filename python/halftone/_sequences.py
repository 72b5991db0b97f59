"""Requests and their pages: the host's books, the arrays that follow them, and the operations on both."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence
from weakref import WeakSet

from . import _arrays, _check
from ._pool import Changes, PagePool
from .errors import InvalidArgumentError, ResourceExhaustedError
from .spec import KVCacheSpec

MAX_BATCH = 1 << 24  # of a plan
_HOST_BYTES = 128  # of a request: its length and its list of pages


class Step(NamedTuple):
    """The tokens that layer 0 appended and the others are to follow with."""

    tokens: int
    counts: list[int] | int | None  # of each request, or of every one; None: the device knows
    cu_seqlens: Any  # native
    missing: set[int]  # layers that have not appended them


class Sequences:
    """The books of a cache or of several layers, and the arrays that follow them.

    Every change is made to a copy of the books, then to the arrays, then the copy takes its place: both or neither.

    Attributes:
        pool: the books.
        pages: of each layer, uint8 [num_pages, page_bytes].
        table, lengths: the block table and the lengths of all layers.
        starts: of several layers, int32 [batch]: the lengths before the present step, where its tokens go.
        members: the caches whose arrays these are.
        is_behind: only the device knows how many tokens each request has; the books know what it has room for.
        is_shared: the next token of some request would go into a page that it shares, unless pages are reserved.
        step: of several layers, what they append at present.
    """

    def __init__(self, pool: PagePool, pages: list[Any], table: Any, lengths: Any, starts: Any = None) -> None:
        self.pool = pool
        self.pages = pages
        self.table = table
        self.lengths = lengths
        self.starts = starts
        self.members: WeakSet[Any] = WeakSet()
        self.is_behind = False
        self.is_shared = pool.writes_shared()
        self.step: Step | None = None

    @classmethod
    def over(cls, pool: PagePool, pages: list[Any], framework: str, device: str, layered: bool) -> Sequences:
        """New arrays that say what ``pool`` says."""
        width = max(1, -(-pool.max_len // pool.page_size))
        made = cls(pool, pages, *_index_arrays(pool.batch, width, framework, device, layered))
        made._rewrite()
        return made

    def sync(self) -> PagePool:
        """The books with the lengths of now: where they are behind, the device is asked and waited for."""
        if self.is_behind:
            if _arrays.is_capturing(self.lengths):
                raise InvalidArgumentError(
                    "the lengths are known to the device only, and the capture of a graph cannot ask for them: read "
                    "host_lengths before it."
                )
            self.pool.lengths = _arrays.to_list(self.lengths)
            self.is_behind = False
        return self.pool

    def has_room(self, count: int) -> bool:
        """True if every request may get ``count`` more tokens without :meth:`reserve`; asks no device if so."""
        if self.pool.has_room(count):
            return True
        return self.is_behind and self.sync().has_room(count)

    def reserve(self, counts: Sequence[int], stream: int | None = None) -> None:
        """Gives every request pages of its own for as many more tokens."""
        self.change(lambda pool: pool.reserve(counts), None, stream)

    def change(
        self, operation: Callable[[PagePool], Changes], name: str | None, stream: int | None = None
    ) -> None:
        """Does ``operation`` to the books and the arrays, or to neither. ``name`` is that of one that moves lengths."""
        before = self.sync()
        pool = before.copy()
        changes = operation(pool)
        lengths: list[tuple[int, int, int]] = []
        if name is not None:
            pairs = enumerate(zip(before.lengths, pool.lengths))
            lengths = [(0, request, new) for request, (old, new) in pairs if old != new]
        if (name is not None or changes.entries) and _arrays.is_capturing(self.table, stream):
            raise InvalidArgumentError(
                "the capture of a graph needs new pages, but deals none: call reserve() before it."
                if name is None
                else f"{name} writes the block table and the lengths from the host, which the capture of a graph "
                "cannot record: call it before or after."
            )
        try:
            self._write(changes, lengths, stream)
            self.pool = pool
        except BaseException:
            self._rewrite()
            raise
        self.is_shared = pool.writes_shared()

    def _write(self, changes: Changes, lengths: Sequence[tuple[int, int, int]], stream: int | None) -> None:
        if not (changes.entries or lengths):
            return
        with _arrays.on_stream(self.table, stream):
            if changes.copies:
                _arrays.copy_rows(self.pages, changes.copies)
            if changes.entries:
                _arrays.put(self.table, changes.entries)
            if lengths:
                _arrays.put(self.lengths[None], lengths)

    def _rewrite(self) -> None:
        """Makes the arrays say what the books say, whatever was written of a change."""
        rows = enumerate(self.pool.rows())
        entries = [(request, column, page) for request, row in rows for column, page in enumerate(row)]
        self._write(Changes([], entries), [(0, i, n) for i, n in enumerate(self.pool.lengths)], None)

    def recover(self, step: Step | None) -> None:
        """After an append that was interrupted: it may have advanced the lengths or not; ``step`` is what it began."""
        before = None if self.is_behind else list(self.pool.lengths)
        self.is_behind = True
        lengths = self.sync().lengths
        if step is not None and lengths != (_arrays.to_list(self.starts) if before is None else before):
            self.step = step

    def _missing(self) -> str:
        """The layers that have not appended what others have, as words; empty if there are none."""
        return ", ".join(map(str, sorted(self.step.missing))) if self.step is not None else ""

    def check_complete(self, what: str) -> None:
        """Raises InvalidArgumentError if some layers have not appended what others have."""
        if missing := self._missing():
            raise InvalidArgumentError(
                f"{what} is called before layers {missing} have appended the tokens of this step: append them first, "
                "or truncate() the step."
            )

    def check_abandoned(self, lengths: Sequence[int]) -> None:
        """Raises InvalidArgumentError if ``lengths`` keep tokens of a step that some layers have not appended."""
        if missing := self._missing():
            for request, (length, start) in enumerate(zip(lengths, _arrays.to_list(self.starts))):
                if length > start:
                    raise InvalidArgumentError(
                        f"lengths[{request}] is {length}, but layers {missing} have {start} tokens until they append "
                        f"those of this step: append them first, or keep at most {start}."
                    )


def allocate(
    specs: Sequence[KVCacheSpec],
    batch: int,
    max_len: int,
    num_pages: int | None,
    framework: str,
    device: str,
    layered: bool = False,
) -> Sequences:
    """The arrays of a cache with a layer for each of ``specs``, and books in which all pages are free.

    Raises InvalidArgumentError, ResourceExhaustedError.
    """
    for value, name in ((batch, "batch"), (max_len, "max_len")):
        if _check.integer(value, name) < 0:
            raise InvalidArgumentError(f"{name} is {value}, but must be 0 or more: give a count.")
    if batch > MAX_BATCH:
        raise InvalidArgumentError(f"batch is {batch}, but must be at most {MAX_BATCH}: make several caches.")
    page_size, page_bytes = specs[0].page_size, sum(spec.page_bytes for spec in specs)
    per_request = max(1, -(-max_len // page_size))
    count = batch * per_request if num_pages is None else _check.integer(num_pages, "num_pages")
    if count < 0:
        raise InvalidArgumentError(f"num_pages is {count}, but must be 0 or more: give a count.")
    _arrays.parse_device(device)
    table_bytes = 4 * batch * per_request
    if (memory := _arrays.host_memory()) and _HOST_BYTES * batch + (device == "cpu") * table_bytes > memory:
        raise ResourceExhaustedError(
            f"batch is {batch}, but its block table [{batch}, {per_request}] and the lists of its requests do not "
            f"fit into {memory} bytes of host memory: lower batch or max_len."
        )
    try:  # the pages first: what is too large should fail at once
        pages = [_arrays.empty(framework, (count, spec.page_bytes), "uint8", device, zero=True) for spec in specs]
        table, lengths, starts = _index_arrays(batch, per_request, framework, device, layered)
        pool = PagePool.make(batch, max_len, page_size, count)
    except Exception as error:
        if not _arrays.is_out_of_memory(error):
            raise
        raise ResourceExhaustedError(
            f"num_pages is {count}, but {count} pages of {page_bytes} bytes (and a block table [{batch}, "
            f"{per_request}]) do not fit into the memory of {device}: make fewer pages with num_pages, or lower "
            "batch or max_len."
        ) from None
    return Sequences(pool, pages, table, lengths, starts)


def _index_arrays(batch: int, width: int, framework: str, device: str, layered: bool) -> tuple[Any, Any, Any]:
    table = _arrays.empty(framework, (batch, width), "int32", device)
    lengths = _arrays.empty(framework, (batch,), "int32", device, zero=True)
    starts = _arrays.empty(framework, (batch,), "int32", device, zero=True) if layered else None
    _arrays.fill(table, -1)
    return table, lengths, starts


def _integers(value: Any, name: str) -> list[int]:
    """A sequence or a one-dimensional array of integers; a device is asked once."""
    return _check.counts(_arrays.to_list(value) if getattr(value, "shape", ()) else value, name)


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not getattr(value, "shape", ())


class SequenceOperations(_check.Fixed):
    """What caches that deal their own pages can do with requests. See docs/sequences.md."""

    lengths: Any
    _sequences: Sequences | None

    def _owned(self, what: str) -> Sequences:
        """Raises InvalidArgumentError for a cache whose pages are another's to deal."""
        if self._sequences is None:
            raise InvalidArgumentError(
                f"{what} needs a cache that deals its own pages, but this one wraps the caller's."
            )
        return self._sequences

    def _complete(self, what: str) -> Sequences:
        sequences = self._owned(what)
        sequences.check_complete(what)
        return sequences

    def _for_each(self, value: Any, name: str) -> list[int]:
        """One integer for every request, or one for each."""
        if value is None or _is_integer(value):
            return [_check.integer(value, name)] * self._owned(name).pool.batch
        return _integers(value, name)

    def _at_most(self, value: Any, name: str, sequences: Sequences) -> list[int]:
        """One integer for each request, or one for every request that has as many tokens."""
        if _is_integer(value):
            limit = _check.integer(value, name)
            return [min(length, limit) for length in sequences.sync().lengths]
        return _integers(value, name)

    @property
    def free_pages(self) -> int:
        """Pages that no request has. Raises InvalidArgumentError for a wrapped cache."""
        return self._owned("free_pages").pool.free

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Deals pages for ``tokens`` more tokens of every request (or of each), so that appends need no host work.

        A page that a request shares and would write is copied for it here.

        Raises:
            OutOfRangeError, ResourceExhaustedError: as :meth:`PagedKVCache.append`.
        """
        self._owned("reserve()").reserve(self._for_each(tokens, "tokens"))
        self._keep_single()

    def _keep_single(self) -> None:
        """Makes what the first append would copy to the device, within a capture perhaps."""

    def advance(self, counts: int | Sequence[int] = 1) -> None:
        """Tells the host that a replayed graph appended ``counts`` tokens; the device's lengths are already right.

        Raises:
            OutOfRangeError: beyond ``max_len``, or beyond the pages that were reserved.
        """
        sequences = self._complete("advance()")
        behind = sequences.is_behind  # then what reads the device's lengths finds these tokens there
        if type(counts) is int and sequences.has_room(counts):
            if not behind:
                sequences.pool.step(counts)
            elif sequences.is_behind:
                sequences.pool.may_step(counts)
            return
        each = self._for_each(counts, "counts")
        if not behind:
            sequences.pool.advance(each)
        elif sequences.is_behind:
            sequences.sync()

    def free(self, request: int) -> None:
        """Drops all tokens of ``request`` (0 to batch - 1) and returns its pages. Raises OutOfRangeError."""
        number = _check.integer(request, "request")
        self._complete("free()").change(lambda pool: pool.release(number), "free()")

    def truncate(self, lengths: int | Sequence[int], *, keep_pages: bool = False) -> None:
        """Drops the tokens of each request from ``lengths`` on, as a rejected draft, and returns their pages.

        Args:
            lengths: of each request; or one integer, the most tokens that any request keeps.
            keep_pages: True leaves a request the pages that it has to itself, so that a captured step which relies on
                :meth:`reserve` can be replayed.

        Raises:
            OutOfRangeError: more tokens than a request has, or fewer than were evicted (0 is allowed).
            InvalidArgumentError: within the capture of a graph.
        """
        sequences = self._owned("truncate()")
        each = self._at_most(lengths, "lengths", sequences)
        keep = _check.flag(keep_pages, "keep_pages")
        sequences.check_abandoned(each)
        sequences.change(lambda pool: pool.truncate(each, keep), "truncate()")
        sequences.step = None

    def fork(self, src: int, dst: int | Sequence[int], *, length: int | None = None) -> None:
        """Makes requests share the tokens of another, as the samples of a prompt or a common prefix.

        Table entries are written, no page is copied: requests read a page together, and each copies it before it
        writes, which only the last, partly filled one needs. What ``dst`` had before is dropped.

        Args:
            src: the request that has the tokens.
            dst: one or several others.
            length: how many of its tokens, from the first; None means all.

        Raises:
            OutOfRangeError: requests or tokens that do not exist.
            InvalidArgumentError: ``src`` or a request twice in ``dst``; within the capture of a graph.
        """
        source = _check.integer(src, "src")
        targets = [_check.integer(dst, "dst")] if _is_integer(dst) else _integers(dst, "dst")
        count = -1 if length is None else _check.integer(length, "length")
        if length is not None and count < 0:
            raise InvalidArgumentError(f"length is {count}, but must be 0 or more: give a count, or None for all.")
        self._complete("fork()").change(lambda pool: pool.fork(source, targets, count), "fork()")

    def reorder(self, index: Any) -> None:
        """Makes request ``i`` what request ``index[i]`` was, for all at once, as beam search does.

        Costs the table entries that change and no page; the next append of a token to each copies at most one page
        per request. An index on a device is read, which waits for it.

        Args:
            index: one integer for each request, 0 to batch - 1, also repeated.

        Raises:
            OutOfRangeError, InvalidArgumentError: as :meth:`fork`; not one entry per request.
        """
        each = _integers(index, "index")
        self._complete("reorder()").change(lambda pool: pool.reorder(each), "reorder()")

    def evict_before(self, positions: int | Sequence[int]) -> None:
        """Returns the pages that lie wholly before ``positions``, which a sliding window never reads again.

        The tokens still count: lengths and positions stay, entries of the block table become -1. Attend only with a
        mask that ends there: ``window_left`` of w, with which a query at position p reads keys from p - w on, so that
        ``evict_before([n - w for n in cache.host_lengths])`` is right for all tokens to come. A query that does reach
        an evicted page is an OutOfRangeError on the CPU; on CUDA, and with ``clamped``, it leaves out the page's
        tokens and sets bit 0 of ``status``. :meth:`PagedKVCache.dequantize` and files need every page.

        Args:
            positions: of each request, 0 and less for none; or one integer for all that have as many tokens.

        Raises:
            OutOfRangeError: beyond a request's tokens.
            InvalidArgumentError: within the capture of a graph.
        """
        sequences = self._complete("evict_before()")
        each = self._at_most(positions, "positions", sequences)
        sequences.change(lambda pool: pool.evict_before(each), "evict_before()")

    def resize(self, batch: int) -> None:
        """Changes the number of requests: new ones come empty at the end, the last ones are dropped.

        The pages stay as many. ``block_table`` and ``lengths`` are new arrays: plan, schedule and capture again.

        Raises:
            InvalidArgumentError: a count that no plan accepts; within the capture of a graph.
        """
        if not 0 <= _check.integer(batch, "batch") <= MAX_BATCH:
            raise InvalidArgumentError(f"batch is {batch}, but must be 0 to {MAX_BATCH}: give a count.")
        sequences = self._complete("resize()")
        if _arrays.is_capturing(sequences.table):
            raise InvalidArgumentError("resize() makes new arrays, which a captured graph cannot use: call it before.")
        pool = sequences.sync().copy()
        pool.resize(batch)
        framework, device = _arrays.framework_of(sequences.table), _arrays.device_of(sequences.table)
        made = Sequences.over(pool, sequences.pages, framework, device, sequences.starts is not None)
        made.members = sequences.members
        sequences.__dict__.update(vars(made))
        for member in sequences.members:
            member._rebind(made.table, made.lengths, made.starts)
