"""Attention in which each query attends to the keys that a list of its own names (sparse attention)."""

from __future__ import annotations

from typing import Any

from . import _arrays, _check, _native
from ._plan import plan
from .attention import Schedule, _make_schedule, check_capturing
from .cache import PagedKVCache, check_cache
from .errors import InvalidArgumentError


def attend_listed(
    q: Any,
    cache: PagedKVCache,
    indices: Any,
    *,
    counts: Any = None,
    extra_cache: PagedKVCache | None = None,
    extra_indices: Any = None,
    extra_counts: Any = None,
    schedule: Schedule | None = None,
    out: Any = None,
    lse: Any = False,
    sinks: Any = None,
    status: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    policy: str = "reproducible",
    workers: int = 0,
    out_dtype: str | None = None,
    stream: int | None = None,
) -> Any:
    """Attention of each query over the tokens that its list names, in one cache or in two.

    The CPU takes every cache. On CUDA a plan says what is served.

    Args:
        q: f32, f16 or bf16 [total_q, q_heads, head_dim].
        cache: the paged cache; its block table and lengths are not read.
        indices: int32 [total_q, top_k], slots of the cache: page * page_size + offset. A negative one names nothing,
            a slot named twice counts twice.
        counts: int32 [total_q], places of each list that count; None means all.
        extra_cache, extra_indices, extra_counts: a second list over a second cache, of one softmax with the first.
        schedule: from :func:`schedule` with a plan of the same ``top_k``; it fixes counts and options, which are then
            ignored. None: one is made, in which every query is a request.
        out, lse, sinks, status: as :func:`attend`; bit 0 of the status also says that a slot was beyond its cache.
        scale, softcap, policy, workers, out_dtype: see :func:`plan`.
        stream: a cudaStream_t; None means the framework's current stream.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        InvalidArgumentError, UnsupportedError, OutOfRangeError, ResourceExhaustedError, DeviceError.
    """
    native = _arrays.native
    own, second = check_cache(cache), None if extra_cache is None else check_cache(extra_cache)
    shape = _check.shape(q, "q", 3, "total_q, q_heads, head_dim")
    if (extra_cache is None) != (extra_indices is None):
        raise InvalidArgumentError("extra_cache and extra_indices go together, but one is None: give both or neither.")
    if schedule is None:
        made = plan(
            cache, batch=int(shape[0]), max_kv_len=0, q_heads=int(shape[1]), q_dtype=_arrays.dtype_of(q), scale=scale,
            softcap=softcap, policy=policy, workers=workers, out_dtype=out_dtype, sinks=sinks is not None,
            lse=lse is not False, top_k=int(_check.shape(indices, "indices", 2, "total_q, top_k")[1]),
            extra=None if second is None else second.spec,
            extra_top_k=0 if extra_indices is None
            else int(_check.shape(extra_indices, "extra_indices", 2, "total_q, extra_top_k")[1]),
        )  # fmt: skip
        schedule = _make_schedule(made, None, None, None, q, None, stream, counts, extra_counts)
    plan_ = schedule.plan
    makes_out, makes_lse = out is None, lse is True or (lse is False and plan_.lse)
    if makes_out:
        out = _arrays.empty_output(q, (*shape[:-1], plan_.spec.v_head_dim), plan_.out_dtype)
    if makes_lse:
        lse = _arrays.empty_output(q, shape[:-1], "f32")
    arguments = (
        schedule._native, own._native, native(q, "q"), native(indices, "indices"),
        None if second is None else second._native, native(extra_indices, "extra_indices"), native(out, "out", True),
        None if lse is False else native(lse, "lse", True), native(sinks, "sinks"),
        own._native_status if status is None else native(status, "status", True), _arrays.stream_of(q, stream),
    )  # fmt: skip
    if not _native.run_listed(*arguments, False):
        check_capturing(q, stream)  # the stream is not the schedule's
        _native.run_listed(*arguments, True)
    if makes_out:
        out = _arrays.finish(out, q)
    if lse is False:
        return out
    return out, _arrays.finish(lse, q) if makes_lse else lse
