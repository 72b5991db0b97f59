"""Schedule once per step, attend once per layer; or attend() alone, which plans, too."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakSet

from . import _arrays, _check, _native
from ._plan import Plan, plan
from ._sequences import SequenceOperations
from ._append import Rope
from .cache import PagedKVCache, check_cache
from .errors import InvalidArgumentError
from .spec import KVTensors

_OPTIONS = (
    "causal", "window_left", "window_right", "scale", "softcap", "policy", "arithmetic", "workers", "out_dtype"
)  # fmt: skip


class Schedule(_check.Fixed):
    """The work of one step: a plan, the lengths of a batch, and a workspace that serves every layer of the step.

    The lengths are those of the moment it is made: tokens that a cache gets later are keys after :meth:`update`.

    The workspace also holds partial results, so it serves one call at a time: make a schedule for each thread and for
    each CUDA stream of work that may overlap (a plan can be shared). A call that finds another thread's in progress is
    refused, and so is one on another stream than that of the last :func:`schedule` or :meth:`update`; the capture of a
    CUDA graph may be on any stream, and nobody can see on which ones its replays overlap.

    Attributes:
        plan: the :class:`Plan`.
        workspace: uint8, the schedule and the partial results.
    """

    _fixed = frozenset(("plan", "workspace", "kv_lengths", "cu_q", "cu_kv", "counts", "extra_counts"))
    _instead = "call schedule() again"
    _no_copy = "call schedule() again"

    def __init__(
        self, plan: Plan, kv_lengths: Any, cu_q: Any, cu_kv: Any, workspace: Any, stream: int | None,
        counts: Any = None, extra_counts: Any = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.workspace = workspace
        self._appended: WeakSet[PagedKVCache] = WeakSet()  # caches that have got the tokens of these lengths
        self.kv_lengths, self.cu_q, self.cu_kv = kv_lengths, cu_q, cu_kv
        self.counts, self.extra_counts = counts, extra_counts
        given = {
            "kv_lengths": kv_lengths, "cu_q": cu_q, "cu_kv": cu_kv, "counts": counts, "extra_counts": extra_counts,
        }  # fmt: skip
        self._copied = next((name for name, x in given.items() if _arrays.is_read_only(x)), None)
        native = {name: _arrays.native(x, name) for name, x in given.items()}
        native["workspace"] = _arrays.native(workspace, "workspace", True)
        given["workspace"] = workspace
        followed = ("kv_lengths", "cu_kv") if not plan.options["top_k"] else ("counts", "cu_q", "workspace")
        name = next((n for n in followed if given[n] is not None), "cu_kv")
        self._like, self._like_native = given[name], native[name]
        self._native = _native.step(plan._native, *native.values(), _arrays.stream_of(self._like, stream))

    def update(self, stream: int | None = None) -> None:
        """Schedules again for the present values of the same length arrays; can be captured in a graph on CUDA.

        The schedule moves to this stream, which must have waited for the last use on another one.

        Args:
            stream: a cudaStream_t; None means the framework's current stream.

        Raises:
            OutOfRangeError, InvalidArgumentError: as :func:`schedule`; a read-only array, which was copied then.
        """
        if self._copied is not None:
            raise InvalidArgumentError(
                f"{self._copied} is a read-only array, of which the schedule has a copy: pass a writable one, or call "
                "schedule() again."
            )
        on = _arrays.stream_of(self._like, stream)
        self._appended.clear()
        if not _native.reschedule(self._native, self._like_native, on) and not _arrays.is_capturing(self._like, on):
            _native.follow_stream(self._native, self._like_native, on)


def schedule(
    plan: Plan,
    kv_lengths: Any = None,
    *,
    cu_q: Any = None,
    cu_kv: Any = None,
    counts: Any = None,
    extra_counts: Any = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Schedule:
    """Turns lengths into a work list; one schedule serves every layer of a step. Never synchronises on CUDA.

    Args:
        plan: from :func:`plan`.
        kv_lengths: int32 [batch] on the plan's device, or a cache, whose lengths are meant: the tokens that it has
            now, also of a plan with ``appends``.
        cu_q: int32 [batch + 1], cumulative numbers of queries from 0; None means ``max_q_len`` for each request.
        cu_kv: int32 [batch + 1], with plain K and V instead of ``kv_lengths``.
        counts, extra_counts: int32 [total_q], with lists, which have no ``kv_lengths``: places of each query's list
            that count; None means ``top_k`` (``extra_top_k``).
        workspace: uint8 [workspace_bytes or more], 256-byte aligned, to be written; None allocates it.
        stream: a cudaStream_t; None means the framework's current stream.

    Raises:
        OutOfRangeError, InvalidArgumentError: lengths beyond the plan's bounds (CPU).
        ResourceExhaustedError: the workspace is too small.
    """
    if not isinstance(plan, Plan):
        raise InvalidArgumentError(f"plan is a {type(plan).__name__}, but must be a Plan: call halftone.plan().")
    if isinstance(kv_lengths, SequenceOperations):
        kv_lengths = kv_lengths.lengths
    like = next((x for x in (kv_lengths, cu_kv, counts, extra_counts, cu_q) if x is not None), None)
    return _make_schedule(plan, kv_lengths, cu_q, cu_kv, like, workspace, stream, counts, extra_counts)


def attend(
    q: Any,
    cache: PagedKVCache | None = None,
    *,
    k: Any = None,
    v: Any = None,
    rope: Rope | None = None,
    slot_mapping: Any = None,
    advance: bool = True,
    schedule: Schedule | None = None,
    cu_q: Any = None,
    cu_kv: Any = None,
    out: Any = None,
    lse: Any = False,
    alibi_slopes: Any = None,
    sinks: Any = None,
    status: Any = None,
    workspace: Any = None,
    causal: bool | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    policy: str | None = None,
    arithmetic: str | None = None,
    workers: int | None = None,
    out_dtype: str | None = None,
    stream: int | None = None,
) -> Any:
    """Attention of ``q`` over a paged cache, or over plain K and V; beside a cache, ``k`` and ``v`` are appended first.

    Online softmax (arXiv:1805.02867) over tiles (FlashAttention, arXiv:2205.14135) with a split-KV merge as in
    Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html); logits, softmax and accumulation in
    fp32. A row that sees no key gives zeros and LSE -inf.

    Args:
        q: f32, f16 or bf16 [total_q, q_heads, head_dim], request after request.
        cache: the paged cache.
        k, v: beside ``cache``: the new token of every query, as :meth:`PagedKVCache.append` takes them (``v`` None for
            a latent cache). They become the last keys of their requests, with the bytes and the results of append()
            and then attend(), in one call; pages are dealt and the lengths advance as there. Layers that share their
            lengths advance once: a step whose layers share a ``schedule`` goes through them in any order, but for
            layer 0 of a :class:`LayeredKVCache`, which is the first.
            Instead of ``cache``: [total_kv, kv_heads, head_dim] and [total_kv, kv_heads, v_head_dim], one dtype. CUDA
            takes what :class:`KVTensors` says, with rows at multiples of 16 bytes and positive strides.
        rope: applied to a new ``k`` first.
        slot_mapping: int64 [total_q] with new tokens: a negative entry skips its token, which is not written; another
            one is the slot that the block table has for it (the CPU checks).
        advance: False leaves the lengths of a wrapped cache, which then are the caller's to count up.
        schedule: from :func:`schedule`, to be shared by the layers of a step; it fixes the mask and the other options,
            which must then stay None. Without one, a plan is looked up and a schedule made for this call.
        cu_q: int32 [batch + 1]; None means the same number of queries for each request. With plain K and V and neither
            ``cu_q`` nor ``cu_kv``, there is one request.
        cu_kv: int32 [batch + 1], with plain K and V.
        out: [total_q, q_heads, v_head_dim] of ``out_dtype``, every element of which is written; None allocates it.
        lse: True, or f32 [total_q, q_heads] to be written: also return the natural log of the sum of exponentials.
        alibi_slopes, sinks: f32 [q_heads]; see :func:`plan`.
        status: int32 [1], sticky: bit 0 is set by a bad block-table entry; on CUDA see also
            :class:`PagedKVCache`, and with plain K and V bit 5 (32) means that ``cu_kv`` has more keys than they have
            rows, which were left out. None means the cache's own.
        workspace: of a call without ``schedule``, as there; None allocates it.
        causal, window_left, window_right, scale, softcap, policy, arithmetic, workers, out_dtype: see :func:`plan`.
        stream: a cudaStream_t; None means the framework's current stream.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        InvalidArgumentError, UnsupportedError, OutOfRangeError, ResourceExhaustedError, DeviceError.
    """
    native = _arrays.native
    native_q, made_here = native(q, "q"), schedule is None
    appends = cache is not None and k is not None
    if not appends and (rope is not None or slot_mapping is not None or advance is not True):
        _refuse_without_tokens(rope, slot_mapping)
    if schedule is None:
        options = (causal, window_left, window_right, scale, softcap, policy, arithmetic, workers, out_dtype)
        given = {name: value for name, value in zip(_OPTIONS, options) if value is not None}
        given.update(alibi=alibi_slopes is not None, sinks=sinks is not None, lse=lse is not False)
        given.update(appends=appends)
        schedule = _schedule_for(q, cache, k, v, cu_q, cu_kv, given, workspace, stream)
    elif (
        type(schedule) is not Schedule
        or causal is not None or window_left is not None or window_right is not None or scale is not None
        or softcap is not None or policy is not None or arithmetic is not None or workers is not None
        or out_dtype is not None
        or cu_q is not None or cu_kv is not None or workspace is not None
    ):  # fmt: skip
        _refuse_beside_schedule(schedule, locals())
    plan = schedule.plan
    if lse is None:
        raise InvalidArgumentError("lse is None, but must be True, False or an array: choose one.")
    makes_out, makes_lse = out is None, lse is True or (lse is False and plan.lse)
    if makes_out or makes_lse:
        shape = _check.shape(q, "q", 3, "total_q, q_heads, head_dim")
        if makes_out:
            width = plan.spec.v_head_dim
            out = _arrays.empty_output(q, shape if shape[-1] == width else (*shape[:-1], width), plan.out_dtype)
        if makes_lse:
            lse = _arrays.empty_output(q, shape[:-1], "f32")
    own = None if cache is None else check_cache(cache)
    if status is not None:
        status = native(status, "status", True)
    elif own is not None:
        status = own._native_status
    if appends and own is not None:
        written = (
            native(out, "out", True), None if lse is False else native(lse, "lse", True),
            None if alibi_slopes is None else native(alibi_slopes, "alibi_slopes"),
            None if sinks is None else native(sinks, "sinks"), status,
        )  # fmt: skip
        _attend_appending(q, native_q, own, (k, v, rope, slot_mapping), advance, schedule, written, stream, made_here)
        return _returned(out, lse, q, makes_out, makes_lse)
    arguments = (  # calling native() for what is None would cost as much as for an array
        schedule._native, None if own is None else own._native, native_q,
        None if k is None else native(k, "k"), None if v is None else native(v, "v"), native(out, "out", True),
        None if lse is False else native(lse, "lse", True),
        None if alibi_slopes is None else native(alibi_slopes, "alibi_slopes"),
        None if sinks is None else native(sinks, "sinks"), status, _arrays.stream_of(q, stream),
    )  # fmt: skip
    if not _native.run(*arguments, made_here):
        check_capturing(q, stream)  # the stream is not the schedule's
        _native.run(*arguments, True)
    return _returned(out, lse, q, makes_out, makes_lse)


def _returned(out: Any, lse: Any, q: Any, makes_out: bool, makes_lse: bool) -> Any:
    if makes_out:
        out = _arrays.finish(out, q)
    if lse is False:
        return out
    return out, _arrays.finish(lse, q) if makes_lse else lse


def _attend_appending(
    q: Any, native_q: Any, cache: PagedKVCache, tokens: tuple[Any, ...], advance: bool, schedule: Schedule,
    written: tuple[Any, ...], stream: int | None, made_here: bool,
) -> None:  # fmt: skip
    """run() with new tokens, within what append() does to the books of the cache."""
    k, v, rope, slot_mapping = tokens
    if not schedule.plan.options["appends"]:
        raise InvalidArgumentError(
            "k is given beside cache, but the schedule's plan does not append: plan with appends=True, or drop one."
        )
    slots = None
    rows, count = _check.shape(q, "q", 3, "total_q, q_heads, head_dim")[0], k.shape[0] if len(k.shape) else 0
    if count != rows:
        raise InvalidArgumentError(
            f"k has {count} tokens, but q has {rows} rows, and each query brings one: pass as many."
        )
    if slot_mapping is not None:
        _check.shape(slot_mapping, "slot_mapping", 1, "total_q")
        slots = _arrays.native(slot_mapping, "slot_mapping")
    on = _arrays.stream_of(q, stream)

    def write(native_tokens: tuple[Any, ...], advances: bool) -> None:
        arguments = (schedule._native, cache._native, native_q, *native_tokens, advances, *written, on)
        if not _native.run_appending(*arguments, made_here):
            check_capturing(q, stream)
            _native.run_appending(*arguments, True)

    if not _check.flag(advance, "advance"):
        if cache._sequences is not None:
            raise InvalidArgumentError(
                "advance is False, but a cache that deals its own pages counts its tokens: leave it True, or wrap the "
                "arrays."
            )
        cache._append(k, v, None, rope, on, slots, write)
        return
    if made_here:
        if not cache._is_advancing:
            cache._claim_lengths()
    elif cache in schedule._appended:
        raise InvalidArgumentError(
            "schedule is that of a step whose tokens this cache has got: call schedule.update() for the next one."
        )
    cu_q = schedule.cu_q
    each = schedule.plan.options["max_q_len"] if cu_q is None else None
    cache._add(k, v, None, cu_q, rope, on, each, write, slots)
    schedule._appended.add(cache)


def _refuse_without_tokens(rope: Any, slot_mapping: Any) -> NoReturn:
    name = "rope" if rope is not None else "slot_mapping" if slot_mapping is not None else "advance"
    raise InvalidArgumentError(
        f"{name} is given, but is of new tokens, which are k and v beside a cache: pass these, or leave it out."
    )


def check_capturing(q: Any, stream: Any) -> None:
    """Refuses a stream that is not the schedule's, unless a graph is being captured there."""
    if not _arrays.is_capturing(q, stream):
        raise InvalidArgumentError(
            "stream is another than that of the schedule, whose workspace serves one at a time: call "
            "schedule.update() there once it has waited for the other, or make a schedule for each stream."
        )


def _refuse_beside_schedule(schedule: Any, arguments: dict[str, Any]) -> NoReturn:
    if type(schedule) is not Schedule:
        raise InvalidArgumentError(
            f"schedule is a {type(schedule).__name__}, but must be a Schedule: call halftone.schedule()."
        )
    name = next(n for n in (*_OPTIONS, "cu_q", "cu_kv", "workspace") if arguments[n] is not None)
    raise InvalidArgumentError(
        f"{name} is given, but the schedule already fixes it: give it to plan() or schedule() instead."
    )


def _schedule_for(
    q: Any,
    cache: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_kv: Any,
    options: dict[str, Any],
    workspace: Any,
    stream: int | None,
) -> Schedule:
    shape = _check.shape(q, "q", 3, "total_q, q_heads, head_dim")
    if cu_q is not None:
        _check.shape(cu_q, "cu_q", 1, "batch + 1")
    total = int(shape[0])
    common: dict[str, Any] = dict(q_heads=int(shape[1]), q_dtype=_arrays.dtype_of(q), **options)
    if cache is not None:
        if k is None and v is not None:
            raise InvalidArgumentError("v is given beside cache without k: pass both to append them, or neither.")
        if cu_kv is not None:
            raise InvalidArgumentError("cu_kv is given beside cache, which has lengths of its own: leave it out.")
        check_cache(cache)
        made = plan(cache, **_queries(cu_q, total, cache.batch, cache.device), **common)
        sequences = cache._sequences if options["appends"] and cache._layer else None
        lengths = cache.lengths if sequences is None else sequences.starts  # which layer 0 has advanced
        return _make_schedule(made, lengths, cu_q, None, q, workspace, stream)
    if k is None or v is None:
        raise InvalidArgumentError("cache is None, so both k and v must be given: pass a cache, or k and v.")
    k_shape = _check.shape(k, "k", 3, "total_kv, kv_heads, head_dim")
    v_shape = _check.shape(v, "v", 3, "total_kv, kv_heads, v_head_dim")
    if cu_q is None and cu_kv is None:
        with _arrays.on_stream(q, stream):
            cu_kv = _arrays.make(_arrays.framework_of(q), [0, int(k_shape[0])], "int32", _arrays.device_of(q))
    if cu_kv is None:
        raise InvalidArgumentError("cu_kv is None, but cu_q says that there are several requests: give both.")
    batch = int(_check.shape(cu_kv, "cu_kv", 1, "batch + 1")[0]) - 1
    dtype = _check.choice(_arrays.dtype_of(k), "k.dtype", _check.FLOATS)
    spec = KVTensors(int(k_shape[1]), int(k_shape[2]), dtype, int(v_shape[2]))
    device = _arrays.device_of(q)
    bounds: dict[str, Any] = dict(batch=batch, max_kv_len=int(k_shape[0]), **_queries(cu_q, total, batch, device))
    made = plan(spec, device=device, **bounds, **common)
    return _make_schedule(made, None, cu_q, cu_kv, q, workspace, stream)


def _queries(cu_q: Any, total: int, batch: int, device: str) -> dict[str, int]:
    """The bounds of a request's queries, as plan() takes them, without asking a device for lengths."""
    if cu_q is None:
        if batch and total % batch:
            raise InvalidArgumentError(
                f"q has {total} rows for {batch} requests, but cu_q is None: give cu_q, or as many rows for each."
            )
        each = max(1, total // max(batch, 1))
        return {"max_q_len": each, "min_q_len": each}
    if device != "cpu":
        return {"max_q_len": max(1, total)}
    cu = _arrays.to_list(cu_q)
    return {"max_q_len": max([1, *(int(b) - int(a) for a, b in zip(cu, cu[1:]))])}


def _make_schedule(
    made: Plan, kv_lengths: Any, cu_q: Any, cu_kv: Any, like: Any, workspace: Any, stream: int | None,
    counts: Any = None, extra_counts: Any = None,
) -> Schedule:  # fmt: skip
    if workspace is None:
        workspace = _arrays.workspace(like, made.workspace_bytes, made.device)
    return Schedule(made, kv_lengths, cu_q, cu_kv, workspace, stream, counts, extra_counts)
