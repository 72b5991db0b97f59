"""The paged KV cache: its pages, and what writes and reads them."""

from __future__ import annotations

from typing import Any

from . import _arrays, _cache_file, _check, _copies, _native, _readback
from ._append import Appending, Rope
from ._sequences import Sequences, allocate
from .errors import InvalidArgumentError, UnsupportedError
from .format import KVFormat
from .spec import TENSORS, KVCacheSpec, agreeing, check_scales, check_spec, with_channels


class PagedKVCache(Appending):
    """A paged KV cache (PagedAttention, arXiv:2309.06180) whose arrays are the caller's framework's own.

    The same packed bytes serve the CPU and the GPU (docs/formats.md). This class deals pages to requests as they grow;
    with :meth:`wrap` it views pages that an engine deals itself. The attributes cannot be assigned: write into the
    arrays, or wrap others. :meth:`clone`, ``copy.deepcopy`` and ``pickle`` copy a cache with its pages. A model's
    layers are best held by a :class:`LayeredKVCache`.

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
        k_offset, k_channel_scale: offset and scale of K's channels, f32 [kv_heads, head_dim], which the cache then has;
            see :func:`calibrate_channels`. Beside ``spec`` exactly with its ``offset_k`` and ``scale_k``.
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
        status: int32 [1], sticky flags on CUDA: bit 0 a bad block-table entry or length, bit 1 non-finite input to
            append, bit 2 more queries than rows of q, bit 3 a bad static scale, bit 4 V beyond 2,048 where f16 scales
            are stored, bit 5 more keys than rows of plain k and v (for a call that was given this word) or, of
            prompts, than the ``max_total_kv`` or ``max_prompt_kv`` of :func:`plan`.
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
        k_offset: Any = None,
        k_channel_scale: Any = None,
        clamped: bool = False,
    ) -> None:
        fields: tuple[Any, ...] = (kv_heads, head_dim, k_format, v_format, v_head_dim, page_size, rotate_k, rotate_v)
        if spec is None:
            spec = with_channels(KVCacheSpec(*fields), k_offset, k_channel_scale)
        else:
            spec = agreeing(spec, fields)
        beside = (k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale)
        check_scales(spec, *beside)
        sequences = allocate([spec], batch, max_len, num_pages, framework, device)
        self._init(spec, sequences.pages[0], sequences.table, sequences.lengths, beside, clamped)
        self._join(sequences)

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
        k_offset: Any = None,
        k_channel_scale: Any = None,
        clamped: bool = False,
        status: Any = None,
    ) -> PagedKVCache:
        """A view of pages, block table and lengths that the caller deals and keeps up to date.

        Args:
            spec: what the pages hold.
            pages: uint8 [num_pages, page_bytes], 16-byte aligned rows.
            block_table: int32 [batch, max_pages_per_request].
            lengths: int32 [batch]; :meth:`append` advances it, so layers that share one must use :meth:`append_slots`.
            k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale, clamped: as in the constructor.
            status: int32 [1], sticky flags, see the attributes; None allocates it where it is needed.
        """
        self = cls.__new__(cls)
        beside = (k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale)
        check_scales(check_spec(spec), *beside)
        _check.shape(pages, "pages", 2, "num_pages, page_bytes")
        _check.shape(block_table, "block_table", 2, "batch, max_pages_per_request")
        _check.shape(lengths, "lengths", 1, "batch")
        for value, name in ((pages, "pages"), (block_table, "block_table"), (lengths, "lengths")):
            _arrays.native(value, name, written=True)
        if status is not None:
            _check.shape(status, "status", 1, "1")
            _arrays.native(status, "status", written=True)
        self._init(spec, pages, block_table, lengths, beside, clamped, status)
        return self

    _sequences: Sequences | None
    _fixed = frozenset(
        ("spec", "pages", "block_table", "lengths", *TENSORS, "clamped", "status", "framework", "device")
    )
    _instead = "write into its arrays, or make another cache with PagedKVCache.wrap()"

    def _init(
        self,
        spec: KVCacheSpec,
        pages: Any,
        table: Any,
        lengths: Any,
        beside: tuple[Any, ...],
        clamped: bool,
        status: Any = None,
    ) -> None:
        self.spec = spec
        self.pages = pages
        self.block_table = table
        self.lengths = lengths
        self.k_scale, self.k_min, self.v_scale, self.v_min, self.k_offset, self.k_channel_scale = beside
        self.clamped = _check.flag(clamped, "clamped")
        self._native = self._native_of(table, lengths)
        self.framework = _arrays.framework_of(pages)
        self.device = _arrays.device_of(pages)
        if status is None and (self.device != "cpu" or clamped):
            status = _arrays.empty(self.framework, (1,), "int32", self.device, zero=True)
        self.status = status
        self._native_status = _arrays.kept(self.status, "status")
        self._batch = int(lengths.shape[0])
        self._single = self._native_single = self._native_starts = None
        self._is_advancing = False
        self._sequences = self._layer = None

    def _native_of(self, table: Any, lengths: Any) -> Any:
        arrays = [(self.pages, "pages"), (table, "block_table"), (lengths, "lengths")]
        arrays += [(getattr(self, name), name) for name in TENSORS]
        return _native.cache(self.spec._native, *(_arrays.native(x, name) for x, name in arrays), self.clamped)

    def _join(self, sequences: Sequences, layer: int | None = None) -> None:
        """Makes this the cache of ``sequences``, or one of its layers."""
        self._sequences, self._layer = sequences, layer
        sequences.members.add(self)
        if layer is not None:
            self._native_starts = self._native_of(sequences.table, sequences.starts)
        if layer:  # layer 0 advances the lengths
            self._is_advancing = True
        else:
            self._claim_lengths()

    def _rebind(self, table: Any, lengths: Any, starts: Any) -> None:
        """Goes on with another block table and other lengths."""
        self._release_lengths()
        native = self._native_of(table, lengths)
        self.__dict__.update(block_table=table, lengths=lengths, _native=native, _batch=int(lengths.shape[0]))
        self._single = self._native_single = None
        if starts is not None:
            self._native_starts = self._native_of(table, starts)
        if not self._layer:
            self._is_advancing = False
            self._claim_lengths()

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
        if self._sequences is None:
            return int(self.block_table.shape[1]) * self.spec.page_size
        return self._sequences.pool.max_len

    @property
    def host_lengths(self) -> list[int]:
        """Live tokens of each request, known without asking the device.

        It is asked for those of a wrapped cache, and after an :meth:`append` of ``cu_seqlens`` on a GPU.
        """
        return _arrays.to_list(self.lengths) if self._sequences is None else list(self._sequences.sync().lengths)

    def _owned(self, what: str) -> Sequences:
        if self._layer is not None:
            raise InvalidArgumentError(
                f"{what} is for all layers at once, but this is layer {self._layer}: call it on the LayeredKVCache."
            )
        return super()._owned(what)

    def _keep_single(self) -> None:
        self._cumulative(1)

    def clone(self) -> PagedKVCache:
        """A cache of its own with the same tokens, pages and scales, also of a wrapped one; ``copy.deepcopy`` is this.

        Raises:
            InvalidArgumentError: for a layer of several.
            ResourceExhaustedError: the pages do not fit into memory a second time.
        """
        return _copies.clone(PagedKVCache, self)

    def __deepcopy__(self, memo: Any) -> PagedKVCache:
        return self.clone()

    def __copy__(self) -> Any:
        raise UnsupportedError(
            "a PagedKVCache cannot be copied without its pages, which both would deal: use clone(), or wrap() its "
            "arrays."
        )

    def __reduce__(self) -> Any:
        return _copies.restore, (PagedKVCache, _copies.state(self))

    def check_status(self) -> None:
        """Reads ``status`` (synchronises) and clears it.

        Raises:
            InvalidArgumentError: append or attention met what the sentence names: a bad block-table entry, length,
                value or static scale, or more queries or keys than rows.
        """
        flags = 0 if self.status is None else _arrays.to_list(self.status)[0]
        if flags:
            _arrays.assign(self.status, [0])
            meanings = {
                1: "a block-table entry or a length is out of range",
                2: "append got a NaN or infinity",
                4: "a schedule has more queries than q has rows",
                8: "a static scale is not finite and positive, or a channel's offset or scale beyond its limits",
                16: "append got values of V beyond 2048, too large for stored f16 scales on CUDA",
                32: "a schedule has more keys than k and v have rows",
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


__all__ = ["PagedKVCache", "Rope", "check_cache"]
