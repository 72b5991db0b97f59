"""Other frameworks on the CPU, each skipped where it is not installed."""

import contextlib
import types

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, normal

import halftone as ht
from halftone import _arrays, _frameworks


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


@pytest.mark.parametrize("recent", [True, False])
def test_a_stream_of_the_callers_in_cupy(monkeypatch, recent):
    """CuPy 14 wants CUDA's stream protocol, on the stream's device; before it there is ExternalStream."""
    current = [0]

    class Array:
        __module__ = "cupy"

        def __dlpack_device__(self):
            return 2, 1

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    stream = types.SimpleNamespace(null="null")
    if recent:
        stream.from_external = lambda x: ("from_external", x.__cuda_stream__(), current[0])
    cuda = types.SimpleNamespace(Device=device, Stream=stream, ExternalStream=lambda *x: ("ExternalStream", *x))
    monkeypatch.setattr(_frameworks, "load", lambda name: types.SimpleNamespace(cuda=cuda))
    expected = ("from_external", (0, 77), 1) if recent else ("ExternalStream", 77, 1)
    assert _arrays.on_stream(Array(), 77) == expected and current == [0]
    assert _arrays.on_stream(Array(), 0) == "null"


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
    outputs = (torch.empty_like(q), torch.empty(2, Q_HEADS))
    torch.library.opcheck(torch.ops.halftone.attend_out.default, (*arguments, *outputs), test_utils=tests)
    torch.testing.assert_close(hot.attend(q, cache, step), ht.attend(q, cache, lse=True), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="grad"):  # nothing to go back through, and no zeros in its place
        hot.attend(q.requires_grad_(), cache, step)[0].sum().backward()


def test_torch_operators_write_what_the_caller_allocated(rng, torch):
    import halftone.torch as hot

    cache = torch_cache(rng, torch, k_format="int8-head")
    q = torch.from_numpy(normal(rng, 2, Q_HEADS, DIM))
    truth, truth_lse = ht.attend(q, cache, lse=True)
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32", lse=True)
    memory = torch.empty(plan.workspace_bytes + 256, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 256 :]
    step = hot.Step(plan, workspace=workspace)
    assert step.workspace is workspace
    hot.schedule(step, cache)
    for given in ({"out"}, {"lse"}, {"out", "lse"}):
        outputs = {"out": torch.full_like(q, torch.nan), "lse": torch.full((2, Q_HEADS), torch.nan)}
        got = hot.attend(q, cache, step, **{name: outputs[name] for name in given})
        assert [name for name, x in zip(("out", "lse"), got) if x is outputs[name]] == sorted(given, reverse=True)
        torch.testing.assert_close(got, (truth, truth_lse), rtol=0, atol=0)
    tensors = ht.KVTensors(KV_HEADS, DIM)
    with pytest.raises(ht.InvalidArgumentError, match="^plan is for KVTensors, but torch's operators attend over caches"):
        hot.Step(ht.plan(tensors, q_heads=Q_HEADS, batch=1, max_kv_len=64))
    bare = hot.Step(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"))
    hot.schedule(bare, cache)
    out = torch.empty_like(q)
    assert hot.attend(q, cache, bare, out=out) is out and torch.equal(out, truth)
    with pytest.raises(ht.InvalidArgumentError, match="lse is present, but the plan's lse is not set: plan with lse="):
        hot.attend(q, cache, bare, out=out, lse=truth_lse)
    for bad, match in [
        ("x", "a str"), (workspace.int(), "torch.int32"), (workspace[1:], "1 bytes past"),
        (workspace[: plan.workspace_bytes - 1], f"needs {plan.workspace_bytes}"), (workspace[None], "of shape"),
        (torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="meta"), "on meta"),
    ]:  # fmt: skip
        with pytest.raises(ht.Error, match=f"^workspace .*{match}"):
            hot.Step(plan, workspace=bad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compiles_a_step_with_and_without_out(rng, torch, backend):
    import halftone.torch as hot

    cache, eager = (torch_cache(np.random.default_rng(3), torch, k_format="int8-head") for _ in range(2))
    cache.reserve(4)
    step = hot.Step(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32", lse=True))

    @torch.compile(fullgraph=True, backend=backend)
    def decode(q, k, out):
        hot.append(cache, k, k * 2)
        hot.schedule(step, cache)
        twice, lse = hot.attend(q, cache, step, out=out)
        return hot.attend(q * 1.0, cache, step), twice * 2, lse

    for _ in range(3):
        q, k = torch.from_numpy(normal(rng, 2, Q_HEADS, DIM)), torch.from_numpy(normal(rng, 2, KV_HEADS, DIM))
        out = torch.full_like(q, torch.nan)
        first, twice, lse = decode(q, k, out)
        cache.advance()
        eager.append(k, k * 2)
        truth = ht.attend(q, eager, lse=True)
        torch.testing.assert_close(first, truth, rtol=0, atol=0)
        torch.testing.assert_close((out, lse), truth, rtol=0, atol=0)
        assert torch.equal(twice, out * 2)
        assert cache.lengths.tolist() == cache.host_lengths == eager.host_lengths == eager.lengths.tolist()


def test_a_torch_step_appends_one_token_to_each(rng, torch):
    import halftone.torch as hot

    for reserved in (False, True):
        cache = torch_cache(rng, torch)
        if reserved:
            cache.reserve(1)
        k = torch.zeros(3, KV_HEADS, DIM)
        with pytest.raises(ht.InvalidArgumentError, match="^cu_seqlens"):
            hot.append(cache, k, k)
        hot.append(cache, k[:2], k[:2])
        assert cache.lengths.tolist() == [21, 41] and cache.host_lengths == [20, 40]


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
