"""The next-token distributions of a model with quantised caches beside those with its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .. import InvalidArgumentError
from ..transformers import HalftoneCache, register


@dataclass(frozen=True)
class Quality:
    """Of one cache.

    Attributes:
        kl: mean Kullback-Leibler divergence of the next token's distribution from that with the model's own cache, in
            nats per token; 0: the same distributions.
        perplexity: of the text.
        bytes_per_token: of the cache, in all layers.
    """

    kl: float
    perplexity: float
    bytes_per_token: float


@dataclass(frozen=True)
class Report:
    """What :func:`measure` finds.

    Attributes:
        tokens: judged.
        perplexity: of the text with the model's own cache.
        rows: by name.
    """

    tokens: int
    perplexity: float
    rows: Mapping[str, Quality]


@torch.no_grad()
def measure(
    model: PreTrainedModel, tokens: Sequence[int] | Tensor, formats: Mapping[str, Any], *, chunk: int = 256
) -> Report:
    """Runs ``tokens`` through ``model`` once with its own cache and once with each of ``formats``.

    With its own cache the model computes with its eager attention. A chunk of tokens goes through all of them before the next one does: memory holds the caches and the logits of two
    chunks. Each query reads keys and values from the quantised cache, those of its own chunk, too.

    Args:
        model: a decoder of transformers, on any device.
        tokens: ids of one sequence, at least 2.
        formats: what :class:`halftone.transformers.HalftoneCache` takes as ``formats``, by the names of the report.
        chunk: tokens in one call of the model.

    Raises:
        InvalidArgumentError: too few tokens; formats that do not fit the model.
    """
    ids = torch.as_tensor(tokens, dtype=torch.long).reshape(1, -1)
    count = int(ids.shape[1])
    if count < 2 or chunk < 1:
        raise InvalidArgumentError(
            f"tokens has {count} ids and chunk is {chunk}, but they must be at least 2 and 1: give a longer text."
        )
    register()
    config, before, was_training = model.config, model.config._attn_implementation, model.training
    own = DynamicCache(config=config)
    caches = {name: HalftoneCache(config, count, value, max_step=chunk) for name, value in formats.items()}
    sums = {name: [0.0, 0.0] for name in caches}  # divergence, loss
    loss = 0.0
    model.eval()
    try:
        for first in range(0, count, chunk):
            part = ids[:, first : first + chunk].to(model.device)
            nexts = ids[0, first + 1 : first + 1 + chunk].to(model.device)
            model.set_attn_implementation("eager")  # others leave out softcap and sinks
            exact = _distribution(model, part, own)
            loss += _loss(exact, nexts)
            model.set_attn_implementation("halftone")
            for name, cache in caches.items():
                other = _distribution(model, part, cache)
                sums[name][0] += float((exact.exp() * (exact - other)).sum(dtype=torch.float64))
                sums[name][1] += _loss(other, nexts)
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
    rows = {
        name: Quality(kl / count, math.exp(total / (count - 1)), caches[name].bytes_per_token)
        for name, (kl, total) in sums.items()
    }
    return Report(count, math.exp(loss / (count - 1)), rows)


def _distribution(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities of the next token [tokens, vocabulary], f32."""
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0].float().log_softmax(-1)


def _loss(distribution: Tensor, nexts: Tensor) -> float:
    """Sum over the tokens that have a next one of its negative log-probability."""
    rows = distribution[: len(nexts)]
    return float(-rows.gather(1, nexts[:, None]).sum(dtype=torch.float64))
