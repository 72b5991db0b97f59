"""KV-cache number formats as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import _check, _native
from .errors import InvalidArgumentError

_GRANULARITIES = ("tensor", "head", "token", "token_head", "group")
_GRAMMAR = {"tensor": "tensor", "head": "static-head", "token": "token", "token_head": "token-head"}


@dataclass(frozen=True)
class KVFormat:
    """How K or V values are stored in a cache.

    Symmetric: ``x = q * scale``. Asymmetric: ``x = q * scale + min`` with ``q >= 0``. Codes: int8 in [-127, 127] or
    [0, 255], int4 in [-7, 7] or [0, 15], fp8 is OCP E4M3 (largest value 448). Sources: FBGEMM gen_ai's INT4 KV cache,
    KVQuant (arXiv:2401.18079) and KIVI (arXiv:2402.02750) for granularities, OCP OFP8 for E4M3.

    Args:
        name: a named format (``KVFormat.named()``) or the general form
            ``bf16 | fp16 | (fp8|int8|int4)-(tensor|static-head|token|token-head|g32|g64|g128)[-sym|-asym][-f16|-f32]``.

    Raises:
        InvalidArgumentError: an unknown name; the sentence names those that are nearest in meaning.

    Attributes:
        name: the shortest text for this format.
        dtype: "bf16", "f16", "e4m3", "int8" or "int4".
        granularity: what shares a scale: "none", "tensor", "head", "token", "token_head" or "group".
        asymmetric: True when a minimum is stored beside the scale.
        group_size: dims per scale with granularity "group" (32, 64 or 128), else 0.
        scale_dtype: "f16" or "f32".
        static_scale: True when the caller supplies the scales ("tensor", "head"), see :func:`calibrate`.
    """

    name: str
    dtype: str = field(init=False, compare=False, repr=False)
    granularity: str = field(init=False, compare=False, repr=False)
    asymmetric: bool = field(init=False, compare=False, repr=False)
    group_size: int = field(init=False, compare=False, repr=False)
    scale_dtype: str = field(init=False, compare=False, repr=False)
    static_scale: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        name = _check.text(str(self.name), "format")
        for key, value in _native.format_info(name).items():
            object.__setattr__(self, str(key), str(value) if isinstance(value, str) else value)

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def bf16() -> KVFormat:
        """bfloat16 rows, no scales: 2 bytes per value."""
        return KVFormat("bf16")

    @staticmethod
    def fp16() -> KVFormat:
        """float16 rows, no scales: 2 bytes per value."""
        return KVFormat("fp16")

    @staticmethod
    def fp8(*, granularity: str = "tensor", scale_dtype: str = "f16") -> KVFormat:
        """OCP E4M3, symmetric: 1 byte per value and the scales.

        Args:
            granularity: "tensor" or "head" (static scales), "token" or "token_head" (computed by append).
            scale_dtype: "f16" or "f32", of scales stored in pages.
        """
        return _build("fp8", granularity, None, True, scale_dtype)

    @staticmethod
    def int8(
        *,
        group: int | None = None,
        granularity: str | None = None,
        symmetric: bool = True,
        scale_dtype: str = "f16",
    ) -> KVFormat:
        """8-bit integers: 1 byte per value and the scales.

        Args:
            group: dims per scale (32, 64 or 128); sets granularity "group".
            granularity: "tensor" or "head" (static scales), "token", "token_head" (computed by append); None means
                "group" with a ``group``, else "token_head".
            symmetric: False stores a minimum beside each scale.
            scale_dtype: "f16" or "f32", of scales stored in pages.
        """
        return _build("int8", granularity, group, symmetric, scale_dtype)

    @staticmethod
    def int4(
        *,
        group: int | None = None,
        granularity: str | None = None,
        symmetric: bool = False,
        scale_dtype: str = "f16",
    ) -> KVFormat:
        """4-bit integers: half a byte per value and the scales; asymmetric unless told otherwise.

        Args:
            group: dims per scale (32, 64 or 128); sets granularity "group".
            granularity: "tensor" or "head" (static scales), "token", "token_head" (computed by append); None means
                "group" with a ``group``, else "token_head".
            symmetric: True stores no minimum.
            scale_dtype: "f16" or "f32", of scales stored in pages.
        """
        return _build("int4", granularity, group, symmetric, scale_dtype)

    @staticmethod
    def named() -> dict[str, str]:
        """The formats that have a name of their own, with a line about each, in order of falling size."""
        flat = [str(text) for text in _native.formats()]
        return dict(zip(flat[0::2], flat[1::2]))


def _build(base: str, granularity: str | None, group: int | None, symmetric: bool, scale_dtype: str) -> KVFormat:
    if granularity is None:
        granularity = "token_head" if group is None else "group"
    _check.choice(granularity, "granularity", _GRANULARITIES)
    if group is not None and granularity != "group":
        raise InvalidArgumentError(
            f"granularity is {granularity!r} beside group {group!r}, but a group is a granularity: give one of the two."
        )
    if granularity != "group":
        part = _GRAMMAR[granularity]
    else:
        part = f"g{_check.integer(group, 'group')}"
    sign = "sym" if _check.flag(symmetric, "symmetric") else "asym"
    scale = _check.choice(scale_dtype, "scale_dtype", ("f16", "f32"))
    static = granularity in ("tensor", "head")
    return KVFormat(f"{base}-{part}" + ("" if base == "fp8" else f"-{sign}") + ("" if static else f"-{scale}"))


def as_format(value: Any) -> KVFormat:
    """``value`` if it is a format, else the format of that name."""
    return value if isinstance(value, KVFormat) else KVFormat(value)
