"""A layer in one call on a Hopper GPU: attend() that appends, against append() and attend()."""

import pytest
from support import DIM
from test_gpu import FORMATS, KV_HEADS, LENGTHS, Q_HEADS, make, queries

import halftone as ht

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_step_that_appends(torch, name):
    """A layer in one call, replayed as the cache grows: the bytes and the bits of append() and attend()."""
    eager, cache = make(torch, name), make(torch, name)
    cache.reserve(300)
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, appends=True), cache)
    q, k = torch.empty_like(queries(torch)), torch.empty(4, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.update()
        ht.attend(q, cache, k=k, v=k, schedule=step, out=out)
    cache.truncate(LENGTHS, keep_pages=True)
    for i in range(70):
        q.copy_(queries(torch, seed=i))
        k.normal_(generator=torch.Generator("cuda").manual_seed(i))
        graph.replay()
        cache.advance()
        eager.append(k, k)
        torch.testing.assert_close(out, ht.attend(q, eager), rtol=0, atol=0)
    assert cache.lengths.tolist() == cache.host_lengths == [n + 70 for n in LENGTHS]
    stored, expected = cache.dequantize(), eager.dequantize()
    assert all(torch.equal(x, y) for x, y in zip(stored, expected))
    cache.check_status()


def test_drafts_and_prompts_that_append(torch):
    """Ragged steps, RoPE, slots that are skipped, and a value that is not finite."""
    eager, cache = make(torch, "int8-head"), make(torch, "int8-head")
    counts, total = [3, 1, 90, 0], 94
    cu = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    q = queries(torch, total)
    k = torch.randn(total, KV_HEADS, DIM, device="cuda").bfloat16()
    angle = torch.rand(2048, 32, device="cuda")
    starts = [n + i for n, count in zip(LENGTHS, counts) for i in range(count)]
    rope = ht.Rope(angle.cos(), angle.sin(), torch.tensor(starts, dtype=torch.int32, device="cuda"))
    out = ht.attend(q, cache, k=k, v=k, rope=rope, cu_q=cu, causal=True)
    eager.append(k, k, counts, rope=rope)
    torch.testing.assert_close(out, ht.attend(q, eager, cu_q=cu, causal=True), rtol=0, atol=0)
    assert torch.equal(cache.lengths, eager.lengths) and cache.host_lengths == eager.host_lengths
    cache.check_status()
    k[5, 1, 7] = float("inf")
    ht.attend(q, cache, k=k, v=k, cu_q=cu, causal=True)
    with pytest.raises(ht.InvalidArgumentError, match="append got a NaN or infinity"):
        cache.check_status()
