#!/usr/bin/env python3
"""Statistics of captured q, k and v: outlier channels of K and V, attention sinks.

Usage: python3 kv_statistics.py FILE.safetensors     (tensors layers.<i>.q, .k and .v)
"""

import math
import sys

import torch
from safetensors.torch import load_file

SINK_FIRST_QUERY = 64  # queries before this one have too few keys to show a sink
OUTLIER_FACTOR = 4.0  # a channel is an outlier when its absmax is this many times the head's median


def first_token_share(q, k):
    """Mean causal attention probability on token 0 over the later queries, per query head.

    q [tokens, q_heads, head_dim], k [tokens, kv_heads, head_dim]; returns fp32 [q_heads].
    """
    q, k = q.float().transpose(0, 1), k.float().transpose(0, 1)
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[:, SINK_FIRST_QUERY:, 0].mean(-1)


def channel_statistics(x):
    """Per head, over the tokens' largest magnitude in each channel. x [tokens, heads, head_dim]."""
    absmax = x.float().abs().amax(0)
    ratio = absmax / absmax.median(-1, keepdim=True).values
    return {
        "absmax_over_median": [round(r, 2) for r in ratio.amax(-1).tolist()],
        "outlier_channels": (ratio > OUTLIER_FACTOR).sum(-1).tolist(),
        "largest_channels": ratio.topk(4, dim=-1).indices.tolist(),
        "largest_values": [round(a, 2) for a in absmax.amax(-1).tolist()],
    }


def first_token_norm(x):
    """Norm of token 0 over the median norm of the other tokens, per head. x [tokens, heads, head_dim]."""
    norms = x.float().norm(dim=-1)
    return [round(r, 3) for r in (norms[0] / norms[1:].median(0).values).tolist()]


def layer_statistics(q, k, v):
    """The statistics of one layer as a dict of plain numbers and lists."""
    return {
        "k": channel_statistics(k),
        "v": channel_statistics(v),
        "k_kurtosis": round(float(((k.float() / k.float().std()) ** 4).mean()), 2),
        "first_token_share": [round(s, 3) for s in first_token_share(q, k).tolist()],
        "first_token_k_norm": first_token_norm(k),
        "first_token_v_norm": first_token_norm(v),
    }


def print_statistics(statistics):
    """One line per layer; statistics maps a layer's number to layer_statistics."""
    print("K channels and first token, per KV head; absmax/median: the largest channel's absmax over the median channel's")
    print(f"layer  {'absmax/median':16s} {'outliers':10s} {'largest |K|':16s} kurtosis  {'mass on token 0: mean, max head':32s} |k0|/median, |v0|/median")
    for i, s in statistics.items():
        share = s["first_token_share"]
        mass = f"{sum(share) / len(share):.3f}, {max(share):.3f}"
        k = s["k"]
        print(
            f"{i:5d}  {str(k['absmax_over_median']):16s} {str(k['outlier_channels']):10s} {str(k['largest_values']):16s}"
            f" {s['k_kurtosis']:8.2f}  {mass:32s} {s['first_token_k_norm']} {s['first_token_v_norm']}"
        )


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tensors = load_file(sys.argv[1])
    numbers = sorted({int(name.split(".")[1]) for name in tensors})
    print_statistics({i: layer_statistics(*(tensors[f"layers.{i}.{x}"] for x in "qkv")) for i in numbers})


if __name__ == "__main__":
    main()
