"""Attention in double precision, straight from its definition: the judge of every peer, and of halftone's own tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: NDArray[Any] | None = None,
    sinks: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One request.

    Args:
        q: [q_len, q_heads, head_dim].
        k: [kv_len, kv_heads, head_dim].
        v: [kv_len, kv_heads, v_head_dim].
        causal, window_left, window_right, scale, softcap, alibi_slopes, sinks: as for ``halftone.plan``.

    Returns:
        out, float64 [q_len, q_heads, v_head_dim], and lse, float64 [q_len, q_heads], natural log; zeros and -inf for a
        row that sees no key.
    """
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[:2]
    group = q_heads // kv_heads
    logits = np.einsum("ihgd,jhd->hgij", q.reshape(q_len, kv_heads, group, dim), k)
    logits *= scale or dim**-0.5
    if softcap > 0:
        logits = softcap * np.tanh(logits / softcap)
    position = np.arange(q_len)[:, None] + (kv_len - q_len)
    key = np.arange(kv_len)[None, :]
    if alibi_slopes is not None:
        logits -= np.asarray(alibi_slopes, np.float64).reshape(kv_heads, group, 1, 1) * np.abs(position - key)
    seen = np.ones((q_len, kv_len), bool)
    if causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    if window_right >= 0:
        seen &= key <= position + window_right
    logits = np.where(seen, logits, -np.inf)
    empty = ~seen.any(-1)

    top = logits.max(-1, initial=-np.inf)
    sink: NDArray[Any] = np.asarray(-np.inf)
    if sinks is not None:
        sink = np.asarray(sinks, np.float64).reshape(kv_heads, group, 1)
        top = np.maximum(top, sink)
    top = np.where(empty, 0.0, top)
    weights = np.exp(logits - top[..., None])
    total = np.where(empty, 1.0, weights.sum(-1) + np.exp(sink - top))
    out = np.einsum("hgij,jhd->ihgd", weights / total[..., None], v)
    lse = np.where(empty, -np.inf, top + np.log(total)).transpose(2, 0, 1)
    return out.reshape(q_len, q_heads, v.shape[2]), lse.reshape(q_len, q_heads)


def attention_rows(q: Any, k: Any, v: Any, visible: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Some rows of one request; row i sees the first ``visible[i]`` keys.

    Args:
        q: [rows, q_heads, head_dim], NumPy or torch like ``k`` and ``v`` [kv_len, kv_heads, head_dim], which the
            GPU that they are on multiplies.

    Returns:
        out, float64 [rows, q_heads, v_head_dim], and lse, float64 [rows, q_heads].
    """
    x: Any
    if isinstance(q, np.ndarray):
        x = np
        q, k, v = (t.astype(np.float64) for t in (q, k, v))
        seen = np.arange(len(k)) < np.asarray(visible)[:, None]
    else:
        import torch

        x = torch
        q, k, v = (t.double() for t in (q, k, v))
        seen = x.arange(len(k), device=q.device) < x.tensor(visible, device=q.device)[:, None]
    rows, q_heads, dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, dim)
    logits = x.einsum("ihgd,jhd->hgij", grouped, k) * dim**-0.5
    top = x.amax(logits, -1)
    weights = x.exp(logits - top[..., None]) * seen
    total = weights.sum(-1)
    out = x.einsum("hgij,jhd->ihgd", weights / total[..., None], v).reshape(rows, q_heads, -1)
    lse = (top + x.log(total)).reshape(q_heads, rows).T
    return (out, lse) if isinstance(out, np.ndarray) else (out.cpu().numpy(), lse.cpu().numpy())


def relative_error(actual: NDArray[Any], truth: NDArray[Any]) -> float:
    """The Frobenius norm of the difference over that of ``truth``; NaN where ``actual`` has one."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - truth)) / max(float(np.linalg.norm(truth)), 1e-300)
