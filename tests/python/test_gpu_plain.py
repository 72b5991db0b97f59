"""torch on a Hopper GPU: attention over plain tensors, without a cache."""

import pytest
from support import DIM, check

import halftone as ht

pytestmark = pytest.mark.gpu
Q_HEADS, KV_HEADS = 8, 2


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def plain(torch, dtype, dim, q_lens, kv_lens, seed=11, v_dim=None):
    """q, k and v of requests one after another, and where they begin."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(q_lens), Q_HEADS), (sum(kv_lens), KV_HEADS), (sum(kv_lens), KV_HEADS))
    dims = (dim, dim, v_dim or dim)
    q, k, v = (torch.randn(*s, d, generator=generator).to(dtype).cuda() for s, d in zip(shapes, dims))
    cu_q, cu_kv = (torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int().cuda() for lens in (q_lens, kv_lens))
    return q, k, v, cu_q, cu_kv


@pytest.mark.parametrize(
    "dim, v_dim", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_plain_tensors(torch, dtype, dim, v_dim):
    q_lens, kv_lens = [130, 1, 0, 65], [200, 77, 9, 65]
    q, k, v, cu_q, cu_kv = plain(torch, getattr(torch, dtype), dim, q_lens, kv_lens, v_dim=v_dim)
    lens = dict(cu_q=cu_q, cu_kv=cu_kv)
    truth = [x.float().cpu().numpy() for x in (q, k, v)]
    for options in (dict(causal=True), dict(), dict(causal=True, window_left=50, softcap=20.0)):
        out, lse = ht.attend(q, k=k, v=v, lse=True, out_dtype="f32", **lens, **options)
        assert out.is_cuda and out.dtype == torch.float32 and out.shape == (*q.shape[:2], v_dim)
        # P is rounded to the dtype of V.
        check(out.cpu().numpy(), None, *truth, q_lens, kv_lens, slack=2**-6, **options)
        same, _ = ht.attend(q, k=k, v=v, lse=True, out_dtype="f32", **lens, **options)
        assert torch.equal(out, same)
        cpu = ht.attend(q.cpu(), k=k.cpu(), v=v.cpu(), cu_q=cu_q.cpu(), cu_kv=cu_kv.cpu(), lse=True, **options)
        torch.testing.assert_close(lse.cpu(), cpu[1], rtol=1e-5, atol=1e-3)


def test_plain_tensors_may_be_views_of_one(torch):
    """Slices of a projection's output, and heads before tokens."""
    q, k, v, _, _ = plain(torch, torch.bfloat16, DIM, [130], [130])
    expected = ht.attend(q, k=k, v=v, causal=True)
    packed = torch.cat([q, k, v], 1)
    parts = packed.split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for views in (parts, heads_first):
        assert not views[0].is_contiguous()
        assert torch.equal(ht.attend(views[0], k=views[1], v=views[2], causal=True), expected)


def test_what_plain_tensors_must_be(torch):
    q, k, v, _, _ = plain(torch, torch.bfloat16, DIM, [40], [40])
    with pytest.raises(ht.UnsupportedError, match="q_dtype is f32, but the CUDA backend takes tensors in bf16 and f16"):
        ht.attend(q.float(), k=k, v=v)
    with pytest.raises(ht.UnsupportedError, match="^kv is K and V tensors in f32 .* use the CPU"):
        ht.attend(q.float(), k=k.float(), v=v.float())
    with pytest.raises(ht.UnsupportedError, match="with head_dim 96 and 64 of V"):
        ht.attend(q[..., :96], k=k[..., :96], v=v[..., :64])
    shifted = torch.zeros(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view_as(k)
    with pytest.raises(ht.InvalidArgumentError, match="^k starts 2 bytes past a multiple of 16"):
        ht.attend(q, k=shifted, v=v)
    with pytest.raises(ht.InvalidArgumentError, match="^v starts 2 bytes past a multiple of 16"):
        ht.attend(q, k=k, v=shifted)
    with pytest.raises(ht.InvalidArgumentError, match=r"\bk\b"):
        ht.attend(q, k=k.cpu(), v=v)


def test_a_captured_prompt_over_plain_tensors(torch):
    q, k, v, cu_q, cu_kv = plain(torch, torch.bfloat16, DIM, [100, 60], [200, 60])
    spec = ht.KVTensors(KV_HEADS, DIM)
    plan = ht.plan(spec, q_heads=Q_HEADS, batch=2, max_kv_len=260, max_q_len=160, causal=True, device="cuda:0")
    step, out = ht.schedule(plan, cu_q=cu_q, cu_kv=cu_kv), torch.empty_like(q)
    ht.attend(q, k=k, v=v, schedule=step, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.update()
        ht.attend(q, k=k, v=v, schedule=step, out=out)
    for q_lens, kv_lens in (([100, 60], [200, 60]), ([3, 157], [3, 257]), ([160, 0], [260, 0])):
        for cu, lens in ((cu_q, q_lens), (cu_kv, kv_lens)):
            cu.copy_(torch.tensor([0, *lens], dtype=torch.int32).cumsum(0))
        out.zero_()
        graph.replay()
        expected = ht.attend(q, k=k, v=v, schedule=ht.schedule(plan, cu_q=cu_q, cu_kv=cu_kv))
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
