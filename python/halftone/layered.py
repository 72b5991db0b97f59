"""The caches of all layers of a model: one pool of page numbers, one block table, one array of lengths."""

from __future__ import annotations

from typing import Any, Sequence

from . import _arrays, _check, _copies
from ._sequences import SequenceOperations, Sequences, allocate
from .cache import PagedKVCache
from .errors import InvalidArgumentError, OutOfRangeError, UnsupportedError
from .format import KVFormat
from .spec import TENSORS, KVCacheSpec, agreeing, with_channels

_MAX_LAYERS = 1 << 16


class LayeredKVCache(SequenceOperations):
    """The paged caches of a model's layers, which share block table and lengths: page 7 is a page in every layer.

    Operations on requests (:meth:`fork`, :meth:`truncate`, :meth:`reserve` and so on, see :class:`PagedKVCache`) are
    done here, once for all layers. :meth:`layer` gives the :class:`PagedKVCache` that a layer appends to and attends.

    A step appends the same tokens to every layer, to layer 0 first: it advances the lengths, once, and the others put
    their tokens beside its own. Between its append and its attention a layer may do anything; layer 0 begins another
    step when all have followed. One schedule, made after layer 0's append, serves all layers.

    Args:
        batch, max_len: as of :class:`PagedKVCache`.
        layers: how many; or for each layer its :class:`KVCacheSpec`, or its format: one of K and V, or a pair.
        kv_heads, head_dim, k_format, v_format, v_head_dim, page_size, rotate_k, rotate_v, spec: of every layer whose
            own spec is not given; see there. Formats of a layer replace these.
        num_pages: pages of each layer.
        framework, device, clamped: as there.
        k_scale, k_min, v_scale, v_min: static scales of all layers, as there; or a list with those of each layer, None
            for a layer without.
        k_offset, k_channel_scale: offset and scale of K's channels, likewise. A layer whose own spec is not given has
            those that are not None.

    Raises:
        InvalidArgumentError, UnsupportedError, ResourceExhaustedError: as there; layers of different page sizes.

    Attributes:
        block_table: int32 [batch, pages per request], of all layers.
        lengths: int32 [batch], on the device, with the tokens of the present step.
        status: int32 [1] of all layers, see there.
    """

    _fixed = frozenset(("block_table", "lengths", "status"))
    _instead = "write into it"
    _sequences: Sequences

    def __init__(
        self,
        batch: int,
        max_len: int,
        *,
        layers: int | Sequence[Any],
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
        fields = (kv_heads, head_dim, k_format, v_format, v_head_dim, page_size, rotate_k, rotate_v)
        specs = _specs(layers, fields, spec)
        given = dict(zip(TENSORS, (k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale)))
        scales = {name: _of_each(value, name, len(specs)) for name, value in given.items()}
        own = [False] * len(specs) if hasattr(layers, "__index__") else [isinstance(x, KVCacheSpec) for x in layers]
        for i, has_own in enumerate(own):
            if spec is None and not has_own:
                specs[i] = with_channels(specs[i], scales["k_offset"][i], scales["k_channel_scale"][i])
        sequences = allocate(specs, batch, max_len, num_pages, framework, device, layered=True)
        status = None
        if device != "cpu" or clamped:
            status = _arrays.empty(framework, (1,), "int32", device, zero=True)
        self._assemble(sequences, specs, scales, clamped, status)

    def _assemble(
        self,
        sequences: Sequences,
        specs: Sequence[KVCacheSpec],
        scales: dict[str, list[Any]],
        clamped: bool,
        status: Any,
    ) -> None:
        self._sequences, self._layers = sequences, []
        self.block_table, self.lengths, self.status = sequences.table, sequences.lengths, status
        for i, spec in enumerate(specs):
            own = {name: values[i] for name, values in scales.items()}
            cache = PagedKVCache.wrap(
                spec, sequences.pages[i], sequences.table, sequences.lengths, clamped=clamped, status=status, **own
            )
            cache._join(sequences, i)
            self._layers.append(cache)
        sequences.members.add(self)

    _layers: list[PagedKVCache]

    def _rebind(self, table: Any, lengths: Any, starts: Any) -> None:
        self.__dict__.update(block_table=table, lengths=lengths)

    def _keep_single(self) -> None:
        first = self._layers[0]
        first._cumulative(1)
        for other in self._layers[1:]:
            other._single, other._native_single = first._single, first._native_single

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._layers)

    @property
    def batch(self) -> int:
        """Requests."""
        return self._sequences.pool.batch

    @property
    def num_pages(self) -> int:
        """Pages of each layer, free ones included."""
        return self._sequences.pool.num_pages

    @property
    def max_len(self) -> int:
        """Most tokens of one request."""
        return self._sequences.pool.max_len

    @property
    def host_lengths(self) -> list[int]:
        """Live tokens of each request with those of the present step; see :attr:`PagedKVCache.host_lengths`."""
        return list(self._sequences.sync().lengths)

    def layer(self, index: int) -> PagedKVCache:
        """The cache of layer ``index`` (0 to num_layers - 1), always the same object. Raises OutOfRangeError."""
        number = _check.integer(index, "index")
        if not 0 <= number < len(self._layers):
            raise OutOfRangeError(
                f"index is {number}, but the cache has {len(self._layers)} layers: use 0 to {len(self._layers) - 1}."
            )
        return self._layers[number]

    def check_status(self) -> None:
        """Reads the ``status`` of all layers; see :meth:`PagedKVCache.check_status`."""
        self._layers[0].check_status()

    def clone(self) -> LayeredKVCache:
        """A cache of its own with the same tokens, pages and scales; ``copy.deepcopy`` is this.

        Raises:
            ResourceExhaustedError: the pages do not fit into memory a second time.
        """
        return _copies.in_memory(self, lambda: self._again(_copies.clone_sequences(self._sequences), _arrays.copied))

    def _again(self, sequences: Sequences, copied: Any) -> LayeredKVCache:
        made = LayeredKVCache.__new__(LayeredKVCache)
        first, each = self._layers[0], [_copies.scales_of(layer, copied) for layer in self._layers]
        scales = {name: [own[name] for own in each] for name in TENSORS}
        made._assemble(
            sequences, [layer.spec for layer in self._layers], scales, first.clamped, copied(self.status)
        )
        return made

    def __deepcopy__(self, memo: Any) -> LayeredKVCache:
        return self.clone()

    def __copy__(self) -> Any:
        raise UnsupportedError(
            "a LayeredKVCache cannot be copied without its pages, which both would deal: use clone()."
        )

    def __reduce__(self) -> Any:
        def state() -> dict[str, Any]:
            each = [_copies.scales_of(layer, _arrays.to_numpy) for layer in self._layers]
            return {
                "specs": [layer.spec for layer in self._layers],
                "scales": {name: [own[name] for own in each] for name in TENSORS},
                "clamped": self._layers[0].clamped,
                "flags": None if self.status is None else _arrays.to_list(self.status),
                "sequences": _copies.sequences_state(self._sequences),
            }

        return _restore, (_copies.in_memory(self, state),)

    def __repr__(self) -> str:
        specs = [layer.spec for layer in self._layers]
        formats = sorted({f"{s.k_format}:{s.v_format}" for s in specs})
        return (
            f"LayeredKVCache(batch={self.batch}, max_len={self.max_len}, layers={len(specs)}, "
            f"formats={'|'.join(formats)}, pages={self.num_pages} x {specs[0].page_size} tokens, "
            f"{_arrays.framework_of(self.lengths)} on {_arrays.device_of(self.lengths)})"
        )


def _restore(state: dict[str, Any]) -> LayeredKVCache:
    """What pickle carried, on the same device."""
    sequences = _copies.restore_sequences(state["sequences"])
    framework, device = state["sequences"]["place"]

    def made(values: Any, dtype: str) -> Any:
        return None if values is None else _arrays.copied(_arrays.make(framework, values, dtype, device))

    scales = {name: [made(x, "f32") for x in values] for name, values in state["scales"].items()}
    cache = LayeredKVCache.__new__(LayeredKVCache)
    cache._assemble(sequences, state["specs"], scales, state["clamped"], made(state["flags"], "int32"))
    return cache


def _specs(layers: Any, fields: tuple[Any, ...], spec: Any) -> list[KVCacheSpec]:
    """The spec of each layer. Raises InvalidArgumentError, UnsupportedError."""

    def common(k_format: Any, v_format: Any) -> KVCacheSpec:
        own = (*fields[:2], k_format, v_format, *fields[4:])
        if spec is None:
            return KVCacheSpec(*own)
        made = agreeing(spec, (*fields[:2], "bf16", None, *fields[4:]))
        values = {name: getattr(made, name) for name in ("kv_heads", "head_dim", "v_head_dim", "page_size")}
        others = {name: getattr(made, name) for name in ("rotate_k", "rotate_v", "rope_dim", "offset_k", "scale_k")}
        return KVCacheSpec(**values, **others, k_format=k_format, v_format=v_format)

    if hasattr(layers, "__index__"):
        count = _check.integer(layers, "layers")
        if not 1 <= count <= _MAX_LAYERS:
            raise InvalidArgumentError(f"layers is {count}, but must be 1 to {_MAX_LAYERS}: give a count.")
        return [KVCacheSpec(*fields) if spec is None else agreeing(spec, fields)] * count
    if isinstance(layers, (str, bytes)) or not hasattr(layers, "__iter__"):
        raise InvalidArgumentError(
            f"layers is {layers!r}, but must be a count, or a sequence with a spec or format for each: pass one."
        )
    specs = []
    for layer in layers:
        if isinstance(layer, KVCacheSpec):
            specs.append(layer)
        elif isinstance(layer, tuple) and len(layer) == 2:
            specs.append(common(*layer))
        else:
            specs.append(common(layer, None))
    if not 1 <= len(specs) <= _MAX_LAYERS:
        raise InvalidArgumentError(f"layers has {len(specs)} entries, but must have 1 to {_MAX_LAYERS}: give one each.")
    for i, own in enumerate(specs):
        if own.page_size != specs[0].page_size:
            raise InvalidArgumentError(
                f"layers[{i}] has pages of {own.page_size} tokens, but layers[0] of {specs[0].page_size}: give all "
                "layers one page_size."
            )
    return specs


def _of_each(value: Any, name: str, count: int) -> list[Any]:
    """A scale of each layer. Raises InvalidArgumentError."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidArgumentError(f"{name} has {len(value)} entries, but the cache has {count} layers: give one each.")
    return list(value)
