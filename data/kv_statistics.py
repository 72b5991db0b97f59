#!/usr/bin/env python3
"""Statistics of captured q, k and v: outlier channels of K and V, attention sinks.

Usage: python3 kv_statistics.py FILE.safetensors     (tensors layers.<i>.q, .k and .v)

The last line it prints is for normal random data of the same shape, to compare.
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
    rms = x.float().square().mean(0).sqrt()
    return {
        "rms_over_median": [round(r, 2) for r in (rms.amax(-1) / rms.median(-1).values).tolist()],
        "absmax_over_median": [round(r, 2) for r in ratio.amax(-1).tolist()],
        "outlier_channels": (ratio > OUTLIER_FACTOR).sum(-1).tolist(),
        "largest_channels": ratio.topk(4, dim=-1).indices.tolist(),
        "largest_values": [round(a, 2) for a in absmax.amax(-1).tolist()],
    }


def first_token_norm(x):
    """Norm of token 0 over the median norm of the other tokens, per head. x [tokens, heads, head_dim]."""
    norms = x.float().norm(dim=-1)
    return [round(r, 3) for r in (norms[0] / norms[1:].median(0).values).tolist()]


def int4_signal_to_noise(x):
    """Decibels of x over its rounding error in symmetric int4, one scale per token and head."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 7
    error = x - (x / scale).round() * scale
    return round(float(10 * torch.log10(x.square().sum() / error.square().sum())), 2)


def layer_statistics(q, k, v):
    """The statistics of one layer as a dict of plain numbers and lists."""
    return {
        "k": channel_statistics(k),
        "v": channel_statistics(v),
        "k_kurtosis": round(float(((k.float() / k.float().std()) ** 4).mean()), 2),
        "k_int4_snr_db": int4_signal_to_noise(k),
        "first_token_share": [round(s, 3) for s in first_token_share(q, k).tolist()],
        "first_token_k_norm": first_token_norm(k),
        "first_token_v_norm": first_token_norm(v),
    }


def print_statistics(statistics):
    """One line per layer; statistics maps a layer's name to its layer_statistics."""
    print("K's largest channel over its median channel, by absmax and by RMS; channels over 4 times the median; per KV head")
    print(
        f"{'layer':>6s}  {'absmax':14s} {'RMS':14s} {'outliers':9s} {'largest |K|':15s} kurtosis  int4 dB"
        "  mass on token 0: mean, max head   |k0|, |v0| over median"
    )
    for name, s in statistics.items():
        k, share = s["k"], s["first_token_share"]
        print(
            f"{name!s:>6s}  {k['absmax_over_median']!s:14s} {k['rms_over_median']!s:14s} {k['outlier_channels']!s:9s}"
            f" {k['largest_values']!s:15s} {s['k_kurtosis']:8.2f}  {s['k_int4_snr_db']:7.2f}"
            f"  {sum(share) / len(share):21.3f}, {max(share):.3f}   {s['first_token_k_norm']} {s['first_token_v_norm']}"
        )


def choose_layers(statistics):
    """One layer of each half: early the strongest outlier channel of K, late the strongest sink.

    statistics is a list of layer_statistics, in the order of the layers.
    """
    half = len(statistics) // 2
    early = max(range(half), key=lambda i: max(statistics[i]["k"]["absmax_over_median"]))
    late = max(range(half, len(statistics)), key=lambda i: sum(statistics[i]["first_token_share"]))
    return [early, late]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tensors = load_file(sys.argv[1])
    layers = {i: [tensors[f"layers.{i}.{x}"] for x in "qkv"] for i in sorted({int(name.split(".")[1]) for name in tensors})}
    generator = torch.Generator().manual_seed(1)
    first = next(iter(layers.values()))
    layers["normal"] = [torch.randn(x.shape, generator=generator) for x in first]
    print_statistics({name: layer_statistics(*layer) for name, layer in layers.items()})


if __name__ == "__main__":
    main()
