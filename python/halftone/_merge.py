"""Partial attention results made one."""

from __future__ import annotations

from typing import Any, Sequence

from . import _arrays, _check, _native
from .errors import InvalidArgumentError


def _arrays_of(value: Any, name: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise InvalidArgumentError(
            f"{name} is a {type(value).__name__}, but must be a sequence of arrays: pass a list."
        ) from None


def merge(
    parts: Sequence[Any],
    part_lse: Sequence[Any],
    *,
    out: Any = None,
    lse: Any = False,
    out_dtype: str | None = None,
    stream: int | None = None,
) -> Any:
    """Merges partial attention results over disjoint keys: ``out = sum_i exp(lse_i - lse) out_i``.

    The algebra of Flash-Decoding's split-KV (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) and of cascade
    inference. Parts with LSE -inf contribute nothing.

    Args:
        parts: f32, f16 or bf16 [rows, heads, dim] each.
        part_lse: f32 [rows, heads] each, natural log.
        out: [rows, heads, dim] to be written; None allocates it.
        lse: True, or f32 [rows, heads] to be written: also return the merged LSE.
        out_dtype: of the array allocated here; None means the parts'.
        stream: a cudaStream_t; None means the framework's current stream.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        InvalidArgumentError: no parts, shapes, dtypes, or arrays on several devices. UnsupportedError: more than 512
            parts on a GPU.
    """
    parts, part_lse = _arrays_of(parts, "parts"), _arrays_of(part_lse, "part_lse")
    if not parts:
        raise InvalidArgumentError("parts is empty, but there must be at least one: pass the partial results.")
    if len(parts) != len(part_lse):
        raise InvalidArgumentError(
            f"part_lse has {len(part_lse)} arrays, but parts has {len(parts)}: pass one LSE for each part."
        )
    for i, (part, logs) in enumerate(zip(parts, part_lse)):
        _check.shape(part, f"parts[{i}]", 3, "rows, heads, dim")
        _check.shape(logs, f"part_lse[{i}]", 2, "rows, heads")
        _check.choice(_arrays.dtype_of(part), f"parts[{i}].dtype", _check.FLOATS)
    if lse is None:
        raise InvalidArgumentError("lse is None, but must be True, False or an array: choose one.")
    if out_dtype is not None:
        _check.choice(out_dtype, "out_dtype", _check.FLOATS)
        if out is not None and _arrays.dtype_of(out) != out_dtype:
            raise InvalidArgumentError(
                f"out_dtype is {out_dtype!r}, but out is of dtype {_arrays.dtype_of(out)}: leave out_dtype out."
            )
    native_parts = [_arrays.native(p, f"parts[{i}]") for i, p in enumerate(parts)]
    first = parts[0]
    if out is None:
        out = _arrays.empty_output(first, first.shape, _arrays.dtype_of(first) if out_dtype is None else out_dtype)
    if lse is True:
        lse = _arrays.empty_output(first, first.shape[:-1], "f32")
    _native.merge(
        native_parts, [_arrays.native(p, f"part_lse[{i}]") for i, p in enumerate(part_lse)],
        _arrays.native(out, "out", True), None if lse is False else _arrays.native(lse, "lse", True),
        _arrays.stream_of(first, stream),
    )  # fmt: skip
    out = _arrays.finish(out, first)
    return out if lse is False else (out, _arrays.finish(lse, first))
