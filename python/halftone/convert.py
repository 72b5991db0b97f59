"""A cache read back, static scales from samples, and exchange with FBGEMM's INT4 rows and FlashMLA's LSEs."""

from __future__ import annotations

from typing import Any

from . import _arrays, _check, _native
from .cache import PagedKVCache, check_cache
from .errors import InvalidArgumentError
from .format import KVFormat, as_format

_INFINITY = float("inf")


def dequantize(
    cache: PagedKVCache, k_out: Any = None, v_out: Any = None, *, dtype: str | None = None, stream: int | None = None
) -> tuple[Any, Any]:
    """Reads a cache back in the caller's basis (rotations undone), request after request.

    Args:
        cache: what to read. On a GPU, tokens behind an entry of the block table that does not exist are zeros.
        k_out: f32, f16 or bf16 [sum of lengths, kv_heads, head_dim] to be written; None allocates it.
        v_out: likewise with v_head_dim.
        dtype: of the arrays allocated here; None means that of the one given, else f32. One given must have it.
        stream: a cudaStream_t; None means the framework's current stream.

    Returns:
        K and V.

    Raises:
        InvalidArgumentError: shapes, dtypes, or arrays on several devices.
    """
    return check_cache(cache).dequantize(k_out, v_out, dtype=dtype, stream=stream)


def calibrate(
    x: Any,
    format: KVFormat | str,
    *,
    rotate: bool = False,
    scale_out: Any = None,
    min_out: Any = None,
    k_offset: Any = None,
    k_channel_scale: Any = None,
) -> tuple[Any, Any]:
    """Static scales that let ``x`` be stored without clipping.

    Args:
        x: f32, f16 or bf16 [tokens, kv_heads, dim] on the CPU.
        format: one with static scales, such as "fp8" or "int8-tensor".
        rotate: True when the cache rotates this part.
        scale_out: f32 [1] or [kv_heads] on any device, to be written; None allocates it.
        min_out: likewise, of an asymmetric format only.
        k_offset, k_channel_scale: those of the cache's K, f32 [kv_heads, dim] on the CPU, if it has them.

    Returns:
        scale and min, f32 [1] or [kv_heads] in the framework of ``x``; min is None for a symmetric format.

    Raises:
        InvalidArgumentError: a format without static scales, non-finite values, shapes or dtypes.
    """
    form = as_format(format)
    if min_out is not None and not form.asymmetric:
        raise InvalidArgumentError(f"min_out is given, but {form} is symmetric and has no min: leave it out.")
    given = [_arrays.native(y, name) for y, name in ((k_offset, "k_offset"), (k_channel_scale, "k_channel_scale"))]
    found = _native.calibrate(_arrays.native(x, "x"), form.name, _check.flag(rotate, "rotate"), *given)
    values = [float(s) for s in found]
    count = len(values) // 2 if form.asymmetric else len(values)
    for array, name in ((scale_out, "scale_out"), (min_out, "min_out")):
        if array is not None:
            _check_scales(array, name, count)
    scale = _scales(x, values[:count], scale_out)
    return scale, _scales(x, values[count:], min_out) if form.asymmetric else None


def calibrate_channels(
    k: Any,
    format: KVFormat | str,
    *,
    rotate: bool = False,
    q: Any = None,
    offset: bool | None = None,
    scale: bool | None = None,
) -> tuple[Any, Any]:
    """Offset and scale of K's channels from a sample: ``k_offset`` and ``k_channel_scale`` of a cache.

    The offset is the mean of a channel, the scale the root of its largest distance from that (from 0 without an
    offset). Softmax cancels the offset and Q takes up the scale, so that reading the cache costs nothing
    (docs/formats.md).

    Args:
        k: f32, f16 or bf16 [tokens, kv_heads, head_dim] on the CPU, after the rotary embedding.
        format: of K, one that quantises.
        rotate: True when the cache rotates K.
        q: [queries, q_heads, head_dim] likewise: what an error of a channel counts. None: all alike.
        offset, scale: whether to have them; None for both: what makes the error of the logits smallest.

    Returns:
        offset and scale, f32 [kv_heads, head_dim] in the framework of ``k``; None for one that is better left out.

    Raises:
        InvalidArgumentError: a 16-bit format, non-finite values, shapes or dtypes; one of offset and scale alone.
    """
    form, flag = as_format(format), _check.flag(rotate, "rotate")
    if (offset is None) != (scale is None):
        raise InvalidArgumentError(
            f"offset is {offset} and scale {scale}, but they are chosen together: give both or neither."
        )
    native = _arrays.native(k, "k")
    if offset is None:
        both = _native.calibrate_channels(native, form.name, flag, _arrays.native(q, "q"))
    else:
        both = _native.channel_values(native, _check.flag(offset, "offset"), _check.flag(scale, "scale"))
    dim = int(k.shape[-1])

    def array(values: list[float]) -> Any:
        rows = [values[i : i + dim] for i in range(0, len(values), dim)]
        return _arrays.make(_arrays.framework_of(k), rows, "f32", "cpu") if rows else None

    found, factors = ([float(x) for x in values] for values in both)
    return array(found), array(factors)


def _check_scales(array: Any, name: str, count: int) -> None:
    if _check.shape(array, name, 1, str(count))[0] != count or _arrays.dtype_of(array) != "f32":
        raise InvalidArgumentError(
            f"{name} is {_arrays.dtype_of(array)} {list(array.shape)}, but must be f32 [{count}]: pass such an array."
        )
    _arrays.native(array, name, written=True)


def _scales(like: Any, values: list[float], out: Any) -> Any:
    if out is None:
        return _arrays.make(_arrays.framework_of(like), values, "f32", "cpu")
    _arrays.assign(out, values)
    return out


def import_fbgemm_int4(cache: PagedKVCache, part: str, rows: Any, slots: Any) -> None:
    """Writes FBGEMM gen_ai INT4 rows (``[half2{scale, shift} x groups][nibbles]``) into a cache; exact (CPU).

    Args:
        cache: whose ``part`` is asymmetric int4 with f16 scales and as many groups, not rotated.
        part: "k" or "v".
        rows: uint8 [tokens, kv_heads, 4 * groups + dim / 2].
        slots: int64 [tokens], 0 or more: ``page * page_size + offset``.

    Raises:
        InvalidArgumentError, UnsupportedError, OutOfRangeError.
    """
    _exchange(cache, part, rows, slots, True)


def export_fbgemm_int4(cache: PagedKVCache, part: str, slots: Any, rows: Any = None) -> Any:
    """Reads FBGEMM gen_ai INT4 rows out of a cache; the inverse of :func:`import_fbgemm_int4`, exact (CPU).

    Args:
        cache, part, slots: as there.
        rows: to be written; None allocates it.

    Returns:
        ``rows``.
    """
    _check_part(part)
    if rows is None:
        spec = check_cache(cache).spec
        count = _check.shape(slots, "slots", 1, "tokens")[0]
        form, dim = (spec.k_format, spec.head_dim) if part == "k" else (spec.v_format, spec.v_head_dim)
        groups = dim // form.group_size if form.group_size else 1
        rows = _arrays.empty_output(cache.pages, (count, spec.kv_heads, 4 * groups + dim // 2), "uint8")
    _exchange(cache, part, rows, slots, False)
    return rows


def export_flash_mla_lse(lse: Any, q_len: int | None = None) -> Any:
    """An LSE as FlashMLA's Hopper kernels return it, for callers of theirs that read it.

    Both are natural logs, as in FlashMLA's kernels of April 2026 (commit 9241ae3); where ``flash_mla_sparse_fwd`` is
    documented to return logs of base 2, these are log2(e) times as large. FlashMLA has +inf in a row that sees no key,
    where halftone has -inf; it has queries last in decode; and it leaves attention sinks out, which halftone counts: of
    a plan with ``sinks`` the two differ otherwise.

    Args:
        lse: f32 [total_q, q_heads], as :func:`attend` returns it.
        q_len: queries of each request, for the [batch, q_heads, q_len] of ``flash_mla_with_kvcache``; None means the
            [total_q, q_heads] of ``flash_mla_sparse_fwd``.

    Returns:
        A new array of the same framework and device.

    Raises:
        InvalidArgumentError: shapes, dtypes, or queries that are no multiple of ``q_len``.
    """
    rows, heads = _check.shape(lse, "lse", 2, "total_q, q_heads")
    if q_len is not None and (_check.integer(q_len, "q_len") < 1 or rows % q_len):
        raise InvalidArgumentError(f"q_len is {q_len}, but must divide lse's {rows} rows: pass a request's queries.")
    out = _with_empty_rows(lse, -_INFINITY, _INFINITY)
    if q_len is None:
        return out
    return out.reshape(rows // q_len, q_len, heads).swapaxes(1, 2)


def import_flash_mla_lse(lse: Any) -> Any:
    """An LSE that FlashMLA returned as :func:`merge` takes it; the inverse of :func:`export_flash_mla_lse`.

    Args:
        lse: f32 [batch, q_heads, q_len] or [total_q, q_heads].

    Returns:
        f32 [total_q, q_heads], a new array of the same framework and device.

    Raises:
        InvalidArgumentError: shapes and dtypes.
    """
    if len(getattr(lse, "shape", ())) == 2:
        return _with_empty_rows(lse, _INFINITY, -_INFINITY)
    batch, heads, q_len = _check.shape(lse, "lse", 3, "batch, q_heads, q_len")
    out = _with_empty_rows(lse, _INFINITY, -_INFINITY)
    return out.swapaxes(1, 2).reshape(batch * q_len, heads)


def _with_empty_rows(lse: Any, old: float, new: float) -> Any:
    if _arrays.dtype_of(lse) != "f32":
        raise InvalidArgumentError(f"lse has dtype {_arrays.dtype_of(lse)}, but must be f32: convert it.")
    return _arrays.replaced(lse, old, new)


def _check_part(part: str) -> None:
    if part not in ("k", "v"):
        raise InvalidArgumentError(f"part is {part!r}, but must be k or v: choose one.")


def _exchange(cache: PagedKVCache, part: str, rows: Any, slots: Any, into_cache: bool) -> None:
    _check_part(part)
    native_rows = _arrays.native(rows, "rows", written=not into_cache)
    _native.exchange_fbgemm(
        check_cache(cache)._native, part == "v", into_cache, native_rows, _arrays.native(slots, "slots")
    )
