"""Reading a cache back. ``halftone.convert`` has the documented function."""

from __future__ import annotations

from typing import Any

from . import _arrays, _check, _native
from .errors import InvalidArgumentError


def dequantize(cache: Any, k_out: Any, v_out: Any, *, dtype: str | None, stream: int | None) -> tuple[Any, Any]:
    """K and V of ``cache``, which is a PagedKVCache."""
    lengths = cache.host_lengths
    tokens = sum(max(0, n) for n in lengths)  # a wrapped cache's may be anything; the native library refuses them
    s = cache.spec
    for name, array, dims in (("k_out", k_out, "head_dim"), ("v_out", v_out, "v_head_dim")):
        if array is None:
            continue
        shape, own = _check.shape(array, name, 3, f"{tokens}, kv_heads, {dims}"), _arrays.dtype_of(array)
        if min(lengths, default=0) >= 0 and shape[0] != tokens:
            raise InvalidArgumentError(
                f"{name} has shape {list(shape)}, but must have shape "
                f"[{tokens}, kv_heads, {dims}]: pass one row per cached token."
            )
        if dtype is not None and own != dtype:
            raise InvalidArgumentError(f"dtype is {dtype!r}, but {name} is of dtype {own}: leave dtype out.")
    if dtype is None:
        given = k_out if v_out is None else v_out
        dtype = "f32" if given is None else _arrays.dtype_of(given)
    _check.choice(dtype, "dtype", ("f32", "f16", "bf16"))
    if k_out is None:
        k_out = _arrays.empty_output(cache.pages, (tokens, s.kv_heads, s.head_dim), dtype)
    if v_out is None:
        v_out = _arrays.empty_output(cache.pages, (tokens, s.kv_heads, s.v_head_dim), dtype)
    _native.dequantize(
        cache._native, _arrays.native(k_out, "k_out", True), _arrays.native(v_out, "v_out", True),
        _arrays.stream_of(cache.pages, stream),
    )  # fmt: skip
    return k_out, v_out
