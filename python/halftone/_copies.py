"""Copies of caches: in memory, and as what pickle can carry to another process."""

from __future__ import annotations

from typing import Any, Callable

from . import _arrays
from ._pool import PagePool
from ._sequences import Sequences
from .errors import InvalidArgumentError, ResourceExhaustedError
from .spec import TENSORS


def in_memory(cache: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` gives. Raises ResourceExhaustedError where memory lacks, InvalidArgumentError for a layer."""
    if getattr(cache, "_layer", None) is not None:
        raise InvalidArgumentError(
            f"this is layer {cache._layer} of a cache, which owns the pages of all: copy the LayeredKVCache."
        )
    try:
        return make()
    except Exception as error:
        if not _arrays.is_out_of_memory(error):
            raise
        raise ResourceExhaustedError(
            f"{cache!r} does not fit into memory a second time: free some, or use fewer pages."
        ) from None


def scales_of(cache: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """What lies beside the pages of a PagedKVCache, each changed, by name."""
    return {name: None if getattr(cache, name) is None else change(getattr(cache, name)) for name in TENSORS}


def clone_sequences(sequences: Sequences) -> Sequences:
    """The same books and arrays once more."""
    pool = sequences.sync().copy()
    pages = [_arrays.copied(x) for x in sequences.pages]
    index = (_arrays.copied(x) for x in (sequences.table, sequences.lengths, sequences.starts))
    copied = Sequences(pool, pages, *index)
    if sequences.step is not None:
        copied.step = sequences.step._replace(missing=set(sequences.step.missing))
    return copied


def clone(cls: Any, cache: Any) -> Any:
    """Another PagedKVCache, which is ``cls``: it imports this module, not the other way."""

    def make() -> Any:
        copied = _arrays.copied
        others = dict(scales_of(cache, copied), clamped=cache.clamped, status=copied(cache.status))
        if cache._sequences is None:
            arrays = (copied(x) for x in (cache.pages, cache.block_table, cache.lengths))
            return cls.wrap(cache.spec, *arrays, **others)
        sequences = clone_sequences(cache._sequences)
        made = cls.wrap(cache.spec, sequences.pages[0], sequences.table, sequences.lengths, **others)
        made._join(sequences)
        return made

    return in_memory(cache, make)


def sequences_state(sequences: Sequences) -> dict[str, Any]:
    """Books and the pages in use, on the host."""
    pool = sequences.sync()
    sequences.check_complete("pickle")
    rows = pool.rows()
    used = sorted({page for row in rows for page in row if page >= 0})
    return {
        "max_len": pool.max_len,
        "page_size": pool.page_size,
        "num_pages": pool.num_pages,
        "rows": rows,
        "lengths": list(pool.lengths),
        "used": used,
        "pages": [_arrays.to_numpy(pages[used]) for pages in sequences.pages],
        "place": (_arrays.framework_of(sequences.table), _arrays.device_of(sequences.table)),
        "layered": sequences.starts is not None,
    }


def restore_sequences(state: dict[str, Any]) -> Sequences:
    """What :func:`sequences_state` was of."""
    framework, device = state["place"]
    pool = PagePool.restore(*(state[name] for name in ("max_len", "page_size", "num_pages", "rows", "lengths")))
    pages = []
    for saved in state["pages"]:
        own = _arrays.empty(framework, (pool.num_pages, saved.shape[1]), "uint8", device, zero=True)
        if state["used"]:
            own[state["used"]] = _arrays.make(framework, saved, "uint8", device)
        pages.append(own)
    return Sequences.over(pool, pages, framework, device, state["layered"])


def state(cache: Any) -> dict[str, Any]:
    """What pickle carries of a PagedKVCache: of its pages those in use, of a wrapped one all."""

    def make() -> dict[str, Any]:
        common = {"spec": cache.spec, "clamped": cache.clamped, "scales": scales_of(cache, _arrays.to_numpy)}
        common["flags"] = None if cache.status is None else _arrays.to_list(cache.status)
        common["place"] = (cache.framework, cache.device)
        if cache._sequences is not None:
            return {**common, "sequences": sequences_state(cache._sequences)}
        return {**common, "arrays": [_arrays.to_numpy(x) for x in (cache.pages, cache.block_table, cache.lengths)]}

    return in_memory(cache, make)


def restore(cls: Any, state: dict[str, Any]) -> Any:
    """What :func:`state` was of, on the same device."""
    framework, device = state["place"]

    def made(values: Any, dtype: str) -> Any:
        return None if values is None else _arrays.copied(_arrays.make(framework, values, dtype, device))

    others = {name: made(values, "f32") for name, values in state["scales"].items()}
    others.update(clamped=state["clamped"], status=made(state["flags"], "int32"))
    if "arrays" in state:
        arrays = [made(x, dtype) for x, dtype in zip(state["arrays"], ("uint8", "int32", "int32"))]
        return cls.wrap(state["spec"], *arrays, **others)
    sequences = restore_sequences(state["sequences"])
    cache = cls.wrap(state["spec"], sequences.pages[0], sequences.table, sequences.lengths, **others)
    cache._join(sequences)
    return cache
