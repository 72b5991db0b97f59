"""Other frameworks on the CPU, each skipped where it is not installed."""

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, normal

import halftone as ht


def test_jax_arrays(rng):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    with jax.default_device(jax.devices("cpu")[0]):
        k = jnp.asarray(normal(rng, 100, KV_HEADS, DIM))
        cache = ht.PagedKVCache(2, 64, kv_heads=KV_HEADS, head_dim=DIM, framework="jax", k_format="int8-g32")
        cache.append(k, k, [40, 60])
        q = jnp.asarray(normal(rng, 2, Q_HEADS, DIM))
        out, lse = ht.attend(q, cache, lse=True)
        assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
        check(out, lse, np.asarray(q), *cache.dequantize(), [1, 1], [40, 60])
        target = np.full(q.shape, np.nan, np.float32)
        ht.attend(q, cache, out=target)
        np.testing.assert_array_equal(target, out)
        with pytest.raises(ht.InvalidArgumentError, match="out is a JAX array, which is immutable"):
            ht.attend(q, cache, out=jnp.zeros_like(q))


def test_any_dlpack_tensor(rng):
    import tvm_ffi

    cache = ht.PagedKVCache(1, 64, kv_heads=KV_HEADS, head_dim=DIM)
    k, q = normal(rng, 9, KV_HEADS, DIM), normal(rng, 1, Q_HEADS, DIM)
    cache.append(tvm_ffi.from_dlpack(k), tvm_ffi.from_dlpack(k))
    out = np.empty_like(q)
    ht.attend(
        tvm_ffi.from_dlpack(q), cache, schedule=ht.schedule(ht.plan(cache, q_heads=8, q_dtype="f32"), cache), out=out
    )
    np.testing.assert_array_equal(out, ht.attend(q, cache))
    result = ht.attend(tvm_ffi.from_dlpack(q), cache)
    np.testing.assert_array_equal(np.from_dlpack(result), out)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors(rng, torch, dtype):
    real = getattr(torch, dtype)
    k = torch.from_numpy(normal(rng, 100, KV_HEADS, DIM)).to(real)
    cache = ht.PagedKVCache(
        2, 64, kv_heads=KV_HEADS, head_dim=DIM, framework="torch", k_format="int4-g32", rotate_k=True
    )
    cache.append(k, k, [40, 60])
    q = torch.from_numpy(normal(rng, 2, Q_HEADS, DIM)).to(real).requires_grad_()
    out, lse = ht.attend(q, cache, lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == real and not out.requires_grad
    stored = [x.numpy() for x in cache.dequantize()]
    check(out.float().numpy(), lse.numpy(), q.detach().float().numpy(), *stored, [1, 1], [40, 60], out_dtype=dtype)


def test_torch_and_numpy_write_the_same_bytes(rng, torch):
    k = normal(rng, 70, KV_HEADS, DIM)
    options = dict(kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-g32", v_format="int4-row", rotate_v=True)
    caches = [ht.PagedKVCache(1, 128, framework=f, **options) for f in ("numpy", "torch")]
    caches[0].append(k, k)
    caches[1].append(torch.from_numpy(k), torch.from_numpy(k))
    np.testing.assert_array_equal(caches[0].pages, caches[1].pages.numpy())


def test_torch_files_move_between_frameworks(rng, torch, tmp_path):
    pytest.importorskip("safetensors")
    k = torch.from_numpy(normal(rng, 70, KV_HEADS, DIM))
    cache = ht.PagedKVCache(1, 128, kv_heads=KV_HEADS, head_dim=DIM, framework="torch")
    cache.append(k, k)
    cache.to_safetensors(tmp_path / "cache.safetensors")
    for framework in ("numpy", "torch"):
        again = ht.PagedKVCache.from_safetensors(tmp_path / "cache.safetensors", framework=framework)
        for ours, theirs in zip(again.dequantize(), cache.dequantize()):
            np.testing.assert_array_equal(np.asarray(ours), theirs.numpy())


def torch_cache(rng, torch, **options):
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "framework": "torch", **options}
    cache = ht.PagedKVCache(2, 64, **options)
    k = torch.from_numpy(normal(rng, 60, KV_HEADS, DIM))
    cache.append(k, k, [20, 40])
    return cache


def test_torch_operators_pass_torchs_own_checks(rng, torch):
    import halftone.torch as hot

    cache = torch_cache(rng, torch, k_format="int8-head")
    step = hot.Step(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32", lse=True))
    k = torch.from_numpy(normal(rng, 2, KV_HEADS, DIM))
    tests = ("test_schema", "test_faketensor")
    cu = torch.arange(3, dtype=torch.int32)
    empty = (None, None, None, None)
    arguments = (k, k, cu, cache.pages, cache.block_table, cache.lengths, cache.status, *empty, cache.spec.key)
    torch.library.opcheck(torch.ops.halftone.append.default, arguments, test_utils=tests)
    arguments = (cache.lengths, None, step.workspace, step.key)
    torch.library.opcheck(torch.ops.halftone.schedule.default, arguments, test_utils=tests)
    hot.schedule(step, cache)
    q = torch.from_numpy(normal(rng, 2, Q_HEADS, DIM))
    arguments = (q, step.workspace, cache.lengths, None, cache.pages, cache.block_table, cache.status, *empty, None,
                 None, False, step.key)  # fmt: skip
    torch.library.opcheck(torch.ops.halftone.attend.default, arguments, test_utils=tests)
    torch.testing.assert_close(hot.attend(q, cache, step), ht.attend(q, cache, lse=True), rtol=0, atol=0)


def test_torch_errors_keep_their_class(rng, torch):
    import halftone.torch as hot

    cache = torch_cache(rng, torch)
    with pytest.raises(ht.InvalidArgumentError, match="^v"):
        hot.append(cache, torch.zeros(2, KV_HEADS, DIM), torch.zeros(2, KV_HEADS, 64))
    with pytest.raises(ht.InvalidArgumentError, match="q.dtype is float64"):
        step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
        ht.attend(torch.zeros(2, Q_HEADS, DIM, dtype=torch.float64), cache, schedule=step)
    with pytest.raises(ht.UnsupportedError, match="out is on meta"):
        ht.attend(torch.zeros(2, Q_HEADS, DIM), cache, out=torch.zeros(2, Q_HEADS, DIM, device="meta"))
