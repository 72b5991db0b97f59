"""A torch decode loop with a paged INT4 cache: eager, then compiled, and on a GPU replayed as a CUDA graph.

pip install halftone-attention torch && python torch_decode.py
"""

import torch

import halftone as ht
import halftone.torch as hot

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS = 4, 8, 2, 128, 100, 6


class Attention(torch.nn.Module):
    """One attention layer without projections' biases, small enough to read."""

    def __init__(self, width):
        super().__init__()
        self.q = torch.nn.Linear(width, Q_HEADS * HEAD_DIM, bias=False)
        self.k = torch.nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.v = torch.nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)

    def qkv(self, x):
        return (
            self.q(x).view(-1, Q_HEADS, HEAD_DIM),
            self.k(x).view(-1, KV_HEADS, HEAD_DIM),
            self.v(x).view(-1, KV_HEADS, HEAD_DIM),
        )

    def forward(self, x, cache, step):
        q, k, v = self.qkv(x)
        hot.append(cache, k, v)
        hot.schedule(step, cache)
        return hot.attend(q, cache, step).flatten(1)


def make_cache(layer, device):
    cache = ht.PagedKVCache(
        BATCH, 256, kv_heads=KV_HEADS, head_dim=HEAD_DIM, k_format="int4-g32", framework="torch", device=device
    )
    torch.manual_seed(1)
    prompt = torch.randn(BATCH * PROMPT, layer.q.in_features, device=device, dtype=layer.q.weight.dtype)
    _, k, v = layer.qkv(prompt)
    cache.append(k, v, [PROMPT] * BATCH)
    return cache


@torch.no_grad()
def main():
    gpu = ht.has_cuda and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device, dtype, name = ("cuda:0", torch.bfloat16, "bf16") if gpu else ("cpu", torch.float32, "f32")
    torch.manual_seed(0)
    layer = Attention(256).to(device, dtype)
    inputs = torch.randn(STEPS, BATCH, 256, device=device, dtype=dtype)

    # Eager: plan once, then append, schedule and attend in every step.
    cache = make_cache(layer, device)
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype=name)
    eager = []
    for x in inputs:
        q, k, v = layer.qkv(x)
        cache.append(k, v)
        eager.append(ht.attend(q, cache, schedule=ht.schedule(plan, cache)).flatten(1))
    cache.check_status()

    # torch.compile: the whole step is one graph.
    cache = make_cache(layer, device)
    cache.reserve(STEPS)
    step = hot.Step(plan)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if gpu else "aot_eager")
    for x, expected in zip(inputs, eager):
        torch.testing.assert_close(compiled(x, cache, step), expected)
        cache.advance()
    print(f"{device}: {STEPS} compiled steps agree with the eager ones; lengths {cache.host_lengths}")

    if gpu:  # capture one step, replay it as the cache grows
        cache = make_cache(layer, device)
        cache.reserve(STEPS)
        x = inputs[0].clone()
        lengths = cache.lengths.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x, cache, step)  # warm up
        torch.cuda.current_stream().wait_stream(stream)
        cache.lengths.copy_(lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, cache, step)
        for value, expected in zip(inputs, eager):
            x.copy_(value)
            graph.replay()
            cache.advance()
            torch.testing.assert_close(out, expected)
        print(f"{device}: {STEPS} replays of a captured step agree too; lengths {cache.lengths.tolist()}")


if __name__ == "__main__":
    main()
