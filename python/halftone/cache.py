"""The paged KV cache: its pages, and what writes and reads them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Sequence
from weakref import WeakValueDictionary

from . import _arrays, _cache_file, _check, _native, _readback
from ._pool import PagePool
from .errors import InvalidArgumentError, ResourceExhaustedError
from .format import KVFormat
from .spec import KVCacheSpec, agreeing, check_scales, check_spec

_PAIRINGS = ("none", "half", "interleaved")
_MAX_BATCH = 1 << 24  # of a plan
_HOST_BYTES = 128  # of a request: its length and its list of pages
_advancing: WeakValueDictionary[Any, PagedKVCache] = WeakValueDictionary()  # whose append() advances lengths, by place


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) that append applies to K before it quantises.

    Args:
        cos: f32 [max_position, rotary_dim / 2]; dims from rotary_dim on pass through.
        sin: f32, as ``cos``.
        positions: int32 [tokens], the row of ``cos`` and ``sin`` for each appended token.
        pairing: "half" pairs dims (i, i + rotary_dim/2) as GPT-NeoX and most Llama checkpoints do; "interleaved" pairs
            (2i, 2i + 1) as GPT-J does.
    """

    cos: Any
    sin: Any
    positions: Any
    pairing: str = "half"


class PagedKVCache(_check.Fixed):
    """A paged KV cache (PagedAttention, arXiv:2309.06180) whose arrays are the caller's framework's own.

    The same packed bytes serve the CPU and the GPU (docs/formats.md). This class deals pages to requests as they grow;
    with :meth:`wrap` it views pages that an engine deals itself. The attributes cannot be assigned: write into the
    arrays, or wrap others. A cache cannot be copied or pickled: see :meth:`to_safetensors`.

    Args:
        batch: requests.
        max_len: most tokens of one request.
        kv_heads, head_dim, k_format, v_format, v_head_dim, page_size, rotate_k, rotate_v: see :class:`KVCacheSpec`.
        spec: a :class:`KVCacheSpec` instead of these; those given beside it must agree with it.
        num_pages: pages shared by all requests; None means enough for every request at ``max_len``.
        framework: "numpy", "torch", "cupy" or "jax" (JAX arrays are immutable: the pages are NumPy's).
        device: "cpu" or "cuda:<index>".
        k_scale, k_min, v_scale, v_min: static scales, f32 [1] or [kv_heads], exactly for formats that have them; see
            :func:`calibrate`.
        clamped: a bad live entry of the block table excludes its tokens and sets bit 0 of ``status`` instead of being
            trusted (the CPU always checks).

    Raises:
        InvalidArgumentError, UnsupportedError: see :class:`KVCacheSpec`; scales that do not fit the format.
        ResourceExhaustedError: the pages do not fit into memory.

    Attributes:
        spec: the :class:`KVCacheSpec`.
        pages: uint8 [num_pages, page_bytes].
        block_table: int32 [batch, pages per request]; entries past a request's length are never read.
        lengths: int32 [batch], live tokens of each request, on the device.
        status: int32 [1], sticky flags on CUDA: bit 0 a bad block-table entry, bit 1 non-finite input to append.
    """

    def __init__(
        self,
        batch: int,
        max_len: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        k_format: KVFormat | str = "bf16",
        v_format: KVFormat | str | None = None,
        v_head_dim: int | None = None,
        page_size: int = 64,
        rotate_k: bool = False,
        rotate_v: bool = False,
        spec: KVCacheSpec | None = None,
        num_pages: int | None = None,
        framework: str = "numpy",
        device: str = "cpu",
        k_scale: Any = None,
        k_min: Any = None,
        v_scale: Any = None,
        v_min: Any = None,
        clamped: bool = False,
    ) -> None:
        fields: tuple[Any, ...] = (kv_heads, head_dim, k_format, v_format, v_head_dim, page_size, rotate_k, rotate_v)
        spec = KVCacheSpec(*fields) if spec is None else agreeing(spec, fields)
        check_scales(spec, k_scale, k_min, v_scale, v_min)
        for value, name in ((batch, "batch"), (max_len, "max_len")):
            if _check.integer(value, name) < 0:
                raise InvalidArgumentError(f"{name} is {value}, but must be 0 or more: give a count.")
        if batch > _MAX_BATCH:
            raise InvalidArgumentError(f"batch is {batch}, but must be at most {_MAX_BATCH}: make several caches.")
        per_request = max(1, -(-max_len // spec.page_size))
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
            pages = _arrays.empty(framework, (count, spec.page_bytes), "uint8", device, zero=True)
            table = _arrays.empty(framework, (batch, per_request), "int32", device, zero=True)
            lengths = _arrays.empty(framework, (batch,), "int32", device, zero=True)
            pool = PagePool(batch, max_len, spec.page_size, count)
        except Exception as error:
            if not _arrays.is_out_of_memory(error):
                raise
            raise ResourceExhaustedError(
                f"num_pages is {count}, but {count} pages of {spec.page_bytes} bytes (and a block table [{batch}, "
                f"{per_request}]) do not fit into the memory of {device}: make fewer pages with num_pages, or lower "
                "batch or max_len."
            ) from None
        _arrays.fill(table, -1)
        self._init(spec, pages, table, lengths, (k_scale, k_min, v_scale, v_min), clamped)
        self._pool = pool
        self._claim_lengths()

    @classmethod
    def wrap(
        cls,
        spec: KVCacheSpec,
        pages: Any,
        block_table: Any,
        lengths: Any,
        *,
        k_scale: Any = None,
        k_min: Any = None,
        v_scale: Any = None,
        v_min: Any = None,
        clamped: bool = False,
        status: Any = None,
    ) -> PagedKVCache:
        """A view of pages, block table and lengths that the caller deals and keeps up to date.

        Args:
            spec: what the pages hold.
            pages: uint8 [num_pages, page_bytes], 16-byte aligned rows.
            block_table: int32 [batch, max_pages_per_request].
            lengths: int32 [batch]; :meth:`append` advances it, so layers that share one must use :meth:`append_slots`.
            k_scale, k_min, v_scale, v_min, clamped: as in the constructor.
            status: int32 [1], sticky flags, see the attributes; None allocates it where it is needed.
        """
        self = cls.__new__(cls)
        check_scales(check_spec(spec), k_scale, k_min, v_scale, v_min)
        _check.shape(pages, "pages", 2, "num_pages, page_bytes")
        _check.shape(block_table, "block_table", 2, "batch, max_pages_per_request")
        _check.shape(lengths, "lengths", 1, "batch")
        for value, name in ((pages, "pages"), (block_table, "block_table"), (lengths, "lengths")):
            _arrays.native(value, name, written=True)
        if status is not None:
            _check.shape(status, "status", 1, "1")
            _arrays.native(status, "status", written=True)
        self._init(spec, pages, block_table, lengths, (k_scale, k_min, v_scale, v_min), clamped, status)
        self._pool = None
        return self

    _pool: PagePool | None
    _fixed = frozenset(
        ("spec", "pages", "block_table", "lengths", "k_scale", "k_min", "v_scale", "v_min", "clamped", "status")
        + ("framework", "device")
    )
    _instead = "write into its arrays, or make another cache with PagedKVCache.wrap()"
    _no_copy = "use to_safetensors() and from_safetensors(), or wrap() the same arrays"

    def _init(
        self,
        spec: KVCacheSpec,
        pages: Any,
        table: Any,
        lengths: Any,
        scales: tuple[Any, ...],
        clamped: bool,
        status: Any = None,
    ) -> None:
        self.spec = spec
        self.pages = pages
        self.block_table = table
        self.lengths = lengths
        self.k_scale, self.k_min, self.v_scale, self.v_min = scales
        self.clamped = _check.flag(clamped, "clamped")
        native = [_arrays.native(x, n) for x, n in zip((pages, table, lengths), ("pages", "block_table", "lengths"))]
        names = ("k_scale", "k_min", "v_scale", "v_min")
        native += [_arrays.native(x, n) for x, n in zip(scales, names)]
        self._native = _native.cache(spec._native, *native, self.clamped)
        self.framework = _arrays.framework_of(pages)
        self.device = _arrays.device_of(pages)
        if status is None and (self.device != "cpu" or clamped):
            status = _arrays.empty(self.framework, (1,), "int32", self.device, zero=True)
        self.status = status
        self._native_status = _arrays.kept(self.status, "status")
        self._batch = int(lengths.shape[0])
        self._single: Any = None  # int32 [batch + 1]: cu_seqlens of one token for every request
        self._native_single: Any = None
        self._is_advancing = False  # known to be the one cache whose append() advances its lengths

    def _claim_lengths(self) -> None:
        """Makes this cache the one that advances its lengths. Raises InvalidArgumentError if another layer's does."""
        if self._batch == 0:
            return
        other = _advancing.setdefault(_arrays.place_of(self.lengths), self)
        if other is not self and _arrays.place_of(other.pages) != _arrays.place_of(self.pages):
            raise InvalidArgumentError(
                "lengths is shared with a cache of other pages whose append() advances it, but a step must advance it "
                "once: wrap these pages with lengths of their own, or use append_slots()."
            )
        self._is_advancing = other is self

    @property
    def batch(self) -> int:
        """Requests."""
        return self._batch

    @property
    def num_pages(self) -> int:
        """Pages, free ones included."""
        return int(self.pages.shape[0])

    @property
    def max_len(self) -> int:
        """Most tokens of one request."""
        if self._pool is None:
            return int(self.block_table.shape[1]) * self.spec.page_size
        return self._pool.max_len

    @property
    def host_lengths(self) -> list[int]:
        """Live tokens of each request, known without asking the device; of a wrapped cache it does ask."""
        return _arrays.to_list(self.lengths) if self._pool is None else list(self._pool.lengths)

    def append(
        self,
        k: Any,
        v: Any = None,
        counts: Sequence[int] | None = None,
        *,
        rope: Rope | None = None,
        stream: int | None = None,
    ) -> None:
        """Quantises new tokens into the pages and advances the lengths; RoPE and rotation are fused in.

        Every call advances: once per step. Caches of several layers that were wrapped with one array of lengths would
        count each token once for every layer and put it into the wrong slot; this is refused where it can be seen.
        Wrap each layer with lengths of its own, or use :meth:`append_slots`.

        Pages are dealt before anything is written, so a failure leaves lengths and tokens as they were. Once
        :meth:`reserve` has dealt the pages, nothing here touches the host's memory: the call can be captured.

        Args:
            k: f32, f16 or bf16 [tokens, kv_heads, head_dim], request after request.
            v: the same dtype [tokens, kv_heads, v_head_dim]; None for a latent cache, whose V is a part of K.
            counts: tokens of each request; None means one each, or all of them with a single request.
            rope: applied to K first; of a latent cache to its last rope_dim dims.
            stream: a cudaStream_t; None means the framework's current stream.

        Raises:
            OutOfRangeError: a request would exceed ``max_len``.
            ResourceExhaustedError: no page is free.
            InvalidArgumentError: shapes or dtypes; lengths that another layer's cache advances; on the CPU also
                non-finite input (CUDA sets ``status``).
        """
        tokens = int(_check.shape(k, "k", 3, "tokens, kv_heads, head_dim")[0])
        pool, batch = self._pool, self._batch
        if not self._is_advancing:
            self._claim_lengths()
        stream = _arrays.stream_of(self.pages, stream)
        each = None
        if counts is None:
            each = tokens if batch == 1 else 1
            if each * batch != tokens:
                raise InvalidArgumentError(
                    f"k has {tokens} tokens for {batch} requests, but counts is None: say how many each one gets."
                )
            if pool is not None and pool.has_room(each):  # every step of decode but the few that need a page
                cu_seqlens = self._cumulative(each, stream)
                try:
                    self._append(k, v, None, cu_seqlens, rope, stream)
                    pool.advance(each)
                except KeyboardInterrupt:
                    self._recount(pool)
                    raise
                return
            counts = [each] * batch
        else:
            counts = _check.counts(counts, "counts")
        if sum(counts) != tokens:
            raise InvalidArgumentError(f"counts add up to {sum(counts)}, but k has {tokens} tokens: make them agree.")
        if pool is not None:
            after = pool.grown(counts)
            self._deal(pool, after, stream)
        cu_seqlens = self._cumulative(counts if each is None else each, stream)
        try:
            self._append(k, v, None, cu_seqlens, rope, stream)
            if pool is not None:
                pool.lengths = after
        except KeyboardInterrupt:
            if pool is not None:
                self._recount(pool)
            raise

    def _recount(self, pool: PagePool) -> None:
        """Makes the host's lengths the array's: an interruption may fall between the two."""
        pool.lengths = _arrays.to_list(self.lengths)

    def append_slots(
        self, k: Any, v: Any, slot_mapping: Any, *, rope: Rope | None = None, stream: int | None = None
    ) -> None:
        """Quantises tokens into given slots; lengths and block table are the caller's business.

        Args:
            k, v, rope, stream: as in :meth:`append`.
            slot_mapping: int64 [tokens], ``page * page_size + offset``; a negative entry skips its token.

        Raises:
            OutOfRangeError: a slot beyond the cache (CPU).
            InvalidArgumentError: two tokens with one slot, non-finite input (CPU), shapes or dtypes.
        """
        _check.shape(slot_mapping, "slot_mapping", 1, "tokens")
        slots = _arrays.native(slot_mapping, "slot_mapping")
        self._append(k, v, slots, None, rope, _arrays.stream_of(self.pages, stream))

    def _append(self, k: Any, v: Any, slots: Any, cu: Any, rope: Rope | None, stream: int | None) -> None:
        """``slots``, ``cu`` and ``stream`` as the native library takes them."""
        native = _arrays.native
        pairing, cos, sin, positions = 0, None, None, None
        if rope is not None:
            if not isinstance(rope, Rope):
                raise InvalidArgumentError(f"rope is a {type(rope).__name__}, but must be a halftone.Rope: make one.")
            pairing = _PAIRINGS.index(_check.choice(rope.pairing, "rope.pairing", _PAIRINGS))
            cos, sin, positions = (native(getattr(rope, n), f"rope.{n}") for n in ("cos", "sin", "positions"))
        _native.append(
            self._native, native(k, "k"), native(v, "v"), slots, cu, pairing, cos, sin, positions,
            self._native_status, stream,
        )  # fmt: skip

    def _cumulative(self, counts: int | Sequence[int], stream: int | None = None) -> Any:
        """The native cu_seqlens of ``counts`` tokens for every request, or for each. That of decode is made once."""
        if isinstance(counts, int):
            if counts == 1 and self._single is not None:
                return self._native_single
            counts = [counts] * self.batch
        cu = [0, *accumulate(counts)]
        is_single = cu == list(range(self.batch + 1))
        with _arrays.on_stream(self.pages, stream):
            array = _arrays.make(self.framework, cu, "int32", self.device)
            if is_single:  # kept, for calls on any stream
                _arrays.wait(array)
        native = _arrays.kept(array, "cu_seqlens")
        if is_single:
            self._single, self._native_single = array, native
        return native

    def _deal(self, pool: PagePool, lengths: Sequence[int], stream: int | None = None) -> None:
        """Deals pages for ``lengths`` tokens of each request and enters them into the block table; both or neither."""
        dealt = pool.reserve(lengths)
        try:
            if dealt:
                with _arrays.on_stream(self.pages, stream):
                    _arrays.put(self.block_table, dealt)
        except BaseException:
            pool.undo(dealt)
            raise

    def _owned(self, what: str) -> PagePool:
        if self._pool is None:
            raise InvalidArgumentError(
                f"{what} needs a cache that deals its own pages, but this one wraps the caller's."
            )
        return self._pool

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Deals pages for ``tokens`` more tokens of every request (or of each), so that appends need no host work.

        Raises:
            OutOfRangeError, ResourceExhaustedError: as :meth:`append`.
        """
        pool = self._owned("reserve()")
        self._deal(pool, pool.grown(self._for_each(tokens, "tokens")))
        self._cumulative(1)  # or the first append would copy it to the device, within a capture perhaps

    def advance(self, counts: int | Sequence[int] = 1) -> None:
        """Tells the host that a replayed graph appended ``counts`` tokens; the device's lengths are already right.

        Raises:
            OutOfRangeError: beyond ``max_len``.
        """
        pool = self._owned("advance()")
        if type(counts) is int and pool.has_room(counts):
            pool.advance(counts)
            return
        pool.lengths = pool.grown(self._for_each(counts, "counts"))

    def _for_each(self, value: Any, name: str) -> list[int]:
        """One integer for every request, or one for each."""
        if value is None or hasattr(value, "__index__") and not getattr(value, "shape", ()):
            return [_check.integer(value, name)] * self.batch
        return _check.counts(value, name)

    def free(self, request: int) -> None:
        """Drops all tokens of ``request`` (0 to batch - 1) and returns its pages. Raises OutOfRangeError."""
        pool = self._owned("free()")
        pool.release(_check.integer(request, "request"))
        _arrays.assign(self.lengths, pool.lengths)  # entries past a request's length are never read

    def check_status(self) -> None:
        """Reads ``status`` (synchronises) and clears it.

        Raises:
            InvalidArgumentError: append or attention met what the sentence names: a bad block-table entry, length,
                value or static scale, or more queries than rows.
        """
        flags = 0 if self.status is None else _arrays.to_list(self.status)[0]
        if flags:
            _arrays.assign(self.status, [0])
            meanings = {
                1: "a block-table entry or a length is out of range",
                2: "append got a NaN or infinity",
                4: "a schedule has more queries than q has rows",
                8: "a static scale is not finite and positive",
                16: "append got values of V beyond 2048, too large for stored f16 scales on CUDA",
            }
            what = [text for bit, text in meanings.items() if flags & bit]
            raise InvalidArgumentError(
                f"status is {flags}: {' and '.join(what)}: check the inputs since the last call."
            )

    def dequantize(
        self, k_out: Any = None, v_out: Any = None, *, dtype: str | None = None, stream: int | None = None
    ) -> tuple[Any, Any]:
        """See :func:`dequantize`."""
        return _readback.dequantize(self, k_out, v_out, dtype=dtype, stream=stream)

    def to_safetensors(self, path: Any, prefix: str = "request") -> None:
        """Writes the live pages of every request; see :func:`halftone.cache_io.save`."""
        _cache_file.save(self, path, prefix)

    @classmethod
    def from_safetensors(
        cls,
        path: Any,
        *,
        max_len: int | None = None,
        num_pages: int | None = None,
        framework: str = "numpy",
        device: str = "cpu",
    ) -> PagedKVCache:
        """Reads what :meth:`to_safetensors` or ``halftone quantize`` wrote; see :func:`halftone.cache_io.load`."""
        return _cache_file.load(PagedKVCache, path, max_len, num_pages, framework, device)

    def __repr__(self) -> str:
        s = self.spec
        return (
            f"PagedKVCache(batch={self.batch}, max_len={self.max_len}, kv_heads={s.kv_heads}, head_dim={s.head_dim}, "
            f"k_format={str(s.k_format)!r}, v_format={str(s.v_format)!r}, "
            f"{f'rope_dim={s.rope_dim}, ' if s.rope_dim else ''}"
            f"pages={self.num_pages} x {s.page_size} tokens, "
            f"{self.framework} on {self.device})"
        )


def check_cache(cache: Any) -> PagedKVCache:
    """``cache``, which must be a PagedKVCache. Raises InvalidArgumentError."""
    if not isinstance(cache, PagedKVCache):
        raise InvalidArgumentError(f"cache is a {type(cache).__name__}, but must be a PagedKVCache: make or wrap one.")
    return cache
