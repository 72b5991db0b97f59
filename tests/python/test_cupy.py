"""CuPy arrays on a Hopper GPU, on CuPy's current stream, against NumPy arrays on the CPU. Needs CuPy, not torch."""

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, normal

import halftone as ht

pytestmark = pytest.mark.filterwarnings("error::DeprecationWarning")
LENGTHS, DEVICE = [65, 1, 200, 64], "cuda:0"


@pytest.fixture
def cupy():
    if not ht.has_cuda:
        pytest.skip("this build has no CUDA backend")
    cupy = pytest.importorskip("cupy")
    try:
        hopper = cupy.cuda.Device(0).compute_capability == "90"
    except cupy.cuda.runtime.CUDARuntimeError:
        hopper = False
    if not hopper:
        pytest.skip("no GPU of compute capability 9.0")
    return cupy


def pair(cupy, rng, name, **options):
    """A cache of CuPy arrays and one of NumPy arrays, of the same tokens."""
    k, v = (normal(rng, sum(LENGTHS), KV_HEADS, DIM).astype(np.float16) for _ in range(2))
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "k_format": name, **options}
    twin = ht.PagedKVCache(len(LENGTHS), 512, **options)
    cache = ht.PagedKVCache(len(LENGTHS), 512, framework="cupy", device=DEVICE, **options)
    twin.append(k, v, LENGTHS)
    cache.append(cupy.asarray(k), cupy.asarray(v), LENGTHS)
    cache.check_status()
    return cache, twin


def same(cupy, ours, theirs):
    assert isinstance(ours, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(ours), theirs)


@pytest.mark.parametrize("name", ["bf16", "int8-head", "int4-g32"])
def test_the_same_bytes_as_numpy(cupy, rng, name):
    cache, twin = pair(cupy, rng, name, rotate_k=True)
    for _ in range(3):  # the second of which needs no page
        k = normal(rng, len(LENGTHS), KV_HEADS, DIM).astype(np.float16)
        cache.append(cupy.asarray(k), cupy.asarray(k))
        twin.append(k, k)
    assert cache.host_lengths == twin.host_lengths == [n + 3 for n in LENGTHS]
    for array in ("pages", "block_table", "lengths"):
        same(cupy, getattr(cache, array), getattr(twin, array))
    for ours, theirs in zip(cache.dequantize(dtype="f16"), twin.dequantize(dtype="f16")):
        same(cupy, ours, theirs)
    out = cupy.empty((sum(cache.host_lengths), KV_HEADS, DIM), np.float32)
    assert cache.dequantize(out)[0] is out
    same(cupy, out, twin.dequantize()[0])


def test_attention_and_merge(cupy, rng):
    cache, twin = pair(cupy, rng, "int8-head")
    q = normal(rng, len(LENGTHS), Q_HEADS, DIM).astype(np.float16)
    out, lse = ht.attend(cupy.asarray(q), cache, lse=True)
    assert isinstance(out, cupy.ndarray) and out.dtype == np.float16 and lse.dtype == np.float32
    truth = twin.dequantize()
    check(cupy.asnumpy(out), None, q, *truth, [1] * 4, LENGTHS, out_dtype="float16", slack=2**-8)
    np.testing.assert_allclose(cupy.asnumpy(lse), ht.attend(q, twin, lse=True)[1], rtol=1e-5, atol=1e-4)
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f16"), cache)
    target = cupy.empty_like(out)
    assert ht.attend(cupy.asarray(q), cache, schedule=step, out=target) is target
    same(cupy, target, cupy.asnumpy(out))
    merged, merged_lse = ht.merge([out, out], [lse, lse], lse=True)
    expected = ht.merge([cupy.asnumpy(out)] * 2, [cupy.asnumpy(lse)] * 2, lse=True)
    np.testing.assert_allclose(cupy.asnumpy(merged), expected[0], rtol=2**-10, atol=1e-6)
    np.testing.assert_allclose(cupy.asnumpy(merged_lse), expected[1], rtol=1e-6)


def test_the_current_stream_is_respected(cupy, rng):
    cache, _ = pair(cupy, rng, "int8-head")
    q = cupy.asarray(normal(rng, len(LENGTHS), Q_HEADS, DIM).astype(np.float16))
    k = cupy.asarray(normal(rng, len(LENGTHS), KV_HEADS, DIM).astype(np.float16))
    expected_cache, _ = pair(cupy, np.random.default_rng(20240611), "int8-head")
    expected_cache.append(k, k)
    expected = ht.attend(q, expected_cache)
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f16"), cache)
    late_q, late_k = cupy.zeros_like(q), cupy.zeros_like(k)
    work = cupy.ones((4096, 4096), np.float32)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):  # milliseconds: work on another stream would see zeros
            work = work @ work * np.float32(1 / 4096)
        late_q[...], late_k[...] = q, k
        cache.append(late_k, late_k)
        step.update()
        out = ht.attend(late_q, cache, schedule=step)
        whole = ht.merge([out], [cupy.zeros(out.shape[:-1], np.float32)])
    stream.synchronize()
    same(cupy, out, cupy.asnumpy(expected))
    np.testing.assert_allclose(cupy.asnumpy(whole), cupy.asnumpy(expected), rtol=2**-10, atol=1e-6)


def test_pages_are_not_dealt_within_a_capture(cupy):
    cache = ht.PagedKVCache(1, 512, kv_heads=KV_HEADS, head_dim=DIM, k_format="bf16", framework="cupy", device=DEVICE)
    k = cupy.zeros((1, KV_HEADS, DIM), np.float16)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(ht.InvalidArgumentError, match="reserve"):
                cache.append(k, k)
        finally:
            stream.end_capture()
    assert cache.host_lengths == [0]
    cache.append(k, k)
    assert cache.host_lengths == [1]
