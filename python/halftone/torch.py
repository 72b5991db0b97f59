"""halftone's operators for torch.compile: registered with torch.library, with fake implementations.

``halftone.attend`` and ``PagedKVCache.append`` work on torch tensors as they are, and are what eager code and CUDA
graphs captured by hand should call. Under torch.compile use the functions here: they take the same objects, but reach
the library through ``torch.ops.halftone``, which the compiler can trace with fullgraph. They change no host state: call
:meth:`PagedKVCache.reserve` before and :meth:`PagedKVCache.advance` after a compiled step.
"""

import json
from functools import lru_cache
from typing import Optional

import torch

from . import _native
from .attention import Plan, _cached_plan
from .cache import KVCacheSpec, PagedKVCache

_ALIGNMENT = 256  # bytes, of a workspace


@lru_cache(maxsize=256)
def _spec_of(key: str) -> KVCacheSpec:
    return KVCacheSpec(**json.loads(key))


def plan_key(plan: Plan) -> str:
    """A text from which every process can make ``plan`` again: operators take tensors, numbers and texts only."""
    return json.dumps([plan.spec.key, list(plan.options.items())])


@lru_cache(maxsize=256)
def _plan_of(key: str) -> Plan:
    spec, options = json.loads(key)
    return _cached_plan(_spec_of(spec), tuple((name, value) for name, value in options))


def _cache_of(spec: str, tensors: tuple, clamped: bool):
    return _native.cache(_spec_of(spec)._native, *tensors, clamped)


@torch.library.custom_op("halftone::append", mutates_args=("pages", "status"))
def _append_op(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, pages: torch.Tensor, block_table: torch.Tensor,
    lengths: torch.Tensor, status: Optional[torch.Tensor], k_scale: Optional[torch.Tensor],
    k_min: Optional[torch.Tensor], v_scale: Optional[torch.Tensor], v_min: Optional[torch.Tensor], spec: str,
) -> None:  # fmt: skip
    cache = _cache_of(spec, (pages, block_table, lengths, k_scale, k_min, v_scale, v_min), False)
    _native.append(cache, k, v, None, cu_seqlens, 0, None, None, None, status, None)


@_append_op.register_fake
def _(k, v, cu_seqlens, pages, block_table, lengths, status, k_scale, k_min, v_scale, v_min, spec):
    return None


@torch.library.custom_op("halftone::schedule", mutates_args=("workspace",))
def _schedule_op(
    kv_lengths: torch.Tensor, cu_q: Optional[torch.Tensor], workspace: torch.Tensor, plan: str
) -> None:  # fmt: skip
    aligned = _aligned(workspace)
    _native.step(_plan_of(plan)._native, kv_lengths, cu_q, None, aligned, None)
    if aligned is not workspace:
        workspace.copy_(aligned)


@_schedule_op.register_fake
def _(kv_lengths, cu_q, workspace, plan):
    return None


@torch.library.custom_op("halftone::attend", mutates_args=("workspace", "status"))
def _attend_op(
    q: torch.Tensor, workspace: torch.Tensor, kv_lengths: torch.Tensor, cu_q: Optional[torch.Tensor],
    pages: torch.Tensor, block_table: torch.Tensor, status: Optional[torch.Tensor],
    k_scale: Optional[torch.Tensor], k_min: Optional[torch.Tensor], v_scale: Optional[torch.Tensor],
    v_min: Optional[torch.Tensor], alibi_slopes: Optional[torch.Tensor], sinks: Optional[torch.Tensor],
    clamped: bool, plan: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    made = _plan_of(plan)
    out, lse = _outputs(q, made)
    cache = _cache_of(made.spec.key, (pages, block_table, kv_lengths, k_scale, k_min, v_scale, v_min), clamped)
    _native.run_workspace(
        made._native, kv_lengths, cu_q, _aligned(workspace), cache, q, out, lse if made.options["lse"] else None,
        alibi_slopes, sinks, status,
    )  # fmt: skip
    return out, lse


@_attend_op.register_fake
def _(q, workspace, kv_lengths, cu_q, pages, block_table, status, k_scale, k_min, v_scale, v_min, alibi_slopes, sinks,
      clamped, plan):  # fmt: skip
    return _outputs(q, _plan_of(plan))


def _aligned(workspace: torch.Tensor) -> torch.Tensor:
    """``workspace``, or a copy where a compiler has moved it: torch aligns to 64 bytes on the CPU, halftone to 256.

    Nobody reads the partial results that attend() leaves in it, so that the copy need not be copied back.
    """
    if workspace.data_ptr() % _ALIGNMENT == 0:
        return workspace
    return _aligned_empty(workspace.shape[0], workspace.device).copy_(workspace)


def _aligned_empty(size: int, device: torch.device | str) -> torch.Tensor:
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size]


def _outputs(q: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[plan.out_dtype]
    out = q.new_empty((*q.shape[:-1], plan.spec.v_head_dim), dtype=dtype)
    lse = q.new_empty(q.shape[:-1] if plan.options["lse"] else (0,), dtype=torch.float32)
    return out, lse


class Step:
    """What a compiled decode step needs beside a cache: the plan as text and a workspace, made once.

    Args:
        plan: from :func:`halftone.plan`.
        device: of the workspace; None means the plan's.
    """

    def __init__(self, plan: Plan, device: Optional[str] = None) -> None:
        self.key = plan_key(plan)
        self.lse = bool(plan.options["lse"])
        self.workspace = _aligned_empty(plan.workspace_bytes, device or plan.device)


def append(cache: PagedKVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Appends one token to every request and advances ``cache.lengths``, not the host's copy of them.

    Args:
        cache: whose pages were dealt by ``reserve()``.
        k: f32, f16 or bf16 [batch, kv_heads, head_dim].
        v: likewise with v_head_dim.

    Raises:
        InvalidArgumentError: as :meth:`PagedKVCache.append`.
    """
    cu = torch.arange(k.shape[0] + 1, dtype=torch.int32, device=k.device)
    torch.ops.halftone.append(
        k, v, cu, cache.pages, cache.block_table, cache.lengths, cache.status, cache.k_scale, cache.k_min,
        cache.v_scale, cache.v_min, cache.spec.key,
    )  # fmt: skip
    cache.lengths.add_(1)


def schedule(step: Step, cache: PagedKVCache, cu_q: Optional[torch.Tensor] = None) -> None:
    """Schedules ``step`` for the present lengths of ``cache``; see :func:`halftone.schedule`."""
    torch.ops.halftone.schedule(cache.lengths, cu_q, step.workspace, step.key)


def attend(
    q: torch.Tensor,
    cache: PagedKVCache,
    step: Step,
    *,
    kv_lengths: Optional[torch.Tensor] = None,
    cu_q: Optional[torch.Tensor] = None,
    alibi_slopes: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer under a scheduled ``step``; see :func:`halftone.attend`.

    Args:
        q: f32, f16 or bf16 [total_q, q_heads, head_dim].
        cache: the layer's cache.
        step: scheduled for these lengths.
        kv_lengths: int32 [batch] that ``step`` was scheduled with; None means the cache's.
        cu_q, alibi_slopes, sinks: as there.

    Returns:
        out, or (out, lse) if the plan was made with ``lse=True``.
    """
    out, lse = torch.ops.halftone.attend(
        q, step.workspace, cache.lengths if kv_lengths is None else kv_lengths, cu_q, cache.pages, cache.block_table,
        cache.status, cache.k_scale, cache.k_min, cache.v_scale, cache.v_min, alibi_slopes, sinks, cache.clamped,
        step.key,
    )  # fmt: skip
    return (out, lse) if step.lse else out
