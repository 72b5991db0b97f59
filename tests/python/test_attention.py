"""Attention on NumPy arrays against double precision."""

import contextlib
import pickle

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, filled_cache, normal

import halftone as ht
from halftone import _arrays, attention

LENGTHS = [65, 1, 200, 64]


@pytest.mark.parametrize("name", list(ht.KVFormat.named()))
def test_every_named_format(rng, name):
    form = ht.KVFormat(name)
    k = normal(rng, sum(LENGTHS), KV_HEADS, DIM)
    scales = {}
    if form.static_scale:
        scales["k_scale"], scales["k_min"] = scales["v_scale"], scales["v_min"] = ht.calibrate(k, form)
    cache = ht.PagedKVCache(4, 256, kv_heads=KV_HEADS, head_dim=DIM, k_format=form, **scales)
    cache.append(k, k, LENGTHS)
    q = normal(rng, 4, Q_HEADS, DIM)
    out, lse = ht.attend(q, cache, lse=True)
    assert out.dtype == np.float32 and out.shape == (4, Q_HEADS, DIM) and lse.shape == (4, Q_HEADS)
    stored_k, stored_v = cache.dequantize()
    check(out, lse, q, stored_k, stored_v, [1] * 4, LENGTHS)
    error = np.linalg.norm(stored_k - k) / np.linalg.norm(k)
    assert error < {"bf16": 0.002, "fp16": 0.001}.get(name, 0.1 if "int4" in name else 0.04)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window_left": 20},
        {"window_left": 5, "window_right": 3},
        {"causal": True, "softcap": 5.0, "scale": 0.2},
        {"causal": True, "alibi_slopes": True},
        {"causal": True, "sinks": True},
    ],
)
def test_options_on_a_ragged_batch(rng, options, dtype):
    kv_lens, q_lens = [130, 7, 64, 0], [3, 7, 1, 2]
    cache, _, _ = filled_cache(rng, kv_lens, k_format="int8-g32", v_format="bf16", rotate_k=True)
    q = normal(rng, sum(q_lens), Q_HEADS, DIM).astype(dtype)
    cu_q = np.array([0, 3, 10, 11, 13], np.int32)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options = {**options, name: rng.random(Q_HEADS, dtype=np.float32)}
    out, lse = ht.attend(q, cache, cu_q=cu_q, lse=True, **options)
    k, v = cache.dequantize()
    assert out.dtype == q.dtype
    check(out, lse, q, k, v, q_lens, kv_lens, out_dtype=dtype, **options)
    assert not out[11:].any() and np.isneginf(lse[11:]).all()


def test_plan_schedule_attend_serve_layers_and_steps(rng):
    layers = [filled_cache(rng, [63, 10], max_len=128)[0] for _ in range(2)]
    plan = ht.plan(layers[0], q_heads=Q_HEADS, q_dtype="f32", lse=True)
    assert plan.info["workspace_bytes"] == plan.workspace_bytes and "int8-head" in plan.describe()
    step = ht.schedule(plan, layers[0])
    for _ in range(3):
        k = normal(rng, 2, KV_HEADS, DIM)
        for cache in layers:
            cache.append(k, k)
        step.update()
        for cache in layers:
            q = normal(rng, 2, Q_HEADS, DIM)
            out, lse = np.full_like(q, np.nan), np.full((2, Q_HEADS), np.nan, np.float32)
            got = ht.attend(q, cache, schedule=step, out=out, lse=lse)
            assert got[0] is out and got[1] is lse
            check(out, lse, q, *cache.dequantize(), [1, 1], cache.host_lengths)


def test_a_plan_for_prompts_has_a_pass_for_single_tokens(rng):
    cache, _, _ = filled_cache(rng, [40, 300, 7], max_len=320)
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32", max_q_len=100, causal=True)
    group = Q_HEADS // KV_HEADS
    short, long = plan.info["passes"]
    assert (short["config"], long["config"]) == ("cpu-decode", "cpu-chunk") and plan.info["config"] == "cpu-chunk"
    assert (short["min_rows"], short["max_rows"], long["min_rows"], long["max_rows"]) == (1, 16, 17, 100 * group)
    assert type(plan.info["passes"]) is list and type(short) is dict and type(short["reason"]) is str
    assert repr(plan) == "Plan(cpu-decode + cpu-chunk, batch=3, device=cpu)"
    assert "pass       2 of 2" in plan.describe()
    q = normal(rng, 102, Q_HEADS, DIM)
    step = ht.schedule(plan, cache, cu_q=np.array([0, 1, 101, 102], np.int32))
    out = ht.attend(q, cache, schedule=step)
    check(out, None, q, *cache.dequantize(), [1, 100, 1], [40, 300, 7], causal=True)
    one = ht.plan(cache, q_heads=Q_HEADS)
    assert [p["config"] for p in one.info["passes"]] == ["cpu-decode"] and repr(one).startswith("Plan(cpu-decode, ")


def test_the_shortest_request_has_a_bound(rng):
    cache, _, _ = filled_cache(rng, [40, 300, 7])
    options = {"q_heads": Q_HEADS, "q_dtype": "f32", "causal": True, "max_q_len": 100}
    plan = ht.plan(cache, min_q_len=100, **options)
    assert plan.options["min_q_len"] == 100 and ht.plan(cache, **options).options["min_q_len"] == 1
    assert len(plan.info["passes"]) == 1 and len(ht.plan(cache, **options).info["passes"]) == 2
    q = normal(rng, 102, Q_HEADS, DIM)  # of requests that are shorter, too
    out = ht.attend(q, cache, schedule=ht.schedule(plan, cache, cu_q=np.array([0, 1, 101, 102], np.int32)))
    check(out, None, q, *cache.dequantize(), [1, 100, 1], [40, 300, 7], causal=True)


def test_all_keys_have_a_bound(rng):
    cache, _, _ = filled_cache(rng, [63, 10])
    plan = ht.plan(cache, q_heads=Q_HEADS, max_total_kv=73)
    assert plan.options["max_total_kv"] == 73
    assert plan.info["staged_bytes"] == plan.info["passes"][0]["staged_bytes"] == 0  # the CPU stages nothing
    ht.schedule(plan, cache)
    with pytest.raises(ht.OutOfRangeError, match="73 keys together, .* max_total_kv is 72"):
        ht.schedule(ht.plan(cache, q_heads=Q_HEADS, max_total_kv=72), cache)
    mixed = {"q_heads": Q_HEADS, "max_q_len": 5}
    cu_q = np.array([0, 1, 6], np.int32)
    ht.schedule(ht.plan(cache, max_prompt_kv=10, **mixed), cache, cu_q=cu_q)
    with pytest.raises(ht.OutOfRangeError, match="more than one query have 10 keys .* max_prompt_kv is 9"):
        ht.schedule(ht.plan(cache, max_prompt_kv=9, **mixed), cache, cu_q=cu_q)
    many = ht.plan(cache.spec, q_heads=Q_HEADS, batch=2**20, max_kv_len=2**20, max_total_kv=2**40)
    assert many.options["max_total_kv"] == 2**40


def test_a_call_without_a_schedule_takes_a_workspace(rng):
    cache, _, _ = filled_cache(rng, [63, 10])
    q = normal(rng, 2, Q_HEADS, DIM)
    size = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32").workspace_bytes
    memory = np.zeros(size + 256, np.uint8)
    workspace = memory[-memory.ctypes.data % 256 :][:size]
    np.testing.assert_array_equal(ht.attend(q, cache, workspace=workspace), ht.attend(q, cache))
    assert workspace.any()
    with pytest.raises(ht.ResourceExhaustedError, match="workspace has"):
        ht.attend(q, cache, workspace=workspace[:-1])
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    with pytest.raises(ht.InvalidArgumentError, match="workspace is given, but the schedule"):
        ht.attend(q, cache, schedule=step, workspace=workspace)


def test_equal_problems_share_a_plan(rng):
    cache, _, _ = filled_cache(rng, [5])
    assert ht.plan(cache, q_heads=8) is ht.plan(cache, q_heads=8)
    assert ht.plan(cache, q_heads=8) is not ht.plan(cache, q_heads=16)


def test_a_request_alone_has_the_same_bits_when_batch_invariant(rng):
    cache, k, v = filled_cache(rng, [300, 7, 512])
    q = normal(rng, 3, Q_HEADS, DIM)
    together = ht.attend(q, cache, policy="batch_invariant")
    alone, _, _ = filled_cache(rng, [0])
    alone.append(k[:300], v[:300])
    np.testing.assert_array_equal(ht.attend(q[:1], alone, policy="batch_invariant")[0], together[0])


def test_half_int8_is_attention_over_the_integers(rng):
    """Values that are rows of integers times a power of two, each with a 127: quantised exactly, so the 16-bit result."""
    q, k = (np.rint(rng.uniform(-127, 127, (20, heads, DIM))).astype(np.float32) for heads in (Q_HEADS, KV_HEADS))
    q[..., 3] = k[..., 5] = 127
    q, k, v = q / 2**9, k / 2**6, normal(rng, 20, KV_HEADS, DIM).astype(np.float16).astype(np.float32)
    exact = ht.attend(q.astype(np.float16), k=k.astype(np.float16), v=v.astype(np.float16), out_dtype="f32")
    halved = ht.attend(
        q.astype(np.float16), k=k.astype(np.float16), v=v.astype(np.float16), out_dtype="f32", arithmetic="half_int8"
    )
    np.testing.assert_allclose(halved, exact, atol=2e-5)
    rounded = ht.attend(q + 1e-3, k=k, v=v, arithmetic="half_int8")
    assert 1e-5 < np.abs(rounded - ht.attend(q + 1e-3, k=k, v=v)).max() < 0.1
    assert "half_int8" in ht.plan(
        ht.KVTensors(KV_HEADS, DIM), q_heads=Q_HEADS, batch=1, max_kv_len=9, arithmetic="half_int8"
    ).describe()


def test_full_int8_takes_values_that_are_integers_as_they_are(rng):
    """Equal logits: weights are exact, and so are values that are integers times a scale in each channel of a block."""
    q, k = np.zeros((5, Q_HEADS, DIM), np.float32), normal(rng, 300, KV_HEADS, DIM)
    v = np.rint(rng.uniform(-127, 127, (300, KV_HEADS, DIM))).astype(np.float32)
    v[[0, 128, 256]] = 127
    v *= 2.0 ** -rng.integers(0, 9, DIM)
    exact = ht.attend(q, k=k, v=v.astype(np.float32))
    full = ht.attend(q, k=k, v=v.astype(np.float32), arithmetic="full_int8")
    np.testing.assert_allclose(full, exact, rtol=1e-5, atol=1e-5)
    v[0, 0, 0] *= 1000
    assert np.abs(ht.attend(q, k=k, v=v, arithmetic="full_int8") - ht.attend(q, k=k, v=v))[:, 0, 0].max() > 0.01


def test_fp8_is_attention_over_e4m3(rng):
    """Sixteenths up to 15 / 16 have four significant bits: E4M3 holds them, so the 16-bit result."""
    q, k, v = (rng.integers(-15, 16, (200, heads, DIM)) / 16 for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    exact = ht.attend(q, k=k, v=v, out_dtype="f32")
    np.testing.assert_allclose(ht.attend(q, k=k, v=v, out_dtype="f32", arithmetic="fp8"), exact, atol=2e-5)
    rounded = ht.attend(q, k=k, v=v * np.float16(1.03), out_dtype="f32", arithmetic="fp8")
    assert 1e-4 < np.abs(rounded - 1.03 * exact).max() < 0.1
    for name in ("full_int8", "fp8"):
        spec = ht.KVTensors(KV_HEADS, DIM)
        assert name in ht.plan(spec, q_heads=Q_HEADS, batch=1, max_kv_len=9, arithmetic=name).describe()
    with pytest.raises(ht.InvalidArgumentError, match="full_int8, fp8"):
        ht.attend(q, k=k, v=v, arithmetic="int8")


def test_a_plan_over_plain_tensors(rng):
    cu_kv, cu_q = np.array([0, 30, 70], np.int32), np.array([0, 4, 9], np.int32)
    spec = ht.KVTensors(KV_HEADS, DIM, "f32", 64)
    plan = ht.plan(spec, q_heads=Q_HEADS, batch=2, max_kv_len=40, max_q_len=5, q_dtype="f32", lse=True)
    assert plan.spec is spec and "plain K and V in f32" in plan.describe()
    assert ht.KVTensors(KV_HEADS, DIM) == ht.KVTensors(KV_HEADS, DIM, "bf16", DIM)
    for made in (plan, pickle.loads(pickle.dumps(plan))):
        step = ht.schedule(made, cu_q=cu_q, cu_kv=cu_kv)
        for _ in range(2):  # layers
            q, k, v = normal(rng, 9, Q_HEADS, DIM), normal(rng, 70, KV_HEADS, DIM), normal(rng, 70, KV_HEADS, 64)
            out, lse = ht.attend(q, k=k, v=v, schedule=step)
            check(out, lse, q, k, v, [4, 5], [30, 40])
    cache, _, _ = filled_cache(rng, [30, 40])
    with pytest.raises(ht.InvalidArgumentError, match="^k is given beside cache, .* drop one"):
        ht.attend(q, cache, k=k, v=v, schedule=step)
    with pytest.raises(ht.InvalidArgumentError, match="^k and v are absent, but the plan is for tensors: pass them"):
        ht.attend(q, cache, schedule=step)
    paged = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    with pytest.raises(ht.InvalidArgumentError, match="^k and v are present, but the plan is for a paged cache"):
        ht.attend(q[:2], k=k, v=v, schedule=paged)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(kv_heads=2, head_dim=128, dtype="int8"), "dtype is 'int8', but must be one of f32, f16, bf16"),
        (dict(kv_heads=2, head_dim=128, dtype=None), "dtype is None"),
        (dict(kv_heads=2.5, head_dim=128), "kv_heads is 2.5, but must be an integer"),
        (dict(kv_heads=0, head_dim=128), "kv.kv_heads is 0, but must be 1 to"),
        (dict(kv_heads=2, head_dim=59), "kv.head_dim is 59, but must be .* use 64"),
        (dict(kv_heads=2, head_dim=128, v_head_dim=130), "kv.v_head_dim is 130, but must be .* use 192"),
    ],
)
def test_tensors_that_no_plan_takes(arguments, sentence):
    with pytest.raises(ht.InvalidArgumentError, match=f"^{sentence}"):
        ht.plan(ht.KVTensors(**arguments), q_heads=8, batch=1, max_kv_len=64)


def test_plain_tensors(rng):
    q, k, v = normal(rng, 9, Q_HEADS, DIM), normal(rng, 70, KV_HEADS, DIM), normal(rng, 70, KV_HEADS, DIM)
    out, lse = ht.attend(q, k=k, v=v, causal=True, lse=True)
    check(out, lse, q, k, v, [9], [70], causal=True)
    cu_q, cu_kv = np.array([0, 4, 9], np.int32), np.array([0, 30, 70], np.int32)
    out, lse = ht.attend(q, k=k, v=v, cu_q=cu_q, cu_kv=cu_kv, causal=True, lse=True)
    check(out, lse, q, k, v, [4, 5], [30, 40], causal=True)


def test_a_call_over_plain_tensors_on_a_device_reads_no_lengths(rng, monkeypatch):
    made, bounds = [], []

    def make(framework, values, dtype, device):
        made.append((values, dtype, device))
        return np.array(values, dtype)

    monkeypatch.setattr(_arrays, "device_of", lambda x: "cuda:1")
    monkeypatch.setattr(_arrays, "on_stream", lambda x, stream: contextlib.nullcontext())
    monkeypatch.setattr(_arrays, "make", make)
    monkeypatch.setattr(_arrays, "to_list", lambda x: pytest.fail("a synchronisation"))
    monkeypatch.setattr(attention, "plan", lambda spec, **options: bounds.append(options))
    monkeypatch.setattr(attention, "_make_schedule", lambda *arguments: arguments)
    q, k, v = normal(rng, 9, Q_HEADS, DIM), normal(rng, 70, KV_HEADS, DIM), normal(rng, 70, KV_HEADS, DIM)
    cu_q, cu_kv = np.array([0, 4, 9], np.int32), np.array([0, 30, 70], np.int32)
    for lengths in ((None, None), (cu_q, cu_kv)):
        attention._schedule_for(q, None, k, v, *lengths, {}, None, None)
    assert made == [([0, 70], "int32", "cuda:1")]
    assert [(b["device"], b["batch"], b["max_q_len"], b["max_kv_len"]) for b in bounds] == [
        ("cuda:1", 1, 9, 70),
        ("cuda:1", 2, 9, 70),
    ]
    assert [b.get("min_q_len") for b in bounds] == [9, None]


def test_merge_of_two_halves_is_the_whole(rng):
    q, k, v = normal(rng, 3, Q_HEADS, DIM), normal(rng, 90, KV_HEADS, DIM), normal(rng, 90, KV_HEADS, DIM)
    halves = [ht.attend(q, k=k[part], v=v[part], lse=True) for part in (slice(0, 40), slice(40, 90))]
    out, lse = ht.merge([h[0] for h in halves], [h[1] for h in halves], lse=True)
    check(out, lse, q, k, v, [3], [90])
    target = np.full_like(out, np.nan)
    assert ht.merge([h[0] for h in halves], [h[1] for h in halves], out=target) is target
    np.testing.assert_array_equal(target, out)


def test_strided_queries_and_outputs(rng):
    cache, _, _ = filled_cache(rng, [33, 80])
    wide = normal(rng, 2, Q_HEADS * 3, DIM)
    out = np.full((2, 2, Q_HEADS, DIM), np.nan, np.float32)
    ht.attend(wide[:, 8:16], cache, out=out[:, 1])
    np.testing.assert_array_equal(out[:, 1], ht.attend(wide[:, 8:16].copy(), cache))
    assert np.isnan(out[:, 0]).all()


def test_read_only_input_is_accepted(rng):
    cache, _, _ = filled_cache(rng, [33])
    q = normal(rng, 1, Q_HEADS, DIM)
    q.flags.writeable = False
    check(ht.attend(q, cache), None, q, *cache.dequantize(), [1], [33])


def test_an_empty_batch(rng):
    cache = ht.PagedKVCache(0, 64, kv_heads=KV_HEADS, head_dim=DIM)
    assert ht.attend(np.zeros((0, Q_HEADS, DIM), np.float32), cache).shape == (0, Q_HEADS, DIM)


def test_bfloat16_numpy_arrays(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache, _, _ = filled_cache(rng, [0, 0], k_format="bf16")
    k = normal(rng, 41, KV_HEADS, DIM).astype(ml_dtypes.bfloat16)
    cache.append(k, k, [40, 1])
    q = normal(rng, 2, Q_HEADS, DIM).astype(ml_dtypes.bfloat16)
    out = ht.attend(q, cache)
    assert out.dtype == q.dtype
    stored, _ = cache.dequantize(dtype="bf16")
    np.testing.assert_array_equal(stored, k)
    check(out, None, q.astype("f4"), k.astype("f4"), k.astype("f4"), [1, 1], [40, 1], out_dtype="bfloat16")
