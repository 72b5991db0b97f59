"""Misuse from Python: arguments of the wrong kind or beside each other, and the sentences about them."""

import re

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, normal

import halftone as ht


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
        ({"arithmetic": "int8"}, "arithmetic is 'int8'"),
        ({"q_dtype": "f64"}, "q_dtype is 'f64'"),
        ({"workers": -1}, "workers"),
        ({"window_left": -2}, "window_left"),
        ({"softcap": -1.0}, "softcap"),
        ({"device": "tpu:0"}, "device is 'tpu:0'"),
        ({"device": "cuda:\u00b2"}, "device is 'cuda:\u00b2'"),
        ({"device": "cuda:99999999999"}, "31 bits"),
        ({"policy": ["fast"]}, "policy is"),
        ({"max_q_len": -1}, "max_q_len"),
        ({"min_q_len": 2}, "min_q_len is 2, .* max_q_len = 1"),
        ({"min_q_len": 1.5}, "min_q_len is 1.5"),
        ({"max_total_kv": -1}, "max_total_kv is -1"),
        ({"max_prompt_kv": -1}, "max_prompt_kv is -1"),
        ({"max_prompt_kv": 2**63}, "max_prompt_kv is 9223372036854775808, .* 64 bits"),
        ({"max_total_kv": 1.5}, "max_total_kv is 1.5"),
        ({"max_total_kv": 2**63}, "max_total_kv is 9223372036854775808, .* 64 bits"),
    ],
)
def test_plans(cache, options, match):
    with pytest.raises(ht.InvalidArgumentError, match=match):
        ht.plan(cache, **{"q_heads": Q_HEADS, **options})


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
    with pytest.raises(ht.InvalidArgumentError, match="^v is given beside cache without k"):
        ht.attend(q, cache, v=q)
    with pytest.raises(ht.InvalidArgumentError, match="parts is empty"):
        ht.merge([], [])


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
        (lambda c, q: ht.PagedKVCache(1, 64, spec=ht.KVCacheSpec(2, 128, "fp8", "bf16"), k_scale="x"), "^k_scale is a str"),
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
