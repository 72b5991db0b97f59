"""Where K and V lie: the geometry of a cache, which fixes the bytes of a page, or that of plain arrays."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import _check, _native
from .errors import InvalidArgumentError
from .format import KVFormat, as_format


@dataclass(frozen=True)
class KVSpan:
    """Consecutive dims of every token that are stored alike: what K and V are made of.

    Attributes:
        format: of the values.
        dims: how many.
        rotate: whether they are stored after a block Hadamard rotation.
        order: "fragments" as the tensor cores take them, or "rows" of a token's values in the order of its dims.
        k_first: the dim of K that the span begins with; None: not a part of K.
        v_first: likewise of V; a span may be a part of both.
        data_offset: bytes from the tile to its first token's codes.
        param_offset: bytes from the tile to its first token's first scale, if it has scales.
    """

    format: KVFormat
    dims: int
    rotate: bool
    order: str
    k_first: int | None
    v_first: int | None
    data_offset: int
    param_offset: int


@dataclass(frozen=True, init=False)
class KVCacheSpec:
    """Everything that fixes the bytes of a page, of K and V stored apart; :meth:`latent` makes the other kind.

    Args:
        kv_heads: KV heads, at least 1.
        head_dim: dims of K and Q: 64, 80, 96, 128, 192, 256 or 512.
        k_format: format of K, a :class:`KVFormat` or its name.
        v_format: format of V; None means ``k_format``.
        v_head_dim: dims of V and of the output; None means ``head_dim``.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        rotate_k: store K after a block Hadamard rotation, which attention applies to Q alike (QuaRot,
            arXiv:2404.00456); improves 4-bit K.
        rotate_v: store V after the rotation; attention undoes it on the output.
        rope_dim: of a latent cache, see :meth:`latent`; 0: K and V apart.
        offset_k: store a quantised K less an offset per channel (``k_offset`` of the cache), which softmax cancels.
        scale_k: store it divided by a scale per channel (``k_channel_scale``), which attention multiplies Q with.

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
    rope_dim: int
    offset_k: bool
    scale_k: bool
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
        rope_dim: int = 0,
        offset_k: bool = False,
        scale_k: bool = False,
    ) -> None:
        head_dim = _check.integer(head_dim, "head_dim")
        fields = {
            "k_format": as_format(k_format),
            "v_format": as_format(k_format if v_format is None else v_format),
            "kv_heads": _check.integer(kv_heads, "kv_heads"),
            "head_dim": head_dim,
            "v_head_dim": head_dim if v_head_dim is None else _check.integer(v_head_dim, "v_head_dim"),
            "page_size": _check.integer(page_size, "page_size"),
            "rotate_k": _check.flag(rotate_k, "rotate_k"),
            "rotate_v": _check.flag(rotate_v, "rotate_v"),
            "rope_dim": _check.integer(rope_dim, "rope_dim"),
            "offset_k": _check.flag(offset_k, "offset_k"),
            "scale_k": _check.flag(scale_k, "scale_k"),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._native  # noqa: B018  validates
        # An ordinary attribute, so that torch.compile sees a constant.
        text = {name: str(value) if name.endswith("_format") else value for name, value in fields.items()}
        for name in ("rope_dim", "offset_k", "scale_k"):
            if not text[name]:  # files of caches without it are as they were
                del text[name]
        object.__setattr__(self, "key", json.dumps(text))

    @classmethod
    def latent(
        cls,
        k_format: KVFormat | str = "fp8-g128-f32",
        latent_dim: int = 512,
        rope_dim: int = 64,
        page_size: int = 64,
        rotary_v: bool = False,
    ) -> KVCacheSpec:
        """The spec of a latent cache (MLA, DeepSeek-V2, arXiv:2405.04434): one vector per token for all query heads.

        Its first ``latent_dim`` dims are V and the beginning of K; ``rope_dim`` dims of K in bf16 follow, those of the
        rotary embedding. A token's bytes are contiguous; the defaults give the 656-byte token of FlashMLA. Append to
        such a cache with ``k`` [tokens, 1, latent_dim + rope_dim] and no ``v``.

        Args:
            k_format: format of the latent: one with computed scales or a 16-bit one.
            latent_dim: 256 or 512, the ``v_head_dim``; with ``rotary_v`` so many together with ``rope_dim``.
            rope_dim: 32 or 64.
            page_size: tokens per page: 16, 32, 64, 128 or 256.
            rotary_v: V has the rotary dims, too. "fp8-g64-e8m0" with 448 and 64 dims is then FlashMLA's token of 584
                bytes.

        Raises:
            InvalidArgumentError, UnsupportedError: as the constructor.
        """
        dims = _check.integer(latent_dim, "latent_dim")
        if _check.integer(rope_dim, "rope_dim") == 0:
            raise InvalidArgumentError("rope_dim is 0, but a latent cache has 32 or 64 rotary dims: use 64.")
        v_dims = dims + rope_dim if _check.flag(rotary_v, "rotary_v") else dims
        return cls(1, dims + rope_dim, k_format, None, v_dims, page_size, rope_dim=rope_dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return KVCacheSpec, tuple(getattr(self, name) for name in _DEFAULTS)

    @cached_property
    def _native(self) -> Any:
        return _native.spec(
            str(self.k_format), str(self.v_format), self.kv_heads, self.head_dim, self.v_head_dim, self.page_size,
            self.rotate_k, self.rotate_v, self.rope_dim, self.offset_k, self.scale_k,
        )  # fmt: skip

    @cached_property
    def layout(self) -> dict[str, int]:
        """Sizes and offsets in bytes within a page, the fields of C++'s ``PageLayout`` (docs/formats.md)."""
        return {str(name): int(value) for name, value in _native.layout(self._native).items()}

    @cached_property
    def spans(self) -> tuple[KVSpan, ...]:
        """What K and V are made of and where it lies within a tile, as stored (docs/formats.md)."""
        flat, spans = list(_native.spans(self._native)), []
        for name, *numbers in (flat[i : i + 8] for i in range(0, len(flat), 8)):
            dims, rotate, in_rows, k_first, v_first, data_offset, param_offset = (int(n) for n in numbers)
            spans.append(
                KVSpan(
                    as_format(str(name)), dims, bool(rotate), "rows" if in_rows else "fragments",
                    None if k_first < 0 else k_first, None if v_first < 0 else v_first, data_offset, param_offset,
                )  # fmt: skip
            )
        return tuple(spans)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: all KV heads, K and V, scales included."""
        return self.layout["page_bytes"]

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token occupies over all KV heads, K and V, scales included."""
        return self.page_bytes / self.page_size


@dataclass(frozen=True, init=False)
class KVTensors:
    """K and V as plain arrays instead of a cache, for :func:`plan`.

    The CPU takes all of them; CUDA takes "f16" and "bf16" with Q alike, V of as many dims as K or 128 beside 192.

    Args:
        kv_heads: KV heads, at least 1.
        head_dim: dims of K and Q: 64, 80, 96, 128, 192, 256 or 512.
        dtype: of K and V: "f32", "f16" or "bf16".
        v_head_dim: dims of V and of the output; None means ``head_dim``.

    Raises:
        InvalidArgumentError: no integer, or another dtype. :func:`plan` refuses other geometries.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int

    def __init__(self, kv_heads: int, head_dim: int, dtype: str = "bf16", v_head_dim: int | None = None) -> None:
        fields = {
            "kv_heads": _check.integer(kv_heads, "kv_heads"),
            "head_dim": _check.integer(head_dim, "head_dim"),
            "dtype": _check.choice(dtype, "dtype", _check.FLOATS),
            "v_head_dim": _check.integer(head_dim if v_head_dim is None else v_head_dim, "v_head_dim"),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)


_COMPUTED = {"e4m3": "fp8-token-head", "int8": "int8-head", "int4": "int4-row"}  # by append, for each token and head
_DEFAULTS: dict[str, Any] = {
    name: None if parameter.default is parameter.empty else parameter.default
    for name, parameter in inspect.signature(KVCacheSpec).parameters.items()
}


def check_spec(spec: Any) -> KVCacheSpec:
    """``spec``, which must be a KVCacheSpec. Raises InvalidArgumentError."""
    if not isinstance(spec, KVCacheSpec):
        raise InvalidArgumentError(f"spec is {spec!r}, but must be a KVCacheSpec: make one.")
    return spec


def with_channels(spec: KVCacheSpec, k_offset: Any, k_channel_scale: Any) -> KVCacheSpec:
    """``spec`` with an offset and a scale of K's channels exactly where there are values. Raises UnsupportedError."""
    flags = {"offset_k": k_offset is not None, "scale_k": k_channel_scale is not None}
    if not any(flags.values()):
        return spec
    return KVCacheSpec(**{**{name: getattr(spec, name) for name in _DEFAULTS}, **flags})


# What lies beside the pages of a cache: its arguments and attributes of these names.
TENSORS = ("k_scale", "k_min", "v_scale", "v_min", "k_offset", "k_channel_scale")


def check_scales(
    spec: KVCacheSpec, k_scale: Any, k_min: Any, v_scale: Any, v_min: Any, k_offset: Any, k_channel_scale: Any
) -> None:
    """What lies beside the pages is there exactly where the spec has it. Raises InvalidArgumentError."""
    channels = (("k_offset", k_offset, "offset_k"), ("k_channel_scale", k_channel_scale, "scale_k"))
    for name, array, flag in channels:
        if (array is not None) != getattr(spec, flag):
            have, remedy = ("None", "pass what halftone.calibrate_channels() returns") if array is None else (
                "given", "make a spec with it")
            raise InvalidArgumentError(f"{name} is {have}, but {flag} of the spec is {getattr(spec, flag)}: {remedy}.")
    for part, form, scale, low in (("k", spec.k_format, k_scale, k_min), ("v", spec.v_format, v_scale, v_min)):
        wanted = {"scale": (scale, form.static_scale), "min": (low, form.static_scale and form.asymmetric)}
        for name, (array, has) in wanted.items():
            if has and array is None:
                raise InvalidArgumentError(
                    f"{part}_{name} is None, but {part}_format {form} has static scales: pass what "
                    f"halftone.calibrate(sample, {str(form)!r}) returns, or use {_COMPUTED[form.dtype]!r}, whose scales "
                    "append computes."
                )
            if array is not None and not has:
                why = "is symmetric" if form.static_scale else "has no static scales"
                raise InvalidArgumentError(
                    f"{part}_{name} is given, but {part}_format {form} {why}: leave it out."
                )


def agreeing(spec: Any, given: tuple[Any, ...]) -> KVCacheSpec:
    """``spec``; what is given beside it must agree with it or be left at its default. Raises InvalidArgumentError."""
    made = check_spec(spec)
    for (name, default), value in zip(_DEFAULTS.items(), given):
        if name.endswith("_format") and value is not None:
            default, value = as_format(default) if default else None, as_format(value)
        if value not in (default, None, getattr(made, name)):
            raise InvalidArgumentError(
                f"{name} is {value} beside spec, which says {getattr(made, name)}: give one of the two."
            )
    return made
