"""A layer in one call: attend() that appends, against append() and attend()."""

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, filled_cache, normal

import halftone as ht

FORMATS = ["bf16", "fp8-token-head", "int8-head", "int4-g32", "int4-row"]


def angles(rng, rows, half):
    x = normal(rng, rows, half)
    return np.cos(x), np.sin(x)


def same(one, two):
    """The pages hold the same bytes, and host and device have counted the same tokens."""
    np.testing.assert_array_equal(np.asarray(one.pages), np.asarray(two.pages))
    np.testing.assert_array_equal(np.asarray(one.lengths), np.asarray(two.lengths))
    assert one.host_lengths == two.host_lengths == np.asarray(one.lengths).tolist()


def tokens(rng, total):
    return normal(rng, total, Q_HEADS, DIM), normal(rng, total, KV_HEADS, DIM), normal(rng, total, KV_HEADS, DIM)


@pytest.mark.parametrize("counts", [[1, 1, 1], [4, 4, 4], [1, 0, 17]], ids=["one", "draft", "ragged"])
@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_append_and_attend(rng, name, counts):
    one, _, _ = filled_cache(rng, [63, 5, 128], page_size=16, k_format=name)
    two = one.clone()
    cos, sin = angles(rng, 200, 32)
    for _ in range(3):
        starts = one.host_lengths
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts)]).astype(np.int32)
        q, k, v = tokens(rng, sum(counts))
        rope = ht.Rope(cos, sin, positions)
        cu_q = None if len(set(counts)) == 1 else np.cumsum([0, *counts], dtype=np.int32)
        out, lse = ht.attend(q, one, k=k, v=v, rope=rope, cu_q=cu_q, causal=True, lse=True)
        two.append(k, v, counts, rope=rope)
        expected, expected_lse = ht.attend(q, two, cu_q=cu_q, causal=True, lse=True)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)
        same(one, two)


def layered(batch, name):
    return ht.LayeredKVCache(batch, 100, layers=3, kv_heads=KV_HEADS, head_dim=DIM, k_format=name, page_size=16)


def test_layers_of_a_step_share_a_schedule(rng):
    one, two = layered(4, "int8-head"), layered(4, "int8-head")
    made = ht.plan(one.layer(0), q_heads=Q_HEADS, q_dtype="f32", appends=True)
    assert made.options["appends"] and made.info["fuses_append"] is False and "append" in made.describe()
    step = ht.schedule(made, one.layer(0))
    for number in range(40):
        if number:
            step.update()
        for layer in range(3):
            q, k, v = tokens(rng, 4)
            out = ht.attend(q, one.layer(layer), k=k, v=v, schedule=step)
            two.layer(layer).append(k, v)
            np.testing.assert_array_equal(out, ht.attend(q, two.layer(layer)))
        assert one.host_lengths == [number + 1] * 4
    for layer in range(3):
        same(one.layer(layer), two.layer(layer))


def test_layers_without_a_schedule_and_beside_append(rng):
    one, two = layered(2, "int4-g32"), layered(2, "int4-g32")
    for number in range(20):
        for layer in range(3):
            q, k, v = tokens(rng, 2)
            two.layer(layer).append(k, v)
            if (number + layer) % 3 == 0:
                one.layer(layer).append(k, v)
                out = ht.attend(q, one.layer(layer))
            else:
                out = ht.attend(q, one.layer(layer), k=k, v=v)
            np.testing.assert_array_equal(out, ht.attend(q, two.layer(layer)))
    for layer in range(3):
        same(one.layer(layer), two.layer(layer))


def test_a_request_that_shares_its_last_page_gets_a_copy(rng):
    one, _, _ = filled_cache(rng, [20, 1], page_size=16)
    one.fork(0, 1)
    two = one.clone()
    for _ in range(2):
        q, k, v = tokens(rng, 2)
        out = ht.attend(q, one, k=k, v=v)
        two.append(k, v)
        np.testing.assert_array_equal(out, ht.attend(q, two))
    assert one.block_table[0, 0] == one.block_table[1, 0] and one.block_table[0, 1] != one.block_table[1, 1]
    same(one, two)


def wrapped(cache):
    return ht.PagedKVCache.wrap(cache.spec, cache.pages, cache.block_table, cache.lengths)


def test_pages_of_an_engine(rng):
    """Slots that the engine skips, and lengths that it counts itself."""
    owner, _, _ = filled_cache(rng, [16, 30], page_size=16)
    owner.reserve(4)
    two = owner.clone()
    one = wrapped(owner)
    q, k, v = tokens(rng, 4)
    rows = [(0, 16), (0, 17), (1, 30), (1, 31)]
    slots = np.array([owner.block_table[r, p // 16] * 16 + p % 16 for r, p in rows], np.int64)
    slots[2] = -1
    made = ht.plan(one, q_heads=Q_HEADS, max_q_len=2, q_dtype="f32", causal=True, appends=True)
    step = ht.schedule(made, one)
    before = owner.lengths.copy()
    for _ in range(2):  # the schedule says where tokens go
        out = ht.attend(q, one, k=k, v=v, slot_mapping=slots, schedule=step, advance=False)
        np.testing.assert_array_equal(owner.lengths, before)
    two.append_slots(k, v, slots)
    two = wrapped(two)
    two.lengths[:] += 2
    np.testing.assert_array_equal(out, ht.attend(q, two, causal=True))
    np.testing.assert_array_equal(one.pages, two.pages)
    slots[3] += 1
    with pytest.raises(ht.InvalidArgumentError, match=r"^slot_mapping\[3\] is .* position 31, .* in slot"):
        ht.attend(q, one, k=k, v=v, slot_mapping=slots, schedule=step)
    ht.attend(q, one, k=k, v=v, schedule=step)
    np.testing.assert_array_equal(owner.lengths, before + 2)


def test_latent_cache(rng):
    spec = ht.KVCacheSpec.latent("fp8-g128-f32")
    one, two = (ht.PagedKVCache(2, 64, spec=spec) for _ in range(2))
    for _ in range(3):
        q, k = normal(rng, 2, 16, 576), normal(rng, 2, 1, 576)
        out = ht.attend(q, one, k=k)
        two.append(k)
        np.testing.assert_array_equal(out, ht.attend(q, two))
    same(one, two)


def test_what_is_refused_leaves_the_cache_as_it_was(rng):
    cache, _, _ = filled_cache(rng, [60, 5], max_len=64, page_size=16)
    q, k, v = tokens(rng, 2)
    pages, lengths = cache.pages.copy(), cache.host_lengths
    plain = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32", appends=True), cache)
    rope = ht.Rope(*angles(rng, 61, 32), np.array([60, 61], np.int32))
    bad = v.copy()
    bad[1, 0, 3] = np.nan
    slots = np.zeros(2, np.int64)
    for call, error, sentence in [
        (lambda: ht.attend(q, cache, v=v), ht.InvalidArgumentError, "^v is given beside cache without k"),
        (lambda: ht.attend(q, cache, rope=rope), ht.InvalidArgumentError, "^rope is given, but is of new tokens"),
        (lambda: ht.attend(q, cache, slot_mapping=slots), ht.InvalidArgumentError, "^slot_mapping is given, but"),
        (lambda: ht.attend(q, cache, advance=False), ht.InvalidArgumentError, "^advance is given, but"),
        (lambda: ht.attend(q, cache, k=k, v=v, advance=False), ht.InvalidArgumentError, "^advance is False, but a"),
        (lambda: ht.attend(q, cache, schedule=step), ht.InvalidArgumentError, "^k of append is absent"),
        (lambda: ht.attend(q, cache, k=k, v=v, schedule=plain), ht.InvalidArgumentError, "^k is given beside cache, but"),
        (lambda: ht.attend(q, cache, k=k, v=bad), ht.InvalidArgumentError, r"^v\[1, 0, 3\] is nan"),
        (lambda: ht.attend(q, cache, k=k, v=v, rope=rope), ht.OutOfRangeError, r"^rope.positions\[1\] is 61"),
        (lambda: ht.attend(q, cache, k=k[:1], v=v[:1]), ht.InvalidArgumentError, "^k has 1 tokens, but q has 2 rows"),
        (lambda: ht.attend(np.repeat(q, 5, 0), cache, k=np.repeat(k, 5, 0), v=np.repeat(v, 5, 0)),
         ht.OutOfRangeError, r"^kv_lengths\[0\] is 60 before 5 new tokens, but the plan's max_kv_len is 64"),
        (lambda: ht.plan(ht.KVTensors(2, 128), q_heads=8, batch=1, max_kv_len=9, appends=True),
         ht.UnsupportedError, "^appends is true, but kv is plain tensors"),
        (lambda: ht.plan(cache, q_heads=8, top_k=4, appends=True), ht.UnsupportedError, "^appends is true, but listed"),
    ]:  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
        np.testing.assert_array_equal(cache.pages, pages)
        assert cache.host_lengths == lengths == cache.lengths.tolist()
    ht.attend(q, cache, k=k, v=v, schedule=step)
    with pytest.raises(ht.InvalidArgumentError, match=r"^schedule is that of a step .* call schedule.update\(\)"):
        ht.attend(q, cache, k=k, v=v, schedule=step)
    step.update()
    ht.attend(q, cache, k=k, v=v, schedule=step)
    assert cache.host_lengths == [62, 7] == cache.lengths.tolist()
