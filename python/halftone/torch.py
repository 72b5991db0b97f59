"""halftone's operators for torch.compile: registered with torch.library, with fake implementations.

``halftone.attend`` and ``PagedKVCache.append`` work on torch tensors as they are, in eager code and in CUDA graphs
captured by hand. Under torch.compile use the functions here: they take the same objects, but where operators are traced
or transformed they are ``torch.ops.halftone``, which the compiler can trace with fullgraph; elsewhere they reach the
library without torch's dispatcher. They change no host state: call :meth:`PagedKVCache.reserve` before and
:meth:`PagedKVCache.advance` after a step.
"""

import json
from functools import lru_cache
from typing import Any, Callable, Optional, TypeVar

import torch
from torch import Tensor

from . import _check, _frameworks, _native
from ._plan import Plan, _cached_plan
from ._sequences import Sequences
from .cache import PagedKVCache
from .errors import InvalidArgumentError, ResourceExhaustedError
from .spec import KVCacheSpec

_ALIGNMENT = 256  # bytes, of a workspace
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_SCALES = (
    "Tensor? k_scale, Tensor? k_min, Tensor? v_scale, Tensor? v_min, "
    "Tensor? k_offset, Tensor? k_channel_scale"
)
_QUERY = (
    "Tensor q, Tensor(a!) workspace, Tensor kv_lengths, Tensor? cu_q, Tensor pages, Tensor block_table, "
    f"Tensor(b!)? status, {_SCALES}, Tensor? alibi_slopes, Tensor? sinks, bool clamped, str plan"
)


@lru_cache(maxsize=256)
def _spec_of(key: str) -> KVCacheSpec:
    return KVCacheSpec(**json.loads(key))


def plan_key(plan: Plan) -> str:
    """A text from which every process can make ``plan`` again: operators take tensors, numbers and texts only."""
    return _plan_key(plan)


@lru_cache(maxsize=256)
def _plan_key(plan: Plan) -> str:
    if not isinstance(plan.spec, KVCacheSpec):
        raise InvalidArgumentError(
            "plan is for KVTensors, but torch's operators attend over caches: plan with a cache or its spec, or call "
            "halftone.attend()."
        )
    return json.dumps([plan.spec.key, list(plan.options.items())])


@lru_cache(maxsize=256)
def _plan_of(key: str) -> Plan:
    spec, options = json.loads(key)
    return _cached_plan(_spec_of(spec), tuple((name, value) for name, value in options))


_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def _operator(name: str, schema: str) -> Callable[[_Kernel], _Kernel]:
    """Registers a function as the kernel of ``halftone::<name>``.

    torch.library.custom_op() would cost 10 us and more for each call outside of graphs: it counts versions of what is
    written, for autograd, which has no part here.
    """
    torch.library.define(f"halftone::{name}", f"({schema}", tags=(torch.Tag.pt2_compliant_tag,))

    def register(kernel: _Kernel) -> _Kernel:
        torch.library.impl(f"halftone::{name}", "CompositeExplicitAutograd", kernel)
        return kernel

    return register


@_operator(
    "append",
    "Tensor k, Tensor? v, Tensor cu_seqlens, Tensor(a!) pages, Tensor block_table, Tensor(b!) lengths, "
    f"Tensor(c!)? status, {_SCALES}, str spec, bool advance=True) -> ()",
)
def _append_op(
    k: Tensor, v: Optional[Tensor], cu_seqlens: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor,
    status: Optional[Tensor], k_scale: Optional[Tensor], k_min: Optional[Tensor], v_scale: Optional[Tensor],
    v_min: Optional[Tensor], k_offset: Optional[Tensor], k_channel_scale: Optional[Tensor], spec: str,
    advance: bool = True,
) -> None:  # fmt: skip
    _native.append_tensors(
        _spec_of(spec)._native, k, v, cu_seqlens, pages, block_table, lengths, status, k_scale, k_min, v_scale, v_min,
        k_offset, k_channel_scale, advance,
    )  # fmt: skip


@_operator("schedule", "Tensor kv_lengths, Tensor? cu_q, Tensor(a!) workspace, str plan) -> ()")
def _schedule_op(kv_lengths: Tensor, cu_q: Optional[Tensor], workspace: Tensor, plan: str) -> None:
    aligned = _aligned(workspace)
    _native.schedule_tensors(_plan_of(plan)._native, kv_lengths, cu_q, aligned)
    if aligned is not workspace:
        workspace.copy_(aligned)


@_operator("attend_out", f"{_QUERY}, Tensor(c!) out, Tensor(d!)? lse) -> ()")
def _attend_out_op(
    q: Tensor, workspace: Tensor, kv_lengths: Tensor, cu_q: Optional[Tensor], pages: Tensor, block_table: Tensor,
    status: Optional[Tensor], k_scale: Optional[Tensor], k_min: Optional[Tensor], v_scale: Optional[Tensor],
    v_min: Optional[Tensor], k_offset: Optional[Tensor], k_channel_scale: Optional[Tensor],
    alibi_slopes: Optional[Tensor], sinks: Optional[Tensor], clamped: bool, plan: str, out: Tensor,
    lse: Optional[Tensor],
) -> None:  # fmt: skip
    _native.run_tensors(
        _plan_of(plan)._native, kv_lengths, cu_q, _aligned(workspace), pages, block_table, k_scale, k_min, v_scale,
        v_min, k_offset, k_channel_scale, clamped, q, out, lse, alibi_slopes, sinks, status, None, None, False,
    )  # fmt: skip


@_operator(
    "attend_appending",
    "Tensor q, Tensor(a!) workspace, Tensor(b!) lengths, Tensor? cu_q, Tensor(c!) pages, Tensor block_table, "
    f"Tensor(d!)? status, {_SCALES}, Tensor? alibi_slopes, Tensor? sinks, bool clamped, str plan, Tensor k, Tensor? v, "
    "bool advance, Tensor(e!) out, Tensor(f!)? lse) -> ()",
)
def _attend_appending_op(
    q: Tensor, workspace: Tensor, lengths: Tensor, cu_q: Optional[Tensor], pages: Tensor, block_table: Tensor,
    status: Optional[Tensor], k_scale: Optional[Tensor], k_min: Optional[Tensor], v_scale: Optional[Tensor],
    v_min: Optional[Tensor], k_offset: Optional[Tensor], k_channel_scale: Optional[Tensor],
    alibi_slopes: Optional[Tensor], sinks: Optional[Tensor], clamped: bool, plan: str, k: Tensor,
    v: Optional[Tensor], advance: bool, out: Tensor, lse: Optional[Tensor],
) -> None:  # fmt: skip
    _native.run_tensors(
        _plan_of(plan)._native, lengths, cu_q, _aligned(workspace), pages, block_table, k_scale, k_min, v_scale,
        v_min, k_offset, k_channel_scale, clamped, q, out, lse, alibi_slopes, sinks, status, k, v, advance,
    )  # fmt: skip


@_operator("attend", f"{_QUERY}) -> (Tensor, Tensor)")
def _attend_op(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    plan = _plan_of(rest[-1])
    out, lse = _outputs(q, plan)
    arguments: tuple[Any, ...] = (q, *rest, out, lse if plan.lse else None)
    _attend_out_op(*arguments)
    return out, lse


def _attend_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, _plan_of(rest[-1]))


def _writes_only(*_: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "append": _writes_only,
    "schedule": _writes_only,
    "attend_out": _writes_only,
    "attend_appending": _writes_only,
    "attend": _attend_fake,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"halftone::{_name}", _fake)


class _ops:
    """The operators' only overloads, which need no look-up."""

    append = torch.ops.halftone.append.default
    schedule = torch.ops.halftone.schedule.default
    attend = torch.ops.halftone.attend.default
    attend_out = torch.ops.halftone.attend_out.default
    attend_appending = torch.ops.halftone.attend_appending.default


def _quiet_keys() -> frozenset[int]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    return frozenset((keys.raw_repr(), keys.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr()))


_QUIET = _quiet_keys()  # what every call includes, within and outside of inference mode
_included_keys = torch._C._dispatch_tls_local_include_set


def _is_direct(*tensors: Optional[Tensor]) -> bool:
    """True where the library can be called in an operator's stead.

    That is: the tensors are torch's own, in memory as they read and need no gradient, and nobody traces or transforms
    operators. A dispatch mode, torch.func and torch.jit.trace all do so by a key that they include on this thread. A
    torch-function mode does not: it sees this module's functions no more than other Python code.
    """
    if torch.compiler.is_compiling() or _included_keys().raw_repr() not in _QUIET:
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor or x.requires_grad or x.is_neg() or not (x.is_cuda or x.is_cpu):
            return False
        if x.layout is not torch.strided:
            return False
    return True


def _check_dense(**tensors: Optional[Tensor]) -> None:
    """Raises InvalidArgumentError for what no kernel can read; a compiler sees to that itself."""
    if not torch.compiler.is_compiling():
        for name, x in tensors.items():
            if isinstance(x, Tensor):
                _frameworks.check_dense(x, name)


def _aligned(workspace: Tensor) -> Tensor:
    """``workspace``, or a copy where a compiler has moved it: torch aligns to 64 bytes on the CPU, halftone to 256.

    Nobody reads the partial results that attend() leaves in it, so that the copy need not be copied back.
    """
    if workspace.data_ptr() % _ALIGNMENT == 0:
        return workspace
    return _aligned_empty(workspace.shape[0], workspace.device).copy_(workspace)


def _aligned_empty(size: int, device: torch.device | str) -> Tensor:
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size]


def _outputs(q: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    return _new_out(q, plan), _new_lse(q) if plan.lse else q.new_empty((0,), dtype=torch.float32)


def _new_out(q: Tensor, plan: Plan) -> Tensor:
    width, dtype = plan.spec.v_head_dim, _DTYPES[plan.out_dtype]
    if q.shape[-1] == width and q.is_contiguous():  # empty_like is the cheapest of torch's ways
        return torch.empty_like(q) if q.dtype == dtype else torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], width), dtype=dtype)


def _new_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


class Step(_check.Fixed):
    """What a compiled decode step needs beside a cache: the plan as text and a workspace, made once.

    The workspace serves one call at a time, as that of :class:`Schedule` does: threads, and streams whose work may
    overlap, need a step each. On the CPU a second call is refused; on CUDA nobody can see it here.

    Args:
        plan: from :func:`halftone.plan`.
        device: of the workspace; None means the plan's.
        workspace: uint8 [plan.workspace_bytes or more], contiguous and 256-byte aligned, to be written; None allocates
            it.

    Raises:
        InvalidArgumentError: what cannot be a workspace. ResourceExhaustedError: one that is too small.

    Attributes:
        workspace: the schedule and the partial results.
    """

    _fixed = frozenset(("key", "plan", "lse", "workspace"))
    _instead = "make another Step"
    _no_copy = "make another Step of the same plan"

    def __init__(self, plan: Plan, device: Optional[str] = None, *, workspace: Optional[Tensor] = None) -> None:
        self.key = plan_key(plan)
        self.plan = plan
        self._native = plan._native
        self.lse = plan.lse
        if workspace is None:
            workspace = _aligned_empty(plan.workspace_bytes, device or plan.device)
        else:
            _check_workspace(workspace, plan, device)
        self.workspace = workspace


def _check_workspace(workspace: Any, plan: Plan, device: Optional[str]) -> None:
    if not isinstance(workspace, Tensor):
        what, remedy = f"a {type(workspace).__name__}", "pass a torch.Tensor"
    elif workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        what, remedy = f"{workspace.dtype} of shape {tuple(workspace.shape)}", "pass contiguous uint8 [bytes]"
    elif workspace.data_ptr() % _ALIGNMENT:
        what, remedy = f"{workspace.data_ptr() % _ALIGNMENT} bytes past a multiple of 256", "use aligned memory"
    elif workspace.device != torch.empty(0, device=device or plan.device).device:
        what, remedy = f"on {workspace.device}", f"allocate it on {device or plan.device}"
    elif workspace.shape[0] < plan.workspace_bytes:
        raise ResourceExhaustedError(
            f"workspace has {workspace.shape[0]} bytes, but the plan needs {plan.workspace_bytes}: allocate as many."
        )
    else:
        return
    raise InvalidArgumentError(f"workspace is {what}, but must be 256-byte aligned uint8 memory: {remedy}.")


def append(cache: PagedKVCache, k: Tensor, v: Optional[Tensor] = None) -> None:
    """Appends one token to every request and advances ``cache.lengths``, not the host's copy of them.

    Every call advances: caches wrapped for several layers must not share one array of lengths, see
    :meth:`PagedKVCache.append`. Of a :class:`LayeredKVCache`, layer 0 comes first and advances; the host does not count
    its steps.

    Args:
        cache: whose pages were dealt by ``reserve()``; after ``fork()`` and ``reorder()`` call it again.
        k: f32, f16 or bf16 [batch, kv_heads, head_dim].
        v: likewise with v_head_dim; None for a latent cache.

    Raises:
        InvalidArgumentError: as :meth:`PagedKVCache.append`; outside of a compiled graph also pages that requests
            still share.
    """
    layer, sequences = cache._layer, cache._sequences
    if not torch.compiler.is_compiling():
        if not cache._is_advancing:
            cache._claim_lengths()
        if sequences is not None:
            _check_own_pages(sequences)
    lengths, native = cache.lengths, cache._native
    if layer is not None and sequences is not None:
        if layer:
            lengths, native = sequences.starts, cache._native_starts
        else:
            sequences.starts.copy_(lengths)
    fits = k.shape[0] == cache.batch  # else the library refuses the cu_seqlens made here
    if fits and _is_direct(k, v) and cache._native_single is not None:
        _native.append(
            native, k, v, None, cache._native_single, not layer, 0, None, None, None, cache._native_status, None
        )
        return
    _check_dense(k=k, v=v)
    cu = cache._single
    if cu is None or not fits:
        cu = torch.arange(k.shape[0] + 1, dtype=torch.int32, device=k.device)
    _ops.append(
        k, v, cu, cache.pages, cache.block_table, lengths, cache.status, cache.k_scale, cache.k_min, cache.v_scale,
        cache.v_min, cache.k_offset, cache.k_channel_scale, cache.spec.key, not layer,
    )  # fmt: skip


def schedule(step: Step, cache: PagedKVCache, cu_q: Optional[Tensor] = None) -> None:
    """Schedules ``step`` for the present lengths of ``cache``; see :func:`halftone.schedule`."""
    lengths, workspace = cache.lengths, step.workspace
    if type(workspace) is Tensor and _is_direct(lengths, cu_q):
        _native.schedule_tensors(step._native, lengths, cu_q, workspace)
    else:
        _check_dense(cu_q=cu_q)
        _ops.schedule(lengths, cu_q, workspace, step.key)


def _begin_step(cache: PagedKVCache, kv_lengths: Optional[Tensor]) -> None:
    """What append() does before the tokens of a step are written."""
    sequences = cache._sequences
    if kv_lengths is not None:
        raise InvalidArgumentError(
            "kv_lengths is given beside k, but what appends counts the cache's own lengths up: leave it out."
        )
    if sequences is None:
        return
    if not torch.compiler.is_compiling():
        _check_own_pages(sequences)
    if cache._layer == 0:
        sequences.starts.copy_(cache.lengths)


def _check_own_pages(sequences: Sequences) -> None:
    if sequences.is_shared:
        raise InvalidArgumentError(
            "the next token of a request falls into a page that it shares, but only reserve() copies pages: call "
            "it before append()."
        )


def attend(
    q: Tensor,
    cache: PagedKVCache,
    step: Step,
    *,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    kv_lengths: Optional[Tensor] = None,
    cu_q: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one layer under a scheduled ``step``; see :func:`halftone.attend`.

    Args:
        q: f32, f16 or bf16 [total_q, q_heads, head_dim].
        cache: the layer's cache.
        step: scheduled for these lengths.
        k, v: the new token of every query, of a plan with ``appends``: appended, as by :func:`append`, before q attends
            to them. Layer 0 of a :class:`LayeredKVCache` comes first and advances; of wrapped caches every call makes
            the lengths those of the step, as often as it is called.
        kv_lengths: int32 [batch] that ``step`` was scheduled with; None means the cache's.
        cu_q, alibi_slopes, sinks: as there.
        out: [total_q, q_heads, v_head_dim] of the plan's ``out_dtype``, to be written; None allocates it.
        lse: f32 [total_q, q_heads], to be written, of a plan made with ``lse=True``; None allocates it.

    Returns:
        out, or (out, lse) if the plan was made with ``lse=True``.
    """
    workspace = step.workspace
    direct = type(workspace) is Tensor and _is_direct(q, k, v, kv_lengths, cu_q, alibi_slopes, sinks, out, lse)
    arguments: tuple[Any, ...] = ()
    advance = k is not None and not cache._layer
    if k is not None:
        _begin_step(cache, kv_lengths)
    if not direct:
        _check_dense(q=q, kv_lengths=kv_lengths, cu_q=cu_q, alibi_slopes=alibi_slopes, sinks=sinks, out=out, lse=lse)
        _check_dense(k=k, v=v)
        arguments = (
            q, workspace, cache.lengths if kv_lengths is None else kv_lengths, cu_q, cache.pages, cache.block_table,
            cache.status, cache.k_scale, cache.k_min, cache.v_scale, cache.v_min, cache.k_offset, cache.k_channel_scale,
            alibi_slopes, sinks, cache.clamped, step.key,
        )  # fmt: skip
        # A compiler likes what writes nothing better.
        if k is None and out is None and lse is None and torch.compiler.is_compiling():
            new_out, new_lse = _ops.attend(*arguments)
            return (new_out, new_lse) if step.lse else new_out
    if out is None:
        out = _new_out(q, step.plan)
    if lse is None and step.lse:
        lse = _new_lse(q)
    if direct:
        _native.run_scheduled(
            step._native, cache._native, kv_lengths, cu_q, workspace, q, out, lse, alibi_slopes, sinks,
            cache._native_status, k, v, advance,
        )  # fmt: skip
    elif k is not None:
        _ops.attend_appending(*arguments, k, v, advance, out, lse)
    else:
        _ops.attend_out(*arguments, out, lse)
    return out if lse is None else (out, lse)
