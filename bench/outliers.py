"""Prints what each arithmetic costs on values with outliers, as docs/arithmetic.md has it: bench/outliers.py.

Q, K and V of N(0, 1) + N(0, 100) * Bernoulli(0.001), rounded to fp16, as FlashAttention-3 is judged on
(arXiv:2407.08608): 2,048 tokens, 4 heads, head_dim 128, no mask, output in fp32. Root mean square error of the output
against attention in double precision on the fp16 values. Needs an importable halftone (PYTHONPATH=python and
HALFTONE_PYTHON_LIBRARY, or an installed wheel).
"""

import halftone as ht
import numpy as np

TOKENS, HEADS, DIM = 2048, 4, 128
FORMATS = ["fp16", "fp16+rot", "int8-head", "int8-head+rot", "int8-token", "fp8-token-head", "int4-g32", "int4-g32+rot"]
ARITHMETICS = ["16-bit", "half_int8", "full_int8", "fp8"]


def values(rng):
    shape = (TOKENS, HEADS, DIM)
    x = rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return x.astype(np.float16)


def truth(q, k, v):
    q, k, v = (x.astype(np.float64).transpose(1, 0, 2) for x in (q, k, v))
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(DIM)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)


def attend(q, k, v, name, arithmetic):
    """Over plain tensors where ``name`` is None."""
    if name is None:
        return ht.attend(q, k=k, v=v, causal=False, out_dtype="f32", arithmetic=arithmetic)
    stored, rotated = name.removesuffix("+rot"), name.endswith("+rot")
    cache = ht.PagedKVCache(
        batch=1, max_len=TOKENS, kv_heads=HEADS, head_dim=DIM, k_format=stored, rotate_k=rotated, rotate_v=rotated
    )
    cache.append(k, v, [TOKENS])
    return ht.attend(q, cache, causal=False, out_dtype="f32", cu_q=np.array([0, TOKENS], np.int32), arithmetic=arithmetic)


def main():
    rng = np.random.default_rng(1)
    q, k, v = values(rng), values(rng), values(rng)
    exact = truth(q, k, v)
    print(f"root mean square of the output: {np.sqrt(np.mean(exact**2)):.3f}\n")
    print("| K and V | " + " | ".join(ARITHMETICS) + " |\n| --- |" + " --- |" * len(ARITHMETICS))
    for name in [None, *FORMATS]:
        errors = [np.sqrt(np.mean((attend(q, k, v, name, a) - exact) ** 2)) for a in ARITHMETICS]
        print(f"| {name or 'fp16, plain'} | " + " | ".join(f"{e:.1e}" for e in errors) + " |", flush=True)


if __name__ == "__main__":
    main()
