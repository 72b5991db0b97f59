"""JAX on the CPU through DLPack: bf16 queries, keys and values in, JAX arrays out, nothing copied on the way.

pip install halftone-attention jax && python jax_decode.py
"""

import jax
import jax.numpy as jnp

import halftone as ht

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT = 2, 8, 2, 64, 80

keys = iter(jax.random.split(jax.random.key(0), 16))


def random(*shape):
    return jax.random.normal(next(keys), shape, jnp.bfloat16)


# JAX arrays cannot be written to, so the cache's pages are NumPy's; everything else is JAX's.
cache = ht.PagedKVCache(BATCH, 256, kv_heads=KV_HEADS, head_dim=HEAD_DIM, k_format="int8-head", framework="jax")
cache.append(random(BATCH * PROMPT, KV_HEADS, HEAD_DIM), random(BATCH * PROMPT, KV_HEADS, HEAD_DIM), [PROMPT] * BATCH)

for _ in range(3):
    cache.append(random(BATCH, KV_HEADS, HEAD_DIM), random(BATCH, KV_HEADS, HEAD_DIM))
    q = random(BATCH, Q_HEADS, HEAD_DIM)
    out, lse = ht.attend(q, cache, lse=True)

assert isinstance(out, jax.Array) and out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32

# The same from JAX's own attention on the dequantised cache.
k, v = (jnp.asarray(x).reshape(BATCH, -1, KV_HEADS, HEAD_DIM) for x in cache.dequantize())
expected = jax.nn.dot_product_attention(q[:, None].astype(jnp.float32), k, v)[:, 0]
difference = float(jnp.abs(out.astype(jnp.float32) - expected).max())
print(f"{out.dtype} on {out.device}, lengths {cache.host_lengths}, largest difference from JAX: {difference:.0e}")
assert difference < 4e-3  # bf16 keeps 8 bits
