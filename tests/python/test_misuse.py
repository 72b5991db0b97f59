"""Misuse from Python: every error is of the right class, names the argument, and leaves outputs untouched."""

import re
import types

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, filled_cache, normal

import halftone as ht
from halftone import _arrays


@pytest.fixture
def cache(rng):
    return filled_cache(rng, [40, 64], max_len=64)[0]


@pytest.fixture
def q(rng):
    return normal(rng, 2, Q_HEADS, DIM)


def test_the_classes_are_pythons_too():
    for ours, pythons in {
        ht.InvalidArgumentError: ValueError,
        ht.UnsupportedError: NotImplementedError,
        ht.OutOfRangeError: ValueError,
        ht.CorruptFileError: ValueError,
        ht.ResourceExhaustedError: RuntimeError,
        ht.DeviceError: RuntimeError,
        ht.InternalError: RuntimeError,
    }.items():
        assert issubclass(ours, pythons) and issubclass(ours, ht.Error)


@pytest.mark.parametrize("value", [None, "text", 3, [1.0], {"a": 1}, object()])
def test_what_is_no_array(cache, q, value):
    k = np.zeros((2, KV_HEADS, DIM), np.float32)
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    plan = step.plan
    with pytest.raises(ht.InvalidArgumentError, match="^q "):
        ht.attend(value, cache)
    with pytest.raises(ht.InvalidArgumentError, match="^q "):
        ht.attend(value, cache, schedule=step)
    with pytest.raises(ht.InvalidArgumentError, match="^k "):
        cache.append(value, k, [2, 0])
    with pytest.raises(ht.InvalidArgumentError, match="^v "):
        cache.append(k, value, [2, 0])
    with pytest.raises(ht.InvalidArgumentError, match="^kv_lengths"):
        ht.schedule(plan, value, workspace=step.workspace)
    with pytest.raises(ht.InvalidArgumentError, match="^pages"):
        ht.PagedKVCache.wrap(cache.spec, value, cache.block_table, cache.lengths)
    if value is not None:
        with pytest.raises(ht.InvalidArgumentError, match="^out "):
            ht.attend(q, cache, out=value)


@pytest.mark.parametrize("dim, nearest", [(1, "64"), (7, "64"), (59, "64"), (257, "256")])
def test_head_dims_name_the_nearest(dim, nearest):
    with pytest.raises(ht.InvalidArgumentError, match=f"head_dim is {dim}, .*use {nearest}"):
        ht.KVCacheSpec(2, dim)


@pytest.mark.parametrize("size", [0, 1, 48, 512, -16])
def test_page_sizes(size):
    with pytest.raises(ht.InvalidArgumentError, match=f"page_size is {size}"):
        ht.KVCacheSpec(2, 128, page_size=size)


def test_partial_groups():
    with pytest.raises(ht.Error, match="k_format"):
        ht.KVCacheSpec(2, 80, "int4-g32")


@pytest.mark.parametrize("value", [2.5, "8", None, True, 2**31])
def test_numbers(value, cache):
    with pytest.raises(ht.InvalidArgumentError, match="^q_heads is"):
        ht.plan(cache, q_heads=value)
    with pytest.raises(ht.InvalidArgumentError, match="^kv_heads is"):
        ht.KVCacheSpec(value, 128)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"q_heads": 7}, "q_heads is 7"),
        ({"causal": 1}, "causal is 1"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "x"}, "scale is 'x'"),
        ({"scale": 0.0}, "scale is 0.0, .* or None"),
        ({"scale": -0.5}, "scale is -0.5"),
        ({"scale": 2.0**-150}, "scale is 7.0"),
        ({"scale": 1e39}, "scale is 1e.39"),
        ({"scale": 10**400}, "scale is too large"),
        ({"softcap": 1e-60}, "softcap is 1e-60, .* or 0 for none"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"policy": "lucky"}, "policy is 'lucky'"),
        ({"q_dtype": "f64"}, "q_dtype is 'f64'"),
        ({"workers": -1}, "workers"),
        ({"window_left": -2}, "window_left"),
        ({"softcap": -1.0}, "softcap"),
        ({"device": "tpu:0"}, "device is 'tpu:0'"),
        ({"device": "cuda:\u00b2"}, "device is 'cuda:\u00b2'"),
        ({"device": "cuda:99999999999"}, "31 bits"),
        ({"policy": ["fast"]}, "policy is"),
        ({"max_q_len": -1}, "max_q_len"),
    ],
)
def test_plans(cache, options, match):
    with pytest.raises(ht.InvalidArgumentError, match=match):
        ht.plan(cache, **{"q_heads": Q_HEADS, **options})


def test_a_gpu_that_is_not_there(cache):
    if ht.has_cuda:
        pytest.skip("this build has the CUDA backend")
    with pytest.raises(ht.UnsupportedError, match="no CUDA"):
        ht.plan(cache, q_heads=Q_HEADS, device="cuda:0")
    with pytest.raises(ht.InvalidArgumentError, match="NumPy arrays live on the CPU"):
        ht.PagedKVCache(1, 64, kv_heads=2, head_dim=128, device="cuda:0")


def test_dtypes_shapes_and_ranks(cache, q):
    out = np.full_like(q, np.nan)
    for bad, match in [
        (q.astype("f8"), "float64"),
        (q[:, :, :64], "q"),
        (q[0], "q is of shape"),
        (q[:1], "q"),
        (q[:, :5], "q_heads is 5"),
        (q[:, :, ::-1], "q"),
    ]:
        with pytest.raises(ht.InvalidArgumentError, match=match):
            ht.attend(bad, cache, out=out)
    for bad in (out[:1], out.astype("f2"), out[:, :, :64], out[..., None]):
        with pytest.raises(ht.InvalidArgumentError, match="out"):
            ht.attend(q, cache, out=bad)
    assert np.isnan(out).all()
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    with pytest.raises(ht.InvalidArgumentError, match="out.ndim is 6"):
        ht.attend(q, cache, schedule=step, out=out[None, None, None])
    with pytest.raises(ht.InvalidArgumentError, match="q.dtype is uint16"):
        ht.attend(q.view("u2"), cache, schedule=step)


def test_outputs_that_cannot_be_written(cache, q):
    with pytest.raises(ht.InvalidArgumentError, match="out overlaps q"):
        ht.attend(q, cache, out=q)
    frozen = np.empty_like(q)
    frozen.flags.writeable = False
    with pytest.raises(ht.InvalidArgumentError, match="out is a read-only array"):
        ht.attend(q, cache, out=frozen)


def test_misaligned_memory(cache, q):
    raw = np.zeros(q.nbytes + 16, np.uint8)
    bad = raw[1 : 1 + q.nbytes].view(np.float32).reshape(q.shape)
    with pytest.raises(ht.InvalidArgumentError, match="q"):
        ht.attend(bad, cache)
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    with pytest.raises(ht.InvalidArgumentError, match="workspace starts 8 bytes past"):
        import tvm_ffi

        memory = np.from_dlpack(tvm_ffi.from_dlpack(step.workspace))
        big = np.zeros(memory.size + 512, np.uint8)
        start = -big.ctypes.data % 256 + 8
        ht.schedule(step.plan, cache, workspace=big[start : start + memory.size])


def test_a_workspace_one_byte_short(cache):
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32")
    big = np.zeros(plan.workspace_bytes + 256, np.uint8)
    start = -big.ctypes.data % 256
    ht.schedule(plan, cache, workspace=big[start : start + plan.workspace_bytes])
    with pytest.raises(ht.ResourceExhaustedError, match=f"needs {plan.workspace_bytes}"):
        ht.schedule(plan, cache, workspace=big[start : start + plan.workspace_bytes - 1])


def test_a_full_cache_keeps_its_bytes(cache, rng):
    before = cache.pages.copy()
    k = normal(rng, 2, KV_HEADS, DIM)
    with pytest.raises(ht.OutOfRangeError, match="request 1 would have 65 tokens, but max_len is 64"):
        cache.append(k, k)
    np.testing.assert_array_equal(cache.pages, before)
    assert cache.host_lengths == [40, 64]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_input_is_refused(cache, rng, bad):
    before, k = cache.pages.copy(), normal(rng, 2, KV_HEADS, DIM)
    k[1, 0, 5] = bad
    for pair in ((k, normal(rng, 2, KV_HEADS, DIM)), (normal(rng, 2, KV_HEADS, DIM), k)):
        with pytest.raises(ht.InvalidArgumentError, match=r"\[1, 0, 5\]"):
            cache.append(*pair, [2, 0])
    np.testing.assert_array_equal(cache.pages, before)
    assert cache.host_lengths == [40, 64] == cache.lengths.tolist()


def test_counts(cache, rng):
    k = normal(rng, 3, KV_HEADS, DIM)
    for counts, error in [(None, "counts is None"), ([3], "has 1 entries"), ([4, -1], "counts.1. is -1"),
                          ([1, 1], "add up to 2"), ([1.5, 1.5], "counts.0. is 1.5")]:  # fmt: skip
        with pytest.raises(ht.InvalidArgumentError, match=error):
            cache.append(k, k, counts)


def test_slots(cache, rng):
    k = normal(rng, 2, KV_HEADS, DIM)
    with pytest.raises(ht.InvalidArgumentError, match="slot"):
        cache.append_slots(k, k, np.array([3, 3], np.int64))
    with pytest.raises(ht.OutOfRangeError, match="slot"):
        cache.append_slots(k, k, np.array([3, 10**9], np.int64))
    before = cache.pages.copy()
    cache.append_slots(k, k, np.array([-1, -1], np.int64))
    np.testing.assert_array_equal(cache.pages, before)


def test_block_tables(rng, q):
    source, _, _ = filled_cache(rng, [40, 64], max_len=128)
    clean = ht.attend(q, source)
    for dead in (2**31 - 1, -1, 12345):
        table = source.block_table.copy()
        table[:, 1] = dead
        view = ht.PagedKVCache.wrap(source.spec, source.pages, table, source.lengths)
        np.testing.assert_array_equal(ht.attend(q, view), clean)
    table[1, 0] = 99
    view = ht.PagedKVCache.wrap(source.spec, source.pages, table, source.lengths)
    with pytest.raises(ht.OutOfRangeError, match="99"):
        ht.attend(q, view)
    view = ht.PagedKVCache.wrap(source.spec, source.pages, table, source.lengths, clamped=True)
    out = ht.attend(q, view)
    np.testing.assert_array_equal(out[0], clean[0])
    assert not out[1].any() and view.status.tolist() == [1]
    with pytest.raises(ht.InvalidArgumentError, match="block-table entry"):
        view.check_status()
    view.check_status()


def test_unused_slots_do_not_matter(rng, q):
    cache, _, _ = filled_cache(rng, [40, 63], k_format="bf16")
    clean = ht.attend(q, cache)
    view = cache.pages.view(np.uint16)
    live = np.zeros_like(view, bool)
    marks = ht.PagedKVCache.wrap(cache.spec, np.zeros_like(cache.pages), cache.block_table, cache.lengths * 0)
    ones = np.full((103, KV_HEADS, DIM), -1.0, np.float32)
    marks.append(ones, ones, [40, 63])
    live = marks.pages.view(np.uint16) != 0
    view[~live] = 0x7FC0  # NaN
    np.testing.assert_array_equal(ht.attend(q, cache), clean)


def test_lengths_beyond_the_plan(cache):
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32")
    with pytest.raises(ht.OutOfRangeError, match=r"kv_lengths\[0\] is 65"):
        ht.schedule(plan, np.array([65, 1], np.int32))
    with pytest.raises(ht.OutOfRangeError, match=r"kv_lengths\[1\] is -1"):
        ht.schedule(plan, np.array([1, -1], np.int32))
    with pytest.raises(ht.InvalidArgumentError, match="cu_q"):
        ht.schedule(plan, cache, cu_q=np.array([0, 1, 0], np.int32))


def test_options_are_honoured_or_refused(cache, q):
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    with pytest.raises(ht.InvalidArgumentError, match="causal is given, but the schedule"):
        ht.attend(q, cache, schedule=step, causal=True)
    with pytest.raises(ht.InvalidArgumentError, match="sinks"):
        ht.attend(q, cache, schedule=step, sinks=np.zeros(Q_HEADS, np.float32))
    with pytest.raises(ht.InvalidArgumentError, match="lse"):
        ht.attend(q, cache, schedule=step, lse=True)
    with pytest.raises(ht.InvalidArgumentError, match="schedule is a Plan"):
        ht.attend(q, cache, schedule=step.plan)
    with pytest.raises(ht.InvalidArgumentError, match="cache is a tuple"):
        ht.attend(q, (cache,))
    with pytest.raises(ht.InvalidArgumentError, match="beside cache"):
        ht.attend(q, cache, k=q, v=q)
    with pytest.raises(ht.InvalidArgumentError, match="parts is empty"):
        ht.merge([], [])


def test_another_caches_schedule(rng, cache, q):
    other, _, _ = filled_cache(rng, [40, 64], max_len=64, k_format="int4-g32")
    step = ht.schedule(ht.plan(other, q_heads=Q_HEADS, q_dtype="f32"), other)
    with pytest.raises(ht.InvalidArgumentError, match="spec|format"):
        ht.attend(q, cache, schedule=step)
    memory = np.zeros(step.plan.workspace_bytes + 256, np.uint8)
    aligned = memory[-memory.ctypes.data % 256 :]
    first = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache, workspace=aligned)
    ht.schedule(step.plan, other, workspace=aligned)
    with pytest.raises(ht.InvalidArgumentError, match="workspace"):
        ht.attend(q, cache, schedule=first)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_static_scales(rng, scale):
    x = normal(rng, 4, KV_HEADS, DIM)
    scales = dict(k_scale=np.array([scale], np.float32), v_scale=np.ones(1, np.float32))
    cache = ht.PagedKVCache(1, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-tensor", **scales)
    with pytest.raises(ht.InvalidArgumentError, match="k_scale"):
        cache.append(x, x)
    bare = ht.PagedKVCache(1, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-tensor")
    with pytest.raises(ht.InvalidArgumentError, match="k_scale"):
        bare.append(x, x)


def arange(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda c, q: ht.attend(q, c, cu_q=3), "^cu_q is a int"),
        (lambda c, q: ht.attend(q, c, cu_q=np.array(3)), r"^cu_q is of shape \(\)"),
        (lambda c, q: ht.attend(q, c, cu_kv=arange(0, 40, 104)), "^cu_kv is given beside cache"),
        (lambda c, q: ht.attend(q, k=3, v=3), "^k is a int"),
        (lambda c, q: ht.attend(q, k=q, v=q[0]), r"^v is of shape \(8, 128\)"),
        (lambda c, q: ht.attend(q, k=q, v=q, cu_kv=2), "^cu_kv is a int"),
        (lambda c, q: ht.attend(q, c, stream="x"), "^stream is 'x'"),
        (lambda c, q: ht.attend(q, c, stream=True), "^stream is True"),
        (lambda c, q: ht.attend(q, c, stream=2**80), "^stream is"),
        (lambda c, q: ht.attend(q, c, lse=None), "^lse is None"),
        (lambda c, q: ht.attend(q, c, lse="x"), "^lse is a str"),
        (lambda c, q: ht.attend(q, c, sinks=3), "^sinks is a int"),
        (lambda c, q: ht.schedule(ht.plan(c, q_heads=8), c, cu_q="x"), "^cu_q is a str"),
        (lambda c, q: c.append(q, q, 2), "^counts is 2"),
        (lambda c, q: c.append(q, q, "ab"), "^counts is 'ab'"),
        (lambda c, q: c.append(q, q, [10**400, 0]), r"^counts\[0\] is"),
        (lambda c, q: c.append(q, q, [2, 0], rope="x"), "^rope is a str"),
        (lambda c, q: c.append(q, q, [2, 0], rope=ht.Rope(1, 2, 3)), "^rope.cos is a int"),
        (lambda c, q: c.append_slots(q, q, None), "^slot_mapping is None"),
        (lambda c, q: c.append_slots(q, q, [1, 2]), "^slot_mapping is a list"),
        (lambda c, q: c.reserve("x"), "^tokens is 'x'"),
        (lambda c, q: c.reserve(1.5), "^tokens is 1.5"),
        (lambda c, q: c.reserve([1, None]), r"^tokens\[1\] is None"),
        (lambda c, q: c.advance(None), "^counts is None"),
        (lambda c, q: c.dequantize(3), "^k_out is a int"),
        (lambda c, q: c.dequantize(dtype="f64"), "^dtype is 'f64'"),
        (lambda c, q: c.dequantize(*([np.empty((104, 2, 128), "f4")] * 2), dtype="f16"), "^dtype is 'f16', but k_out"),
        (lambda c, q: ht.export_fbgemm_int4(c, "k", 3), "^slots is a int"),
        (lambda c, q: ht.export_fbgemm_int4(c, "q", arange(3)), "^part is 'q'"),
        (lambda c, q: ht.PagedKVCache(1, 64, spec="x"), "^spec is 'x'"),
        (lambda c, q: ht.PagedKVCache(1, 64, spec=c.spec, kv_heads=3), "^kv_heads is 3 beside spec, which says 2"),
        (lambda c, q: ht.PagedKVCache(1, 64, spec=c.spec, k_format="int4-g32"), "^k_format is int4-g32 beside spec"),
        (lambda c, q: ht.PagedKVCache(1, 64, spec=c.spec, rotate_k=True), "^rotate_k is True beside spec"),
        (lambda c, q: ht.PagedKVCache(1, 64, kv_heads=2, head_dim=128, framework=["numpy"]), "^framework is"),
        (lambda c, q: ht.PagedKVCache(1, 64, kv_heads=2, head_dim=128, k_scale="x"), "^k_scale is a str"),
        (lambda c, q: ht.PagedKVCache.wrap("x", c.pages, c.block_table, c.lengths), "^spec is 'x'"),
        (lambda c, q: ht.PagedKVCache.wrap(c.spec, c.pages[0], c.block_table, c.lengths), "^pages is of shape"),
        (lambda c, q: ht.PagedKVCache.wrap(c.spec, c.pages, c.block_table[0], c.lengths), "^block_table is of shape"),
        (lambda c, q: ht.PagedKVCache.wrap(c.spec, c.pages, c.block_table, None), "^lengths is None"),
        (lambda c, q: ht.PagedKVCache.wrap(c.spec, c.pages, c.block_table, c.lengths[:, None]), "^lengths is of shape"),
        (lambda c, q: ht.KVFormat.int4(group=32, granularity="tensor"), "^granularity is 'tensor' beside group 32"),
        (lambda c, q: ht.KVFormat.int8(granularity="group"), "^group is None"),
        (lambda c, q: ht.merge(3, 3), "^parts is a int"),
        (lambda c, q: ht.merge([3], [3]), r"^parts\[0\] is a int"),
        (lambda c, q: ht.merge([q], []), "^part_lse has 0 arrays"),
        (lambda c, q: ht.merge([q], [None]), r"^part_lse\[0\] is None"),
        (lambda c, q: ht.merge([q.astype("f8")], [q[..., 0]]), r"^parts\[0\].dtype is 'float64'"),
        (lambda c, q: ht.merge([q], [q[..., 0]], out_dtype="int8"), "^out_dtype is 'int8'"),
        (lambda c, q: ht.merge([q], [q[..., 0]], out=q.copy(), out_dtype="f16"), "^out_dtype is 'f16', but out"),
        (lambda c, q: ht.merge([q], [q[..., 0]], lse=None), "^lse is None"),
    ],
)
def test_arguments_of_the_wrong_kind(cache, q, call, match):
    before = cache.host_lengths
    with pytest.raises(ht.InvalidArgumentError, match=match) as caught:
        call(cache, q)
    assert "ffi." not in str(caught.value) and cache.host_lengths == before


def test_what_agrees_is_accepted(cache):
    again = ht.PagedKVCache(2, 64, spec=cache.spec, kv_heads=KV_HEADS, k_format="int8-head", page_size=64)
    assert again.spec is cache.spec
    assert ht.KVFormat.int4(group=32, granularity="group") == ht.KVFormat("int4-g32")
    k, v = cache.dequantize(np.empty((104, KV_HEADS, DIM), np.float16))
    assert k.dtype == v.dtype == np.float16
    again.reserve(np.int64(3))
    again.reserve(np.array([1, 2]))


def test_more_pages_than_memory():
    options = dict(kv_heads=8, head_dim=256, page_size=256)
    match = r"num_pages is 8388608, but 8388608 pages of 2097152 bytes"
    with pytest.raises(ht.ResourceExhaustedError, match=match):
        ht.PagedKVCache(1, 2**31 - 1, **options)


@pytest.mark.parametrize(
    "batch, max_len, error, match",
    [
        (2**31 - 1, 1, ht.InvalidArgumentError, "^batch is 2147483647, but must be at most 16777216"),
        (2**24, 2**31 - 1, ht.ResourceExhaustedError, r"^batch is 16777216, .*\[16777216, 33554432\]"),
    ],
)
def test_a_huge_batch_with_few_pages(monkeypatch, batch, max_len, error, match):
    def allocate(*args, **options):
        raise AssertionError("something was allocated")

    monkeypatch.setattr(_arrays, "empty", allocate)
    with pytest.raises(error, match=match):
        ht.PagedKVCache(batch, max_len, kv_heads=2, head_dim=128, num_pages=1)


def test_sentences_say_what_python_says(cache, rng, q):
    table = cache.block_table.copy()
    table[0, 0] = 99
    view = ht.PagedKVCache.wrap(cache.spec, cache.pages, table, cache.lengths)
    x = normal(rng, 1, KV_HEADS, DIM)
    none = ht.Rope(x[0], x[0], np.zeros(1, np.int32), pairing="none")
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32", sinks=True), cache)
    for call, said in [
        (lambda: ht.attend(q, view), "correct the table or use clamped=True"),
        (lambda: view.append(x, x, [1, 0]), "or use clamped=True"),
        (lambda: cache.append(x, x, [1, 0], rope=none), "but rope.pairing is 'none'"),
        (lambda: ht.KVCacheSpec(2, 80, "int4-g64"), "use granularity token_head|use 32|use .*16"),
        (lambda: ht.attend(q, cache, schedule=step), "sinks is absent, but the plan's sinks is set"),
        (lambda: ht.attend(q, cache, stream=5), "stream is 0x5, but must be null on the CPU: pass None"),
    ]:
        with pytest.raises(ht.Error, match=said) as caught:
            call()
        assert not re.search(r"\bk[A-Z]|::|nullptr|problem\.|= true", str(caught.value))


def test_a_status_of_the_callers(cache, q):
    status, table = np.zeros(1, np.int32), cache.block_table.copy()
    table[0, 0] = -1
    view = ht.PagedKVCache.wrap(cache.spec, cache.pages, table, cache.lengths, clamped=True, status=status)
    ht.attend(q, view)
    assert view.status is status and status.tolist() == [1]
    for bad in (3, status[None], status[:0]):
        with pytest.raises(ht.InvalidArgumentError, match="^status"):
            made = ht.PagedKVCache.wrap(cache.spec, cache.pages, table, cache.lengths, clamped=True, status=bad)
            ht.attend(q, made)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_an_allocation_that_fails(monkeypatch, error):
    def refuse(*args, **options):
        raise error

    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(ht.ResourceExhaustedError, match="num_pages is 3, but 3 pages of 65536 bytes"):
        ht.PagedKVCache(1, 64, kv_heads=2, head_dim=128, num_pages=3)


@pytest.mark.parametrize("package", ["numpy", "ml_dtypes", "torch"])
def test_absent_packages(monkeypatch, package):
    real = _arrays.importlib.import_module

    def absent(name):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(_arrays, "importlib", types.SimpleNamespace(import_module=absent))
    with pytest.raises(ht.UnsupportedError, match=f"pip install {package}"):
        _arrays.empty("torch" if package == "torch" else "numpy", (3,), "bf16", "cpu")
