"""Misuse from Python: every error is of the right class, names the argument, and leaves outputs untouched."""

import copy
import pickle
import re
import types

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, filled_cache, normal

import halftone as ht
from halftone import _arrays, _frameworks


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


@pytest.mark.parametrize(
    "dim, remedy",
    [(1, "use 64, pad"), (65, r"use 80, pad with zeros and set scale to 1/sqrt\(65\)"), (100, "use 128, pad")]
    + [(dim, "larger heads are not supported") for dim in (513, 576)],
)
def test_head_dims_name_what_helps(dim, remedy):
    with pytest.raises(ht.InvalidArgumentError, match=f"head_dim is {dim}, .*: {remedy}"):
        ht.KVCacheSpec(2, dim)


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("int4", "no format has this name: use int4-g32, int4-g64, int4-g128 or int4-row"),
        ("fp8_e5m2", "e5m2 is not stored, only e4m3: use fp8, fp8-static-head or fp8-token-head"),
        ("int4_g32", "names are lower case with hyphens: use int4-g32"),
    ],
)
def test_unknown_formats_name_what_is_near_in_meaning(name, remedy):
    with pytest.raises(ht.InvalidArgumentError, match=f"format is '{name}', but {remedy}"):
        ht.KVFormat(name)


@pytest.mark.parametrize("size", [0, 1, 48, 512, -16])
def test_page_sizes(size):
    with pytest.raises(ht.InvalidArgumentError, match=f"page_size is {size}"):
        ht.KVCacheSpec(2, 128, page_size=size)


def test_partial_groups():
    with pytest.raises(ht.Error, match="k_format"):
        ht.KVCacheSpec(2, 80, "int4-g32")


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


def test_static_scales_are_missed_at_construction():
    one = np.ones(1, np.float32)
    two = np.ones(2, np.float32)
    small = ht.PagedKVCache(1, 64, kv_heads=2, head_dim=DIM, k_format="bf16")
    for form, scales, sentence in (
        (
            "fp8",
            {},
            "k_scale is None, but k_format fp8 has static scales: pass what halftone.calibrate(sample, 'fp8') returns, "
            "or use 'fp8-token-head', whose scales append computes.",
        ),
        ("int8-tensor", dict(k_scale=one), "v_scale is None, but v_format int8-tensor has static scales"),
        ("int8-static-head-asym", dict(k_scale=two), "k_min is None, but k_format int8-static-head-asym"),
        ("fp8", dict(k_scale=one, v_scale=one, v_min=one), "v_min is given, but v_format fp8 is symmetric"),
        ("int8-head", dict(k_scale=two), "k_scale is given, but k_format int8-head has no static scales: leave it out."),
    ):
        spec = ht.KVCacheSpec(2, DIM, form)
        pages = np.zeros((1, spec.page_bytes + 16), np.uint8)[:, : spec.page_bytes]
        for make in (
            lambda: ht.PagedKVCache(1, 64, spec=spec, **scales),
            lambda: ht.PagedKVCache.wrap(spec, pages, small.block_table, small.lengths, **scales),
        ):
            with pytest.raises(ht.InvalidArgumentError, match=re.escape(sentence)):
                make()


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
    real = _frameworks.importlib.import_module

    def absent(name):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(_frameworks, "importlib", types.SimpleNamespace(import_module=absent))
    with pytest.raises(ht.UnsupportedError, match=f"pip install {package}"):
        _arrays.empty("torch" if package == "torch" else "numpy", (3,), "bf16", "cpu")


@pytest.mark.parametrize(
    "name",
    "spec pages block_table lengths k_scale k_min v_scale v_min clamped status framework device".split(),
)
def test_attributes_of_a_cache_are_not_assigned(cache, q, name):
    """Calls would go on using what the cache was made of, or use one here and the other there."""
    truth, before = ht.attend(q, cache), getattr(cache, name)
    with pytest.raises(ht.InvalidArgumentError, match=f"^{name} of a PagedKVCache cannot be assigned.*wrap"):
        setattr(cache, name, copy.copy(before))
    assert getattr(cache, name) is before
    np.testing.assert_array_equal(ht.attend(q, cache), truth)
    cache.layer = 3  # a name of the caller's
    cache.layer = 4


def test_arrays_of_a_cache_are_written_into(rng, cache, q):
    shorter = filled_cache(rng, [40, 64], max_len=64)[0]
    shorter.pages[:] = cache.pages
    cache.lengths[:] = shorter.lengths[:] = [7, 64]
    np.testing.assert_array_equal(ht.attend(q, cache), ht.attend(q, shorter))


def test_attributes_of_plans_and_schedules_are_not_assigned(cache):
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32")
    step = ht.schedule(plan, cache)
    for name in ("spec", "options", "info", "workspace_bytes", "out_dtype", "lse", "device"):
        with pytest.raises(ht.InvalidArgumentError, match=f"^{name} of a Plan cannot be assigned"):
            setattr(plan, name, None)
    for name in ("plan", "workspace", "kv_lengths", "cu_q", "cu_kv"):
        with pytest.raises(ht.InvalidArgumentError, match=f"^{name} of a Schedule cannot be assigned"):
            setattr(step, name, None)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_schedules_are_not_copied(cache, copied):
    with pytest.raises(ht.UnsupportedError, match="^a Schedule cannot be copied or pickled: call schedule"):
        copied(ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache))


def test_caches_are_not_copied_without_their_pages(cache):
    with pytest.raises(ht.UnsupportedError, match="^a PagedKVCache cannot be copied without its pages.* use clone"):
        copy.copy(cache)


@pytest.mark.parametrize("name", ["\ud800", "int8-\udcff", "a\0b"])
def test_names_that_are_no_text(name):
    with pytest.raises(ht.InvalidArgumentError, match="^format is .* must be valid UTF-8"):
        ht.KVFormat(name)
    with pytest.raises(ht.InvalidArgumentError, match="^format is"):
        ht.PagedKVCache(1, 64, kv_heads=2, head_dim=128, k_format=name)
