"""halftone.torch calls the library directly where nobody looks, and is torch's operators for everybody who does."""

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, normal

import halftone as ht

torch = pytest.importorskip("torch")

import halftone.torch as hot  # noqa: E402

OPERATORS = ["append", "schedule", "attend_out"]


class Decode:
    """A cache of two requests and one decode step over it."""

    def __init__(self, seed=3):
        rng = np.random.default_rng(seed)
        self.cache = ht.PagedKVCache(2, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-head", framework="torch")
        old = torch.from_numpy(normal(rng, 60, KV_HEADS, DIM))
        self.cache.append(old, old, [20, 40])
        self.cache.reserve(8)
        self.step = hot.Step(ht.plan(self.cache, q_heads=Q_HEADS, q_dtype="f32", lse=True))
        self.q, self.k = (torch.from_numpy(normal(rng, 2, heads, DIM)) for heads in (Q_HEADS, KV_HEADS))

    def __call__(self, q, k):
        hot.append(self.cache, k, k)
        hot.schedule(self.step, self.cache)
        return hot.attend(q, self.cache, self.step)

    def expected(self):
        """What one step gives, from halftone's own functions."""
        twin = Decode()
        twin.cache.append(twin.k, twin.k)
        return ht.attend(twin.q, twin.cache, lse=True)


class DecodeInOneCall(Decode):
    """The same step, whose attention appends."""

    def __init__(self):
        super().__init__()
        self.step = hot.Step(ht.plan(self.cache, q_heads=Q_HEADS, q_dtype="f32", lse=True, appends=True))

    def __call__(self, q, k):
        hot.schedule(self.step, self.cache)
        return hot.attend(q, self.cache, self.step, k=k, v=k)


def same(got, expected):
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=0, atol=0)


@pytest.fixture
def decode():
    return Decode()


@pytest.fixture
def called(monkeypatch):
    """The operators called, in order."""
    names = []

    def recorded(name, operator):
        def call(*arguments):
            names.append(name)
            return operator(*arguments)

        return staticmethod(call)

    for name in (*OPERATORS, "attend", "attend_appending"):
        monkeypatch.setattr(hot._ops, name, recorded(name, getattr(hot._ops, name)))
    return names


def test_a_lazily_negated_query_is_read_as_its_values():
    decode = Decode()
    lazy = torch.complex(decode.q, -decode.q).conj().imag  # memory holds -q
    assert lazy.is_neg() and torch.equal(lazy, decode.q)
    same(decode(lazy, decode.k), decode.expected())


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_eager_code_needs_no_dispatcher(decode, called, context):
    with context():
        same(decode(decode.q, decode.k), decode.expected())
    assert called == []


def test_what_is_no_plain_tensor_takes_the_dispatcher(decode, called):
    class Mine(torch.Tensor):
        pass

    same(decode(decode.q.as_subclass(Mine), decode.k.as_subclass(Mine)), decode.expected())
    assert called == ["append", "attend_out"]  # schedule() has no tensor of the caller's
    called.clear()
    out, _ = hot.attend(decode.q.requires_grad_(), decode.cache, decode.step)
    assert called == ["attend_out"]
    with pytest.raises(RuntimeError, match="grad"):
        out.sum().backward()


def test_a_dispatch_mode_sees_the_operators(decode):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "halftone":
                seen.append(function._opname)
            return function(*args, **(kwargs or {}))

    with Log():
        same(decode(decode.q, decode.k), decode.expected())
    assert seen == OPERATORS
    hot.schedule(decode.step, decode.cache)
    assert seen == OPERATORS  # the mode is gone


@pytest.mark.parametrize("options", [{}, {"tracing_mode": "fake"}, {"pre_dispatch": True}])
def test_make_fx_records_the_operators(decode, options):
    from torch.fx.experimental.proxy_tensor import make_fx

    lengths, pages = decode.cache.lengths.clone(), decode.cache.pages.clone()
    if "tracing_mode" in options:
        options = {**options, "_allow_non_fake_inputs": True}
    graph = make_fx(decode, **options)(decode.q, decode.k)
    recorded = [str(node.target).split(".")[1] for node in graph.graph.nodes if "halftone" in str(node.target)]
    assert recorded == OPERATORS
    decode.cache.lengths.copy_(lengths)
    decode.cache.pages.copy_(pages)
    same(graph(decode.q, decode.k), decode.expected())


def test_fake_tensors_compute_nothing(decode):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    lengths, pages = decode.cache.lengths.clone(), decode.cache.pages.clone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out, lse = decode(mode.from_tensor(decode.q), mode.from_tensor(decode.k))
    assert isinstance(out, FakeTensor) and out.shape == decode.q.shape and lse.shape == decode.q.shape[:2]
    assert torch.equal(decode.cache.lengths, lengths) and torch.equal(decode.cache.pages, pages)


@pytest.mark.parametrize("strict", [False, True])
def test_export_records_the_operators(decode, strict):
    class Module(torch.nn.Module):
        def forward(self, q):
            return hot.attend(q, decode.cache, decode.step)

    hot.schedule(decode.step, decode.cache)
    program = torch.export.export(Module(), (decode.q,), strict=strict)
    assert "torch.ops.halftone.attend.default" in program.graph_module.code
    q = decode.q * 2
    same(program.module()(q), ht.attend(q, decode.cache, lse=True))


def test_vmap_is_refused_as_by_the_operators(decode):
    hot.schedule(decode.step, decode.cache)
    with pytest.raises(RuntimeError, match="halftone::"):
        torch.func.vmap(lambda q: hot.attend(q, decode.cache, decode.step)[0])(decode.q[None])


def test_compiled_with_fullgraph(decode):
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    same(compiled(decode.q, decode.k), decode.expected())


@pytest.mark.parametrize("compiled_with", ["eager", "aot_eager"])
def test_a_cache_made_within_a_compiled_function_breaks_the_graph(decode, compiled_with):
    def plain(q, k):
        cache = ht.PagedKVCache(2, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-head", framework="torch")
        cache.append(k, k)
        view = ht.PagedKVCache.wrap(cache.spec, cache.pages, cache.block_table, cache.lengths)
        return ht.attend(q, view) * 2

    def operators(q, k):
        cache = ht.PagedKVCache(2, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-head", framework="torch")
        cache.reserve(1)
        hot.append(cache, k, k)
        cache.advance()
        step = hot.Step(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"))
        hot.schedule(step, cache)
        return hot.attend(q, cache, step) * 2

    for function in (plain, operators):
        torch.compiler.reset()
        got = torch.compile(function, backend=compiled_with)(decode.q, decode.k)
        torch.testing.assert_close(got, function(decode.q, decode.k), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["direct", "operators", "make_fx", "compiled"])
def test_attention_that_appends(called, way):
    decode, twin = DecodeInOneCall(), Decode()
    step, (q, k) = decode, (decode.q, decode.k)
    if way == "compiled":
        step = torch.compile(decode, fullgraph=True, backend="aot_eager")
    elif way == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        before = decode.cache.lengths.clone()
        step = make_fx(decode)(q, k)
        recorded = [str(node.target).split(".")[1] for node in step.graph.nodes if "halftone" in str(node.target)]
        assert recorded == ["schedule", "attend_appending"]
        decode.cache.lengths.copy_(before)
    elif way == "operators":
        q = torch.nn.Parameter(q)  # whom autograd follows
    for _ in range(3):
        with torch.no_grad():
            got = step(q, k)
        decode.cache.advance()
        twin.cache.append(twin.k, twin.k)
        same(got, ht.attend(twin.q, twin.cache, lse=True))
    assert torch.equal(decode.cache.pages, twin.cache.pages)
    assert decode.cache.host_lengths == twin.cache.host_lengths == decode.cache.lengths.tolist()
    if way in ("direct", "operators"):
        assert called == ([] if way == "direct" else ["attend_appending"] * 3)


def test_refusals_of_attention_that_appends():
    decode = DecodeInOneCall()
    with pytest.raises(ht.InvalidArgumentError, match="^kv_lengths is given beside k"):
        hot.attend(decode.q, decode.cache, decode.step, k=decode.k, v=decode.k, kv_lengths=decode.cache.lengths)
    decode.cache.fork(0, 1)
    with pytest.raises(ht.InvalidArgumentError, match="a page that it shares.* call it before"):
        decode(decode.q, decode.k)
    with pytest.raises(ht.InvalidArgumentError, match="^k of append is absent"):
        hot.attend(decode.q, decode.cache, decode.step)
