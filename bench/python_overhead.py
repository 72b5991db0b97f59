"""What one call from Python costs the host: python_overhead.py [cpu | cuda:0], with halftone (and torch) importable.

On CUDA the work is asynchronous, so the time of a call is its overhead, the launch included. On the CPU the smallest
problem is computed as well; the line "no work" (batch 0) shows the overhead alone.
"""

import statistics
import sys
import time

import halftone as ht

Q_HEADS, KV_HEADS, DIM = 8, 2, 128


def microseconds(call, settle, calls=100, rounds=30):
    """Median over rounds of the mean time of a call."""
    results = []
    for _ in range(rounds):
        settle()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        results.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(results)


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if device == "cpu":
        import numpy as np

        def array(*shape):
            return np.zeros(shape, np.float32)

        framework, dtype, settle = "numpy", "f32", lambda: None
    else:
        import torch

        def array(*shape):
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        framework, dtype, settle = "torch", "bf16", torch.cuda.synchronize
    for batch, what in ((0, "no work"), (1, "batch 1")):
        cache = ht.PagedKVCache(
            batch, 1 << 20, kv_heads=KV_HEADS, head_dim=DIM, num_pages=64 * batch, framework=framework, device=device
        )
        q, k = array(batch, Q_HEADS, DIM), array(batch, KV_HEADS, DIM)
        cache.append(k, k)
        step, out = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype=dtype), cache), array(batch, Q_HEADS, DIM)
        for name, call, calls in (
            ("attend, scheduled, out given", lambda: ht.attend(q, cache, schedule=step, out=out), 100),
            ("attend, scheduled", lambda: ht.attend(q, cache, schedule=step), 100),
            ("attend alone", lambda: ht.attend(q, cache), 100),
            ("schedule again", step.update, 100),
            ("append", lambda: cache.append(k, k), 100),
        ):
            print(f"{device}, {what}: {name:30} {microseconds(call, settle, calls):8.2f} us")


if __name__ == "__main__":
    main()
