"""The geometry of a cache: what fixes the bytes of a page."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import _check, _native
from .errors import InvalidArgumentError
from .format import KVFormat, as_format


@dataclass(frozen=True)
class KVCacheSpec:
    """Everything that fixes the bytes of a page.

    Args:
        kv_heads: KV heads, at least 1.
        head_dim: dims of K and Q: 64, 80, 96, 128, 192 or 256.
        k_format: format of K, a :class:`KVFormat` or its name.
        v_format: format of V; None means ``k_format``.
        v_head_dim: dims of V and of the output; None means ``head_dim``.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        rotate_k: store K after a block Hadamard rotation, which attention applies to Q alike (QuaRot,
            arXiv:2404.00456); improves 4-bit K.
        rotate_v: store V after the rotation; attention undoes it on the output.

    Raises:
        InvalidArgumentError, UnsupportedError: a geometry that no page has; the sentence names the nearest choice.

    Attributes:
        key: the fields as a JSON object, the ``spec`` of a packed cache file.
    """

    kv_heads: int
    head_dim: int
    k_format: KVFormat | str = "bf16"
    v_format: KVFormat | str | None = None
    v_head_dim: int | None = None
    page_size: int = 64
    rotate_k: bool = False
    rotate_v: bool = False

    def __post_init__(self) -> None:
        fields = {
            "k_format": as_format(self.k_format),
            "v_format": as_format(self.k_format if self.v_format is None else self.v_format),
            "kv_heads": _check.integer(self.kv_heads, "kv_heads"),
            "head_dim": _check.integer(self.head_dim, "head_dim"),
            "v_head_dim": self.head_dim if self.v_head_dim is None else _check.integer(self.v_head_dim, "v_head_dim"),
            "page_size": _check.integer(self.page_size, "page_size"),
            "rotate_k": _check.flag(self.rotate_k, "rotate_k"),
            "rotate_v": _check.flag(self.rotate_v, "rotate_v"),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._native  # noqa: B018  validates
        # An ordinary attribute, so that torch.compile sees a constant.
        text = {name: str(value) if name.endswith("_format") else value for name, value in fields.items()}
        object.__setattr__(self, "key", json.dumps(text))

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCacheSpec, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @cached_property
    def _native(self) -> Any:
        return _native.spec(
            str(self.k_format), str(self.v_format), self.kv_heads, self.head_dim, self.v_head_dim, self.page_size,
            self.rotate_k, self.rotate_v,
        )  # fmt: skip

    @cached_property
    def layout(self) -> dict[str, int]:
        """Sizes and offsets in bytes within a page, the fields of C++'s ``PageLayout`` (docs/formats.md)."""
        return {str(name): int(value) for name, value in _native.layout(self._native).items()}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: all KV heads, K and V, scales included."""
        return self.layout["page_bytes"]

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token occupies over all KV heads, K and V, scales included."""
        return self.page_bytes / self.page_size


def check_spec(spec: Any) -> KVCacheSpec:
    """``spec``, which must be a KVCacheSpec. Raises InvalidArgumentError."""
    if not isinstance(spec, KVCacheSpec):
        raise InvalidArgumentError(f"spec is {spec!r}, but must be a KVCacheSpec: make one.")
    return spec


def agreeing(spec: Any, given: tuple) -> KVCacheSpec:
    """``spec``; what is given beside it must agree with it or be left at its default. Raises InvalidArgumentError."""
    check_spec(spec)
    for field, value in zip(dataclasses.fields(KVCacheSpec), given):
        default = None if field.default is dataclasses.MISSING else field.default
        if field.name.endswith("_format") and value is not None:
            default, value = as_format(default or value), as_format(value)
        if value not in (default, None, getattr(spec, field.name)):
            raise InvalidArgumentError(
                f"{field.name} is {value} beside spec, which says {getattr(spec, field.name)}: give one of the two."
            )
    return spec
