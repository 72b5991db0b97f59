"""Sees q, k and v of a transformers model on their way into attention."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from .. import UnsupportedError

_NAME = "halftone_capture"  # stays registered, and keeps no model alive
_ROTARY = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class Seen:
    """What a layer's attention got for the tokens of a call, the new ones only.

    Attributes:
        q, k, v: [tokens, heads, dims].
        before: q and k before RoPE, likewise; None where they were not asked for.
        options: the layer's scaling, softcap and sliding_window, those that it has.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    before: tuple[Tensor, Tensor] | None
    options: dict[str, Any]


class Recorder:
    """A context in which ``seen`` is called with the number of a layer and what its attention gets.

    The model computes with its eager attention meanwhile, which has every option that the model has; its own
    implementation is put back at the end.

    Args:
        model: of transformers.
        seen: called in every layer of every call of the model.
        before_rope: also see q and k as they are before RoPE.

    Raises:
        UnsupportedError: a model whose attention or RoPE does not go through transformers' common functions.
    """

    def __init__(self, model: PreTrainedModel, seen: Callable[[int, Seen], None], before_rope: bool = False) -> None:
        self._model, self._seen, self._before_rope = model, seen, before_rope
        self._unrotated: tuple[Tensor, Tensor] | None = None
        self._patched: list[tuple[Any, Any]] = []

    def __enter__(self) -> Recorder:
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, eager_mask)
        self._token = _active.set(self)
        self._implementation = self._model.config._attn_implementation
        try:
            self._model.set_attn_implementation(_NAME)
            if self._before_rope:
                self._patch()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for module, function in self._patched:
            setattr(module, _ROTARY, function)
        self._patched = []
        _active.reset(self._token)
        self._model.set_attn_implementation(self._implementation)

    def _patch(self) -> None:
        """Puts a function that sees its arguments in the place of the one that applies RoPE."""
        modules = {sys.modules[type(part).__module__] for part in self._model.modules()}
        for module in modules:
            if module.__name__.startswith("transformers.models.") and hasattr(module, _ROTARY):
                original = getattr(module, _ROTARY)
                self._patched.append((module, original))
                setattr(module, _ROTARY, self._seeing(original))
        if not self._patched:
            raise UnsupportedError(
                f"{type(self._model).__name__} applies RoPE otherwise than by {_ROTARY}(), but values before RoPE are "
                "taken there: capture those after RoPE only."
            )

    def _seeing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def seeing(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._unrotated = (q, k)
            return original(q, k, *args, **kwargs)

        return seeing

    def attention(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        """What the model calls in the place of its own attention."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or query.shape[0] != 1:
            raise UnsupportedError(
                f"{type(module).__name__} has no layer_idx or a batch of {query.shape[0]}, but a capture is one "
                "sequence through a decoder: capture another model."
            )
        columns, before = query.shape[2], None
        if self._before_rope:
            before = self._taken(layer, query, key[:, :, -columns:])
        options = {name: kwargs.get(name) for name in ("scaling", "softcap", "sliding_window") if kwargs.get(name)}
        q, k, v = (x[0, :, -columns:].transpose(0, 1) for x in (query, key, value))
        self._seen(layer, Seen(q, k, v, before, options))
        home = sys.modules[type(module).__module__]
        return getattr(home, "eager_attention_forward", sdpa_attention_forward)(
            module, query, key, value, attention_mask, **kwargs
        )

    def _taken(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The pair that RoPE was last applied to, which must be this layer's."""
        found, self._unrotated = self._unrotated, None
        if found is None or found[0].shape != q.shape or found[1].shape != k.shape:
            raise UnsupportedError(
                f"layer {layer} of {type(self._model).__name__} rotates no or other tensors than those that enter its "
                "attention, but values before RoPE are taken there: capture those after RoPE only."
            )
        return found[0][0].transpose(0, 1), found[1][0].transpose(0, 1)


_active: ContextVar[Recorder] = ContextVar("recorder")


def _attention(*arguments: Any, **kwargs: Any) -> Any:
    return _active.get().attention(*arguments, **kwargs)
