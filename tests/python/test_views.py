"""Views whose memory is not what they read as: each is read as its values, or refused with the argument's name."""

import types

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, normal

import halftone as ht
from halftone import _arrays, _frameworks


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def negated(torch, x):
    """``x``, of which memory holds the negative: the imaginary part of a conjugate has it so, as have its views."""
    lazy = torch._neg_view(-x)
    assert lazy.is_neg() and torch.equal(lazy, x)
    return lazy


def strided(torch, x):
    """``x`` as the imaginary part of a conjugate, every other element of memory."""
    lazy = torch.complex(x, -x).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, x)
    return lazy


def make(framework, rng, **options):
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "k_format": "int8-g32", **options}
    return ht.PagedKVCache(2, 64, framework=framework, **options)


@pytest.mark.parametrize("lazy", [negated, strided])
def test_lazily_negated_tensors_are_read_as_their_values(rng, torch, lazy):
    k, v = (torch.from_numpy(normal(rng, 60, KV_HEADS, DIM)) for _ in range(2))
    q = torch.from_numpy(normal(rng, 2, Q_HEADS, DIM))
    cache, twin = make("torch", rng), make("torch", rng)
    twin.append(k, v, [20, 40])
    cache.append(lazy(torch, k), lazy(torch, v), [20, 40])
    assert torch.equal(cache.pages, twin.pages)
    slots = torch.tensor([5, 70])
    twin.append_slots(k[:2], v[:2], slots)
    cache.append_slots(lazy(torch, k[:2]), lazy(torch, v[:2]), slots)
    assert torch.equal(cache.pages, twin.pages)

    slopes = torch.from_numpy(np.abs(normal(rng, Q_HEADS)))
    options = dict(alibi_slopes=slopes, sinks=slopes, lse=True)
    truth = ht.attend(q, twin, **options)
    options.update({name: lazy(torch, slopes).contiguous() for name in ("alibi_slopes", "sinks")})
    torch.testing.assert_close(ht.attend(lazy(torch, q), cache, **options), truth, rtol=0, atol=0)
    step = ht.schedule(ht.plan(twin, q_heads=Q_HEADS, q_dtype="f32"), twin)
    bare = ht.attend(q, twin, schedule=step)
    assert torch.equal(ht.attend(lazy(torch, q), twin, schedule=step), bare)
    assert torch.equal(ht.attend(lazy(torch, q), k=lazy(torch, k), v=lazy(torch, v)), ht.attend(q, k=k, v=v))
    merged = ht.merge([q, q * 2], [q[..., 0].contiguous()] * 2)
    assert torch.equal(ht.merge([lazy(torch, q), lazy(torch, q * 2)], [lazy(torch, q[..., 0])] * 2), merged)
    assert ht.calibrate(lazy(torch, k), "int4-tensor") == ht.calibrate(k, "int4-tensor")


def test_lazily_negated_scales_and_rotations(rng, torch):
    k = torch.from_numpy(normal(rng, 2, KV_HEADS, DIM))
    angle = torch.from_numpy(normal(rng, 64, 32))
    positions = torch.arange(2, dtype=torch.int32)
    caches = []
    for lazy in (lambda _, x: x, negated):
        scale = lazy(torch, torch.tensor([0.05]))
        cache = make("torch", rng, k_format="int8-tensor", k_scale=scale, v_scale=scale)
        rope = ht.Rope(lazy(torch, angle.cos()), lazy(torch, angle.sin()), positions)
        cache.append(k, k, rope=rope)
        caches.append(cache)
    assert torch.equal(caches[0].pages, caches[1].pages)


def test_lazily_negated_tensors_are_saved_as_their_values(rng, torch, tmp_path):
    pytest.importorskip("safetensors")
    scale = negated(torch, torch.tensor([0.5]))
    cache = make("torch", rng, k_format="int8-tensor", k_scale=scale, v_scale=scale)
    cache.to_safetensors(tmp_path / "x")
    assert ht.PagedKVCache.from_safetensors(tmp_path / "x").k_scale.tolist() == [0.5]


def test_lazily_negated_tensors_are_not_written(rng, torch):
    cache = make("torch", rng)
    k, q = torch.from_numpy(normal(rng, 2, KV_HEADS, DIM)), torch.from_numpy(normal(rng, 2, Q_HEADS, DIM))
    cache.append(k, k)
    out, lse, back = torch.ones_like(q), torch.ones(2, Q_HEADS), torch.ones_like(k)
    for name, call in {
        "out": lambda x: ht.attend(q, cache, out=x(torch, out)),
        "lse": lambda x: ht.attend(q, cache, lse=x(torch, lse)),
        "k_out": lambda x: cache.dequantize(x(torch, back)),
        "pages": lambda x: ht.PagedKVCache.wrap(cache.spec, x(torch, back[0]), cache.block_table, cache.lengths),
        "scale_out": lambda x: ht.calibrate(k, "int8-tensor", scale_out=x(torch, torch.ones(1))),
    }.items():
        with pytest.raises(ht.InvalidArgumentError, match=f"^{name} is a lazily negated view, but is written"):
            call(negated)
    assert (out == 1).all() and (lse == 1).all() and (back == 1).all()


def test_lazily_negated_tensors_where_torch_is_not_installed():
    """What reaches the native library, from a stand-in for a tensor."""
    traits = dict(is_cpu=True, is_cuda=False, requires_grad=False, layout=_frameworks._STRIDED)
    tensor = type("Tensor", (), {"__module__": "torch", **traits, "is_neg": lambda self: True})()
    tensor.resolve_neg = lambda: types.SimpleNamespace(values="resolved", requires_grad=False)
    assert _arrays.native(tensor, "q").values == "resolved"
    with pytest.raises(ht.InvalidArgumentError, match="^out is a lazily negated view"):
        _arrays.native(tensor, "out", written=True)


def test_conjugate_tensors_are_refused(rng, torch):
    q = torch.complex(*(torch.from_numpy(normal(rng, 2, Q_HEADS, DIM)) for _ in range(2))).conj()
    k = q[:, :KV_HEADS]
    cache = make("torch", rng)
    with pytest.raises(ht.InvalidArgumentError, match="^q_dtype is 'complex64'"):
        ht.attend(q, cache)
    with pytest.raises(ht.InvalidArgumentError, match="^k.dtype"):
        cache.append(k, k)
    assert cache.host_lengths == [0, 0]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_views_that_repeat_memory_are_read_as_their_values(rng, framework):
    """Strides of 0 between tokens or heads; between dims they are refused."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        wrap, repeat, copy = torch.from_numpy, lambda x, *shape: x.expand(shape), lambda x: x.contiguous()
    else:
        wrap, copy = np.asarray, np.ascontiguousarray

        def repeat(x, *shape):  # writable, unlike what broadcast_to() gives, which is copied
            strides = [0 if n == 1 else s for n, s in zip(x.shape, x.strides)]
            return np.lib.stride_tricks.as_strided(x, shape, strides)

    cache, twin = make(framework, rng), make(framework, rng)
    token, head, one = (wrap(normal(rng, *s)) for s in ((1, KV_HEADS, DIM), (60, 1, DIM), (1, 1, DIM)))
    slots = wrap(np.arange(60))
    for x in (token, head, one):
        view = repeat(x, 60, KV_HEADS, DIM)
        for each, k in ((cache, view), (twin, copy(view))):
            if x is token:
                each.append(k, k, [10, 50])
            else:
                each.append_slots(k, k, slots)
        query = wrap(normal(rng, 1, 1, DIM))
    view = repeat(query, 2, Q_HEADS, DIM)
    same = np.testing.assert_array_equal
    same(ht.attend(view, cache), ht.attend(copy(view), cache))
    plain = repeat(head, 60, KV_HEADS, DIM)
    same(ht.attend(view, k=plain, v=plain), ht.attend(copy(view), k=copy(plain), v=copy(plain)))

    dims = repeat(wrap(normal(rng, 2, Q_HEADS, 1)), 2, Q_HEADS, DIM)
    target, counts = wrap(normal(rng, 1, Q_HEADS, DIM)), wrap(np.array([5], np.int32))
    for call, match in [
        (lambda: ht.attend(dims, cache), "^q has stride 0 in dimension 2"),
        (lambda: cache.append(dims[:, :KV_HEADS], dims[:, :KV_HEADS]), "^k has stride 0 in dimension 2"),
        (lambda: ht.attend(view, cache, out=repeat(target, 2, Q_HEADS, DIM)), "^out has stride 0 in dimension 0"),
        (lambda: ht.schedule(ht.plan(cache, q_heads=Q_HEADS), repeat(counts, 2)), "^kv_lengths has stride 0"),
        (lambda: cache.dequantize(repeat(target[:, :KV_HEADS], 60, KV_HEADS, DIM)), "^k_out has stride 0"),
        (
            lambda: ht.PagedKVCache.wrap(cache.spec, cache.pages, cache.block_table, repeat(counts, 2)).dequantize(),
            "lengths has stride 0",
        ),
    ]:
        with pytest.raises(ht.InvalidArgumentError, match=match):
            call()


@pytest.mark.parametrize("layout", ["sparse", "csr", "mkldnn", "jagged"])
def test_tensors_that_are_no_dense_memory_are_refused(rng, torch, layout):
    import halftone.torch as hot

    def sparse(x):
        if layout == "jagged":
            return torch.nested.nested_tensor(list(x), layout=torch.jagged)
        return {"sparse": x.to_sparse, "csr": x.to_sparse_csr, "mkldnn": x.to_mkldnn}[layout]()

    cache = make("torch", rng)
    k, q = torch.from_numpy(normal(rng, 2, KV_HEADS, DIM)), torch.from_numpy(normal(rng, 2, Q_HEADS, DIM))
    cache.append(k, k)
    step = hot.Step(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"))
    hot.schedule(step, cache)
    for name, call in {
        "q": lambda: ht.attend(sparse(q), cache),
        "k": lambda: cache.append(sparse(k), k),
        "v": lambda: cache.append(k, sparse(k)),
        "out": lambda: ht.attend(q, cache, out=sparse(q)),
        "sinks": lambda: ht.attend(q, cache, sinks=sparse(q)),
        "x": lambda: ht.calibrate(sparse(k), "int8-tensor"),
        r"parts\[0\]": lambda: ht.merge([sparse(q)], [q[..., 0]]),
    }.items():
        with pytest.raises(ht.InvalidArgumentError, match=rf"^{name} has layout torch.*: pass {name}.to_dense\(\)"):
            call()
    for name, call in {
        "q": lambda: hot.attend(sparse(q), cache, step),
        "out": lambda: hot.attend(q, cache, step, out=sparse(q)),
        "k": lambda: hot.append(cache, sparse(k), sparse(k)),
    }.items():
        with pytest.raises(ht.InvalidArgumentError, match=f"^{name} has layout torch"):
            call()
    assert cache.host_lengths == cache.lengths.tolist() == [1, 1]
