"""Layers that share a pool, a block table and lengths: the bytes of caches that each have their own."""

import copy
import pickle

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, normal

import halftone as ht
from halftone import _arrays, _native

FORMATS = ["int8-head", ("int8-g32", "int4-g32"), "bf16"]
GEOMETRY = dict(kv_heads=KV_HEADS, head_dim=DIM, page_size=16)


@pytest.fixture(params=["numpy", "torch"])
def framework(request):
    pytest.importorskip(request.param)
    return request.param


def array(framework, x):
    return x if framework == "numpy" else pytest.importorskip("torch").from_numpy(x)


class Model:
    """A cache of three layers, and for each layer a cache of its own to which the same is done."""

    def __init__(self, rng, framework="numpy", batch=3, **options):
        self.rng, self.framework = rng, framework
        self.cache = ht.LayeredKVCache(batch, 128, layers=FORMATS, framework=framework, **GEOMETRY, **options)
        pairs = [f if isinstance(f, tuple) else (f, f) for f in FORMATS]
        self.alone = [ht.PagedKVCache(batch, 128, k_format=k, v_format=v, **GEOMETRY) for k, v in pairs]

    def tokens(self, count):
        return [normal(self.rng, count, KV_HEADS, DIM) for _ in range(2)]

    def append(self, counts, given="counts", layers=(0, 2, 1)):
        for i in layers:
            k, v = self.tokens(sum(counts))
            sums = array(self.framework, np.cumsum([0, *counts], dtype=np.int32))
            options = {"counts": dict(counts=counts), "sums": dict(cu_seqlens=sums), "none": {}}[given]
            tokens = (array(self.framework, x) for x in (k, v))
            self.cache.layer(i).append(*tokens, **(options if i == 0 or given != "counts" else {}))
            self.alone[i].append(k, v, counts)
            assert self.cache.host_lengths == self.alone[i].host_lengths == _arrays.to_list(self.cache.lengths)

    def do(self, call):
        for cache in (self.cache, *self.alone):
            call(cache)

    def check(self, cache=None):
        cache = self.cache if cache is None else cache
        q = normal(self.rng, cache.batch, Q_HEADS, DIM)
        for i, alone in enumerate(self.alone):
            layer = cache.layer(i)
            for ours, theirs in zip(layer.dequantize(), alone.dequantize()):
                np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(ht.attend(array(self.framework, q), layer), ht.attend(q, alone))
            assert layer.lengths is cache.lengths and layer.block_table is cache.block_table


def test_layers_have_the_bytes_of_caches_of_their_own(rng, framework):
    model = Model(rng, framework)
    model.append([30, 5, 0])
    model.append([1, 1, 1], "none")
    model.append([0, 20, 3], "sums")
    model.check()
    model.do(lambda c: c.fork(1, [0, 2]))
    model.append([1, 1, 1], "none")
    model.do(lambda c: c.reorder([2, 0, 0]))
    model.append([2, 0, 7])
    model.check()
    model.do(lambda c: c.truncate([20, 3, 29]))
    model.append([1, 1, 1], "none")
    model.do(lambda c: c.resize(4))
    model.append([9, 1, 0, 4])
    model.append([1, 1, 1, 1], "none")
    model.do(lambda c: c.free(2))
    model.check()
    assert model.cache.free_pages == model.alone[0].free_pages


def test_a_step_counts_once_and_one_schedule_serves_its_layers(rng):
    cache = ht.LayeredKVCache(2, 64, layers=4, k_format="int8-head", **GEOMETRY)
    plan = ht.plan(cache.layer(0), q_heads=Q_HEADS, q_dtype="f32")
    for step in range(3):
        schedule = None
        for i in range(4):
            k, q = normal(rng, 2, KV_HEADS, DIM), normal(rng, 2, Q_HEADS, DIM)
            cache.layer(i).append(k, k)
            schedule = ht.schedule(plan, cache) if schedule is None else schedule
            ht.attend(q, cache.layer(i), schedule=schedule)
            assert cache.lengths.tolist() == [step + 1] * 2 == cache.host_lengths
    assert [len(cache.layer(i).dequantize()[0]) for i in range(4)] == [6] * 4


def test_layers_out_of_turn(rng):
    model = Model(rng)
    k, _ = model.tokens(3)
    layer = model.cache.layer
    with pytest.raises(ht.InvalidArgumentError, match="^append.. to layer 1 comes before layer 0 has begun a step"):
        layer(1).append(k, k)
    model.append([1, 1, 1], layers=[0, 1])
    pages = [layer(i).pages.copy() for i in range(3)]
    for call, match in [
        (lambda: layer(0).append(k, k), r"^append\(\) to layer 0 is called before layers 2 have appended"),
        (lambda: layer(1).append(k, k), "^append.. to layer 1 comes before"),
        (lambda: layer(2).append(k[:2], k[:2]), "^k has 2 tokens, but layer 0 began the step with 3"),
        (lambda: layer(2).append(k, k, [3, 0, 0]), r"^counts is \[3, 0, 0\], but layer 0 .* \[1, 1, 1\]"),
        (lambda: model.cache.fork(0, 1), r"^fork\(\) is called before layers 2 have"),
        (lambda: model.cache.reorder([0, 1, 2]), "^reorder"),
        (lambda: model.cache.free(0), "^free"),
        (lambda: model.cache.resize(2), "^resize"),
        (lambda: model.cache.advance(), "^advance"),
        (lambda: pickle.dumps(model.cache), "^pickle"),
        (lambda: model.cache.truncate(1), r"^lengths\[0\] is 1, but layers 2 have 0 tokens"),
        (lambda: layer(2).append(k * np.nan, k), "^k"),
    ]:
        with pytest.raises(ht.InvalidArgumentError, match=match):
            call()
    for i in range(3):
        np.testing.assert_array_equal(layer(i).pages, pages[i])
    twin = model.cache.clone()  # in the midst of a step
    model.append([1, 1, 1], layers=[2])
    model.check()
    twin.truncate(0)
    twin.layer(0).append(k, k)
    assert twin.host_lengths == [1, 1, 1]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("advanced", [False, True])
def test_an_interrupted_append_has_begun_a_step_or_not(rng, monkeypatch, advanced, behind):
    model = Model(rng)
    model.append([3, 1, 2])
    k, _ = model.tokens(3)
    real = _native.append

    def interrupted(*arguments):
        if advanced:
            real(*arguments)
        raise KeyboardInterrupt

    model.cache._sequences.is_behind = behind
    monkeypatch.setattr(_native, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.cache.layer(0).append(k, k)
    monkeypatch.undo()
    if advanced:
        model.alone[0].append(k, k)
        model.append([1, 1, 1], layers=[1, 2], given="none")
    model.append([1, 0, 4])
    model.check()


def test_operations_are_for_all_layers_at_once(rng):
    cache = Model(rng).cache
    layer = cache.layer(1)
    for name, arguments in dict(free=(0,), fork=(0, 1), reorder=([0, 1, 2],), truncate=(0,), reserve=(1,), resize=(2,),
                                evict_before=(0,), advance=()).items():  # fmt: skip
        with pytest.raises(ht.InvalidArgumentError, match=f"^{name}.* for all layers at once, but this is layer 1"):
            getattr(layer, name)(*arguments)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ht.InvalidArgumentError, match="^this is layer 1 of a cache.* copy the LayeredKVCache"):
            copied(layer)
    with pytest.raises(ht.OutOfRangeError, match="^index is 3, but the cache has 3 layers"):
        cache.layer(3)
    with pytest.raises(ht.InvalidArgumentError, match="^cache is a LayeredKVCache"):
        ht.attend(normal(rng, 3, Q_HEADS, DIM), cache)
    with pytest.raises(ht.UnsupportedError, match="^a LayeredKVCache cannot be copied without its pages"):
        copy.copy(cache)
    with pytest.raises(ht.InvalidArgumentError, match="^lengths of a LayeredKVCache cannot be assigned"):
        cache.lengths = None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_all_layers(rng, framework, copied):
    model = Model(rng, framework)
    model.append([30, 5, 40])
    model.do(lambda c: c.fork(2, 0))
    twin = copied(model.cache)
    model.check(twin)
    assert twin.free_pages == model.cache.free_pages and twin.lengths is not model.cache.lengths
    assert repr(twin) == repr(model.cache)
    k = array(framework, model.tokens(3)[0])
    for i in range(3):
        twin.layer(i).append(k, k)
    model.check()


def test_pages_are_copied_in_every_layer_and_counted_once(rng, monkeypatch):
    model, copied = Model(rng), []
    copy_rows = _arrays.copy_rows
    monkeypatch.setattr(_arrays, "copy_rows", lambda x, c: (copied.append((len(x), len(c))), copy_rows(x, c))[1])
    model.append([20, 0, 0])
    model.cache.fork(0, [1, 2])
    for i in range(3):
        model.cache.layer(i).append(*model.tokens(3))
    assert copied == [(3, 2)]


def test_scales_of_layers(rng):
    one, two = (np.array([x], np.float32) for x in (0.05, 0.02))
    options = dict(layers=["int8-tensor", "bf16", "int8-tensor"], **GEOMETRY)
    scales = [one, None, two]
    cache = ht.LayeredKVCache(1, 64, k_scale=scales, v_scale=scales, **options)
    x = normal(rng, 5, KV_HEADS, DIM) / 8
    for i in range(3):
        cache.layer(i).append(x, x)
    assert cache.layer(0).k_scale is one and cache.layer(1).k_scale is None and cache.layer(2).k_scale is two
    np.testing.assert_array_equal(cache.layer(2).dequantize()[0], np.clip(np.round(x / two), -127, 127) * two)
    again = pickle.loads(pickle.dumps(cache))
    np.testing.assert_array_equal(again.layer(2).k_scale, two)
    with pytest.raises(ht.InvalidArgumentError, match="^k_scale has 2 entries, but the cache has 3 layers"):
        ht.LayeredKVCache(1, 64, k_scale=[one, one], **options)


@pytest.mark.parametrize(
    "layers, match",
    [
        (0, "^layers is 0"), (None, "^layers is None"), ("int8-head", "^layers is 'int8-head'"), ([], "^layers has 0"),
        (["int8-nothing"], "int8-nothing"), (True, "^layers is True"),
        ([ht.KVCacheSpec(2, 128), "bf16"], r"^layers\[1\] has pages of 16 tokens, but layers\[0\] of 64"),
    ],
)  # fmt: skip
def test_layers_that_are_none(layers, match):
    with pytest.raises(ht.InvalidArgumentError, match=match):
        ht.LayeredKVCache(1, 64, layers=layers, **GEOMETRY)


def test_torch_operators_of_layers(rng):
    torch = pytest.importorskip("torch")
    import halftone.torch as hot

    model = Model(rng, "torch")
    model.append([20, 3, 0])
    model.cache.fork(0, [2])
    k = torch.from_numpy(normal(rng, 3, KV_HEADS, DIM))
    with pytest.raises(ht.InvalidArgumentError, match="a page that it shares.* call it before"):
        hot.append(model.cache.layer(0), k, k)
    model.alone[0].fork(0, 2), model.alone[1].fork(0, 2), model.alone[2].fork(0, 2)
    model.cache.reserve(8)

    def step(x):
        for i in range(3):
            hot.append(model.cache.layer(i), x, x)

    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        k = torch.from_numpy(normal(rng, 3, KV_HEADS, DIM))
        run(k)
        model.cache.advance()
        for alone in model.alone:
            alone.append(k.numpy(), k.numpy())
        model.check()
