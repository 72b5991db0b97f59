"""Participant of compare_cpu.py: torch.nn.functional.scaled_dot_product_attention on the CPU in bf16.

Speaks the protocol of worker.h. variant= names how the grouped query heads are given to torch:
  gqa       enable_gqa=True on K and V [batch, kv_heads, context, head_dim]
  expanded  K and V repeated to all query heads beforehand, outside the timing
  packed    the query heads of a KV head become query rows: [batch, kv_heads, group, head_dim], as a caller may write
            for decode, where no mask is needed
"""

import array
import json
import mmap
import sys
import time

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention


def read_floats(path, shape):
    return torch.from_numpy(numpy.fromfile(path, dtype=numpy.float32).reshape(shape))


def huge(shape):
    """A zeroed bf16 tensor in 2 MB pages where the system grants them, as the other participants have."""
    memory = mmap.mmap(-1, 2 * int(numpy.prod(shape)))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16).reshape(shape)


def main():
    arguments = dict(text.split("=", 1) for text in sys.argv[1:])
    number = lambda name: int(arguments[name])
    batch, context, head_dim = number("batch"), number("context"), number("head_dim")
    q_heads, kv_heads = number("q_heads"), number("kv_heads")
    group = q_heads // kv_heads
    variant, data = arguments["variant"], arguments["data"]
    torch.set_num_threads(number("threads"))

    q = read_floats(f"{data}/q.f32", (1, q_heads, 1, head_dim)).to(torch.bfloat16).expand(batch, -1, -1, -1)
    q = q.contiguous() if variant != "packed" else q.reshape(batch, kv_heads, group, head_dim)
    heads = q_heads if variant == "expanded" else kv_heads
    layers = []
    for _ in range(number("layers")):
        pair = []
        for part in "kv":
            x = read_floats(f"{data}/{part}.f32", (context, kv_heads, head_dim)).to(torch.bfloat16).transpose(0, 1)
            cache = huge((batch, heads, context, head_dim))
            cache.copy_(x.repeat_interleave(heads // kv_heads, dim=0))
            pair.append(cache)
        layers.append(pair)
    options = {"enable_gqa": True} if variant == "gqa" else {}
    done = 0

    def step():
        nonlocal done
        k, v = layers[done % len(layers)]
        done += 1
        return scaled_dot_product_attention(q, k, v, **options)

    # The distinct values only: what a call must read at least.
    size = 2 * 2 * batch * kv_heads * context * head_dim
    print(json.dumps({"bytes": size, "version": f"torch {torch.__version__}"}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            command, argument = line.split()
            if command == "run":
                step()
                times = array.array("d")
                for _ in range(int(argument)):
                    start = time.perf_counter()
                    step()
                    times.append(1e6 * (time.perf_counter() - start))
                print(json.dumps({"us": times.tolist()}), flush=True)
            elif command == "write":
                step().reshape(batch, q_heads, head_dim).float().numpy().tofile(argument)
                print("{}", flush=True)
            else:
                sys.exit(f"unknown command: {line}")


main()
