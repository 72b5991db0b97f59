"""The attention function of transformers' interface, over a HalftoneCache or over plain keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import InvalidArgumentError, UnsupportedError, attend
from .columns import Columns
from .layers import Pending
from .masks import Visible, check_sizes, gaps_of, make_visible


def register(name: str = "halftone") -> None:
    """Makes halftone's attention known to transformers, for ``model.set_attn_implementation(name)``.

    Registers the attention function and what makes masks for it; a second call changes nothing.

    Args:
        name: of the attention implementation.

    Raises:
        InvalidArgumentError: the name of another implementation.
    """
    if name == "eager" or ALL_ATTENTION_FUNCTIONS.get(name) not in (None, halftone_attention):
        raise InvalidArgumentError(
            f"name is {name!r}, but another attention implementation has it: choose another, such as 'halftone'."
        )
    AttentionInterface.register(name, halftone_attention)
    AttentionMaskInterface.register(name, torch.compiler.disable(make_visible))


class _Forward(torch.autograd.Function):
    """Passes an output on, and says in the backward pass what is missing there."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "halftone's attention has no gradient, but a backward pass needs it: train with another attention "
            "implementation, such as 'sdpa'."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # pages are dealt on the host: graphs break around it
def halftone_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: [batch, q_heads, columns, head_dim].
        key, value: what HalftoneCache.update() gave, or [batch, kv_heads, key columns, head_dim].
        attention_mask: of the mask interface; None means no padding.
        scaling: of the logits; None means 1/sqrt(head_dim).
        dropout: must be 0.
        sliding_window: keys that a query sees, where there is no ``attention_mask``.
        softcap: of the logits (Gemma 2).
        s_aux: [q_heads], sinks (gpt-oss).
        is_causal: where there is no ``attention_mask``; None means what the layer says.

    Returns:
        [batch, columns, q_heads, v_head_dim], and None for the weights.

    Raises:
        UnsupportedError, InvalidArgumentError: what halftone's attention does not have.
    """
    if dropout:
        raise UnsupportedError(f"dropout is {dropout}, but halftone's attention has none: call model.eval().")
    for name in ("position_bias", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedError(f"{name} is given, but halftone's attention has none: use 'eager' attention.")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        end = query.shape[2] if isinstance(key, Pending) else key.shape[2]
        attention_mask = Visible(causal, sliding_window, query.shape[2], end, None, 0, True)
    elif not isinstance(attention_mask, Visible):
        raise UnsupportedError(
            f"attention_mask is a {type(attention_mask).__name__} made outside of the model, but halftone's attention "
            "takes masks [batch, tokens] of padding only: pass one, or None."
        )
    attention_mask.check()
    options: dict[str, Any] = {"scale": scaling, "softcap": float(softcap or 0.0)}
    if attention_mask.window is not None:
        options["window_left"] = attention_mask.window - 1
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    if isinstance(key, Pending):
        if not attention_mask.causal:
            raise UnsupportedError(
                "the layer is bidirectional, but a HalftoneCache serves causal attention: call it without a cache."
            )
        out = key.cache.attend(key, query.detach(), attention_mask, sinks, options)
    else:
        out = _attend_plain(query.detach(), key.detach(), value.detach(), attention_mask, sinks, options)
    return (_Forward.apply(out, query) if query.requires_grad else out), None


def _attend_plain(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention over keys and values of another cache, or of none."""
    batch, heads, columns, _ = q.shape
    end = visible.end
    keep = visible.columns
    gaps = None
    if keep is not None:
        check_sizes(visible, batch, visible.kv_offset + end)
        keep = keep[:, visible.kv_offset :]
        gaps = gaps_of(keep, 0)
    seen = Columns.none(batch).extended(end, gaps)
    if visible.window is not None and (inner := seen.first_with_inner_gap()) is not None:
        raise InvalidArgumentError(
            f"attention_mask leaves out tokens of request {inner} between others, but a sliding window counts columns: "
            "pad on the left only."
        )
    queries, keys = ([columns] * batch, seen.lengths())
    q_rows = k_rows = None
    if gaps is not None and keep is not None:
        q_rows = keep[:, end - columns :].reshape(-1).nonzero()[:, 0] if visible.causal else None
        k_rows = keep.reshape(-1).nonzero()[:, 0]
        if visible.causal:
            before = seen.cropped(end - columns).lengths()
            queries = [n - b for n, b in zip(keys, before)]
    sums = [torch.tensor([0, *counts]).cumsum(0).to(q.device, torch.int32) for counts in (queries, keys)]
    out = attend(
        _rows(q, q_rows), k=_rows(k[:, :, :end], k_rows), v=_rows(v[:, :, :end], k_rows), cu_q=sums[0], cu_kv=sums[1],
        causal=visible.causal, sinks=sinks, **options,
    )  # fmt: skip
    if q_rows is not None:
        full = out.new_zeros((batch * columns, heads, out.shape[-1]))
        full[q_rows] = out
        out = full
    result: Tensor = out.view(batch, columns, heads, -1)
    return result


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """[batch, heads, columns, dims] as [rows, heads, dims], all of them or those given."""
    flat = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return flat if rows is None else flat[rows]
