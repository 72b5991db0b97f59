"""Operations on requests on a Hopper GPU: the bytes of the CPU, without waiting for the device, and in CUDA graphs."""

import copy
import pickle

import pytest

import halftone as ht

pytestmark = pytest.mark.gpu
KV_HEADS, Q_HEADS, DIM, BATCH = 2, 8, 128, 4
GEOMETRY = dict(kv_heads=KV_HEADS, head_dim=DIM, page_size=16, framework="torch")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def unsynchronised(torch):
    """Calls in which torch may not wait for the device."""

    class Unsynchronised:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    yield Unsynchronised()
    torch.cuda.set_sync_debug_mode("default")


class Twins:
    """A cache on the GPU and one on the CPU, to which the same is done."""

    def __init__(self, torch, make):
        self.torch, self.gpu, self.cpu = torch, make("cuda:0"), make("cpu")
        self.generator = torch.Generator().manual_seed(3)

    def tokens(self, count):
        return torch_randn(self.torch, self.generator, count)

    def do(self, call):
        call(self.gpu), call(self.cpu)

    def check(self):
        gpu, cpu = self.gpu, self.cpu
        assert gpu.lengths.tolist() == gpu.host_lengths == cpu.host_lengths
        assert gpu._sequences.pool.rows() == cpu._sequences.pool.rows()
        layers = range(gpu.num_layers) if hasattr(gpu, "num_layers") else [None]
        for i in layers:
            ours, theirs = (c if i is None else c.layer(i) for c in (gpu, cpu))
            for x, y in zip(ours.dequantize(), theirs.dequantize()):
                assert self.torch.equal(x.cpu(), y)
        gpu.check_status()


def torch_randn(torch, generator, count):
    return torch.randn(count, KV_HEADS, DIM, generator=generator).bfloat16()


def test_the_bytes_of_the_cpu_without_waiting(torch, unsynchronised):
    twins = Twins(torch, lambda device: ht.PagedKVCache(BATCH, 256, k_format="int8-g32", device=device, **GEOMETRY))

    def append(counts):
        k = twins.tokens(sum(counts))
        device_k = k.cuda()
        sums = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        device_sums = sums.cuda()
        with unsynchronised:
            twins.gpu.append(device_k, device_k, cu_seqlens=device_sums)
        twins.cpu.append(k, k, cu_seqlens=sums)

    twins.do(lambda c: c.reserve(120))
    append([40, 0, 3, 7])
    twins.check()  # which asks for the lengths
    for call in (
        lambda c: c.fork(0, [1, 3]),
        lambda c: c.reserve(60),
        lambda c: c.reorder([1, 2, 0, 0]),
        lambda c: c.truncate([20, 3, 40, 39], keep_pages=True),
        lambda c: c.evict_before([0, 0, 33, 2]),
        lambda c: c.free(1),
    ):
        with unsynchronised:
            call(twins.gpu)
        call(twins.cpu)
    twins.do(lambda c: c.evict_before(0))
    twins.do(lambda c: c.truncate([20, 0, 0, 39]))
    twins.check()
    twins.do(lambda c: c.reserve(40))
    append([1, 1, 1, 1])
    twins.do(lambda c: c.resize(6))
    twins.check()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(torch, copied):
    twins = Twins(torch, lambda device: ht.PagedKVCache(BATCH, 256, k_format="int4-g32", device=device, **GEOMETRY))
    k = twins.tokens(50)
    twins.gpu.append(k.cuda(), k.cuda(), [30, 0, 20, 0])
    twins.cpu.append(k, k, [30, 0, 20, 0])
    twins.do(lambda c: c.fork(2, 1))
    twins.gpu = copied(twins.gpu)
    assert twins.gpu.device == "cuda:0"
    twins.check()


def test_a_captured_step_of_layers_with_beams(torch):
    """One graph, replayed after every reorder: reserve() copies the pages that the beams share before."""
    layers = ["int8-head", "int4-g32"]
    twins = Twins(torch, lambda device: ht.LayeredKVCache(BATCH, 256, layers=layers, device=device, **GEOMETRY))
    prompt = twins.tokens(37)
    for i in range(2):
        twins.gpu.layer(i).append(prompt.cuda(), prompt.cuda(), [37, 0, 0, 0])
        twins.cpu.layer(i).append(prompt, prompt, [37, 0, 0, 0])
    twins.do(lambda c: c.fork(0, [1, 2, 3]))
    twins.do(lambda c: c.reserve(2))
    k = torch.zeros(BATCH, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(2):
            twins.gpu.layer(i).append(k, k)
        with pytest.raises(ht.InvalidArgumentError, match="the capture of a graph"):
            twins.gpu.reorder([0, 0, 1, 1])
    twins.gpu.truncate([37] * BATCH, keep_pages=True)  # the capture ran nothing
    for index in ([1, 1, 0, 3], [3, 2, 1, 0], [2, 2, 2, 2]) * 8:
        host = twins.tokens(BATCH)
        twins.do(lambda c: c.reorder(index))  # noqa: B023
        twins.do(lambda c: c.reserve(1))
        k.copy_(host)
        graph.replay()
        twins.gpu.advance()
        for i in range(2):
            twins.cpu.layer(i).append(host, host)
        twins.check()


def test_attention_within_a_window_after_eviction(torch):
    cache = ht.PagedKVCache(2, 512, k_format="int8-head", device="cuda:0", **GEOMETRY)
    k = torch.randn(600, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    cache.append(k, k, [400, 200])
    q = torch.randn(2, Q_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    expected = ht.attend(q, cache, causal=True, window_left=100)
    cache.evict_before([n - 1 - 100 for n in cache.host_lengths])
    assert torch.equal(ht.attend(q, cache, causal=True, window_left=100), expected)
    cache.check_status()
    ht.attend(q, cache)
    with pytest.raises(ht.InvalidArgumentError, match="block-table entry"):
        cache.check_status()
