"""The geometry of a cache: what fixes the bytes of a page."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import _check, _native
from .errors import InvalidArgumentError
from .format import KVFormat, as_format


@dataclass(frozen=True, init=False)
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
    k_format: KVFormat
    v_format: KVFormat
    v_head_dim: int
    page_size: int
    rotate_k: bool
    rotate_v: bool
    key: str = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        k_format: KVFormat | str = "bf16",
        v_format: KVFormat | str | None = None,
        v_head_dim: int | None = None,
        page_size: int = 64,
        rotate_k: bool = False,
        rotate_v: bool = False,
    ) -> None:
        fields = {
            "k_format": as_format(k_format),
            "v_format": as_format(k_format if v_format is None else v_format),
            "kv_heads": _check.integer(kv_heads, "kv_heads"),
            "head_dim": _check.integer(head_dim, "head_dim"),
            "v_head_dim": head_dim if v_head_dim is None else _check.integer(v_head_dim, "v_head_dim"),
            "page_size": _check.integer(page_size, "page_size"),
            "rotate_k": _check.flag(rotate_k, "rotate_k"),
            "rotate_v": _check.flag(rotate_v, "rotate_v"),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._native  # noqa: B018  validates
        # An ordinary attribute, so that torch.compile sees a constant.
        text = {name: str(value) if name.endswith("_format") else value for name, value in fields.items()}
        object.__setattr__(self, "key", json.dumps(text))

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCacheSpec, tuple(getattr(self, name) for name in _DEFAULTS)

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


_DEFAULTS: dict[str, Any] = {
    name: None if parameter.default is parameter.empty else parameter.default
    for name, parameter in inspect.signature(KVCacheSpec).parameters.items()
}


def check_spec(spec: Any) -> KVCacheSpec:
    """``spec``, which must be a KVCacheSpec. Raises InvalidArgumentError."""
    if not isinstance(spec, KVCacheSpec):
        raise InvalidArgumentError(f"spec is {spec!r}, but must be a KVCacheSpec: make one.")
    return spec


def agreeing(spec: Any, given: tuple[Any, ...]) -> KVCacheSpec:
    """``spec``; what is given beside it must agree with it or be left at its default. Raises InvalidArgumentError."""
    made = check_spec(spec)
    for (name, default), value in zip(_DEFAULTS.items(), given):
        if name.endswith("_format") and value is not None:
            default, value = as_format(default or value), as_format(value)
        if value not in (default, None, getattr(made, name)):
            raise InvalidArgumentError(
                f"{name} is {value} beside spec, which says {getattr(made, name)}: give one of the two."
            )
    return made
