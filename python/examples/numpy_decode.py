"""Decode with NumPy alone: a prompt goes into an INT4 cache, then tokens follow one at a time.

pip install halftone-attention numpy && python numpy_decode.py
"""

import numpy as np

import halftone as ht

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 128
PROMPTS = [300, 70]  # tokens of two requests

rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


# One cache a layer: 4-bit codes, a scale and a minimum for every 32 dims; K is stored rotated, which 4 bits need.
caches = [
    ht.PagedKVCache(
        len(PROMPTS),
        max_len=512,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        k_format=ht.KVFormat.int4(group=32),
        rotate_k=True,
    )
    for _ in range(LAYERS)
]
for cache in caches:
    cache.append(random(sum(PROMPTS), KV_HEADS, HEAD_DIM), random(sum(PROMPTS), KV_HEADS, HEAD_DIM), PROMPTS)

plan = ht.plan(caches[0], q_heads=Q_HEADS, q_dtype="f32", causal=True)  # once for the shape
for _ in range(4):
    for cache in caches:  # in a model, each layer appends before it attends
        cache.append(random(len(PROMPTS), KV_HEADS, HEAD_DIM), random(len(PROMPTS), KV_HEADS, HEAD_DIM))
    step = ht.schedule(plan, caches[0])  # once a step, for all layers
    for cache in caches:
        out = ht.attend(random(len(PROMPTS), Q_HEADS, HEAD_DIM), cache, schedule=step)

# The result against plain NumPy on the dequantised cache.
k, v = cache.dequantize()
q, first = random(len(PROMPTS), Q_HEADS, HEAD_DIM), cache.host_lengths[0]
out = ht.attend(q, cache)
logits = np.einsum("hd,khd->hk", q[0], np.repeat(k[:first], Q_HEADS // KV_HEADS, axis=1)) / np.sqrt(HEAD_DIM)
weights = np.exp(logits - logits.max(-1, keepdims=True))
weights /= weights.sum(-1, keepdims=True)
expected = np.einsum("hk,khd->hd", weights, np.repeat(v[:first], Q_HEADS // KV_HEADS, axis=1))
difference = np.abs(out[0] - expected).max()

bf16 = ht.KVCacheSpec(KV_HEADS, HEAD_DIM, "bf16").bytes_per_token
print(cache)
print(f"lengths {cache.host_lengths}, {bf16 / cache.spec.bytes_per_token:.1f}x smaller than bf16")
print(f"largest difference from NumPy: {difference:.0e}")
assert difference < 1e-5
