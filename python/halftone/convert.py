"""Static scales from samples, and exchange with FBGEMM's INT4 rows."""

from __future__ import annotations

from typing import Any

from . import _arrays, _check, _native
from .cache import PagedKVCache, check_cache
from .errors import InvalidArgumentError
from .format import KVFormat, as_format


def calibrate(x: Any, format: KVFormat | str, *, rotate: bool = False) -> tuple[Any, Any]:
    """Static scales that let ``x`` be stored without clipping.

    Args:
        x: f32, f16 or bf16 [tokens, kv_heads, dim] on the CPU.
        format: one with static scales, such as "fp8" or "int8-tensor".
        rotate: True when the cache rotates this part.

    Returns:
        scale and min, f32 [1] or [kv_heads] in the framework of ``x``; min is None for a symmetric format.

    Raises:
        InvalidArgumentError: a format without static scales, non-finite values, shapes or dtypes.
    """
    form = as_format(format)
    values = [float(s) for s in _native.calibrate(_arrays.native(x, "x"), form.name, _check.flag(rotate, "rotate"))]
    count = len(values) // 2 if form.asymmetric else len(values)
    framework = _arrays.framework_of(x)
    scale = _arrays.make(framework, values[:count], "f32", "cpu")
    return scale, _arrays.make(framework, values[count:], "f32", "cpu") if form.asymmetric else None


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
    if rows is None:
        spec = check_cache(cache).spec
        form, dim = (spec.k_format, spec.head_dim) if part == "k" else (spec.v_format, spec.v_head_dim)
        groups = dim // form.group_size if form.group_size else 1
        rows = _arrays.empty_output(cache.pages, (slots.shape[0], spec.kv_heads, 4 * groups + dim // 2), "uint8")
    _exchange(cache, part, rows, slots, False)
    return rows


def _exchange(cache: PagedKVCache, part: str, rows: Any, slots: Any, into_cache: bool) -> None:
    if part not in ("k", "v"):
        raise InvalidArgumentError(f"part is {part!r}, but must be k or v: choose one.")
    native_rows = _arrays.native(rows, "rows", written=not into_cache)
    _native.exchange_fbgemm(
        check_cache(cache)._native, part == "v", into_cache, native_rows, _arrays.native(slots, "slots")
    )
