"""What one call from Python costs the host: python_overhead.py [numpy] [cpu] [cuda:0], with halftone importable.

Prints a table with a column for each argument: NumPy arrays, torch tensors on the CPU, torch tensors on a GPU; without
arguments, what is here. On CUDA the work is asynchronous, so the time of a call is its overhead, the launches included.
On the CPU the smallest problem is computed as well; the rows with batch 0 show the overhead alone. Each figure is the
median over rounds of the mean time of a call, outside of CUDA graphs.
"""

import importlib.util
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


def arrays_of(where):
    """(framework, device, dtype, a function that makes zeros, a function that waits) for a column of the table."""
    if where == "numpy":
        import numpy as np

        return "numpy", "cpu", "f32", lambda *shape: np.zeros(shape, np.float32), lambda: None
    import torch

    if where == "cpu":
        return "torch", "cpu", "f32", lambda *shape: torch.zeros(shape), lambda: None
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, device=where)  # noqa: E731
    return "torch", where, "bf16", zeros, torch.cuda.synchronize


def calls_of(where, batch):
    """Yields (name, call) over a cache of ``batch`` requests."""
    framework, device, dtype, zeros, _ = arrays_of(where)
    cache = ht.PagedKVCache(
        batch, 1 << 20, kv_heads=KV_HEADS, head_dim=DIM, num_pages=256 * batch, framework=framework, device=device
    )
    q, k, out = zeros(batch, Q_HEADS, DIM), zeros(batch, KV_HEADS, DIM), zeros(batch, Q_HEADS, DIM)
    cache.append(k, k)
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype=dtype)
    step = ht.schedule(plan, cache)
    yield "attend, scheduled, out given", lambda: ht.attend(q, cache, schedule=step, out=out)
    yield "attend, scheduled", lambda: ht.attend(q, cache, schedule=step)
    yield "Schedule.update", step.update
    yield "attend alone", lambda: ht.attend(q, cache)
    if framework == "torch":
        import halftone.torch as hot

        compiled = hot.Step(plan)
        hot.schedule(compiled, cache)
        yield "torch.attend, out given", lambda: hot.attend(q, cache, compiled, out=out)
        yield "torch.attend", lambda: hot.attend(q, cache, compiled)
        yield "torch.schedule", lambda: hot.schedule(compiled, cache)
        yield "torch.Step", lambda: hot.Step(plan)
    yield "PagedKVCache.append", lambda: cache.append(k, k)
    if framework == "torch":
        cache.reserve(4096)
        yield "torch.append", lambda: hot.append(cache, k, k)


def columns_here():
    if importlib.util.find_spec("torch") is None:
        return ["numpy"]
    import torch

    found = torch.cuda.is_available() and ht.has_cuda
    return ["numpy", "cpu", *(["cuda:0"] if found else [])]


def main():
    columns = sys.argv[1:] or columns_here()
    rows = {}
    for where in columns:
        settle = arrays_of(where)[-1]
        for batch in (0, 1, 32) if where.startswith("cuda") else (0, 1):
            for name, call in calls_of(where, batch):
                rows.setdefault((batch, name), {})[where] = microseconds(call, settle)
    print(f"{'us per call':38}" + "".join(f"{c:>10}" for c in columns))
    for (batch, name), times in rows.items():
        cells = (f"{times[c]:10.2f}" if c in times else f"{'':10}" for c in columns)
        print(f"batch {batch:2}: {name:28}" + "".join(cells))


if __name__ == "__main__":
    main()
