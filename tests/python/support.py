"""What the tests share: random caches, and the check of an attention result against double precision."""

import numpy as np

import halftone as ht
from halftone.compare.oracle import attention

KV_HEADS, Q_HEADS, DIM = 2, 8, 128


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def filled_cache(rng, lengths, max_len=512, **options):
    """A cache of random tokens and the k and v [tokens, heads, dim] that were appended."""
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "k_format": "int8-head", **options}
    cache = ht.PagedKVCache(len(lengths), max_len, **options)
    spec = cache.spec
    k = normal(rng, sum(lengths), spec.kv_heads, spec.head_dim)
    v = normal(rng, sum(lengths), spec.kv_heads, spec.v_head_dim)
    cache.append(k, v, lengths)
    return cache, k, v


def check(out, lse, q, k, v, q_lens, kv_lens, **options):
    """out and lse [total_q, heads, dim] against the oracle on k and v, request after request.

    The limit is fp32's for inputs of this size; bf16 and f16 outputs add one rounding of the row's largest value, and
    ``slack`` is for backends that round P too.
    """
    out = np.asarray(out, np.float64)
    rounding = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}[options.pop("out_dtype", "float32")]
    rounding += options.pop("slack", 0)
    at_q = at_k = 0
    for q_len, kv_len in zip(q_lens, kv_lens):
        rows, keys = slice(at_q, at_q + q_len), slice(at_k, at_k + kv_len)
        truth, truth_lse = attention(q[rows], k[keys], v[keys], **options)
        limit = 4e-6 + rounding * np.abs(truth).max(initial=0)
        np.testing.assert_allclose(out[rows], truth, rtol=0, atol=limit)
        if lse is not None:
            np.testing.assert_allclose(np.asarray(lse)[rows], truth_lse, rtol=2e-6, atol=1e-5)
        at_q, at_k = at_q + q_len, at_k + kv_len
    assert at_q == len(q) and at_k == len(k)
