"""What several threads, streams or layers share: a schedule and its workspace, a plan, the lengths of a step."""

import threading
import types

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, filled_cache, normal

import halftone as ht
from halftone import _arrays, _frameworks, _native


def at_once(count, body):
    """Runs ``body(i)`` in ``count`` threads at once; what they return, in order."""
    results, start = [None] * count, threading.Barrier(count)

    def run(i):
        start.wait()
        results[i] = body(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def layers(rng):
    """Two caches of equal lengths, long enough for calls of threads to meet, queries, and one plan."""
    caches = [filled_cache(rng, [3000, 2500], max_len=4096)[0] for _ in range(2)]
    return caches, normal(rng, 2, Q_HEADS, DIM), ht.plan(caches[0], q_heads=Q_HEADS, q_dtype="f32", workers=8)


def attends(call, truths, match, rounds=1):
    """Up to ``rounds`` times 50 calls of ``call(layer)`` on each of two threads, until one is refused.

    Returns how many were; all others must be right.
    """

    def body(i):
        refused = 0
        for _ in range(50):
            try:
                np.testing.assert_array_equal(call(i), truths[i])
            except ht.InvalidArgumentError as error:
                assert match in str(error)
                refused += 1
        return refused

    for _ in range(rounds):
        refusals = at_once(2, body)
        assert None not in refusals, "a thread met a wrong result"
        if any(refusals):
            break
    return sum(refusals)


def test_a_schedule_serves_one_thread_at_a_time(layers):
    caches, q, plan = layers
    truths = [ht.attend(q, cache, schedule=ht.schedule(plan, cache)) for cache in caches]
    step = ht.schedule(plan, caches[0])

    def call(i):
        return ht.attend(q, caches[i], schedule=step)

    assert attends(call, truths, "schedule is in use by another call", 100) > 0
    for i in range(2):  # nothing stays in use, not even after a call that fails
        with pytest.raises(ht.InvalidArgumentError, match="^q.shape"):
            ht.attend(q[:1], caches[i], schedule=step)
        np.testing.assert_array_equal(call(i), truths[i])


def test_a_workspace_serves_one_schedule_at_a_time(layers):
    caches, q, plan = layers
    memory = np.zeros(plan.workspace_bytes + 256, np.uint8)
    workspace = memory[-memory.ctypes.data % 256 :][: plan.workspace_bytes]
    truths = [ht.attend(q, cache, schedule=ht.schedule(plan, cache)) for cache in caches]
    steps = [ht.schedule(plan, cache, workspace=workspace) for cache in caches]
    assert attends(lambda i: ht.attend(q, caches[i], schedule=steps[i]), truths, "workspace is in use", 100) > 0


def test_threads_share_a_plan(layers):
    caches, q, plan = layers
    truths = [ht.attend(q, cache, schedule=ht.schedule(plan, cache)) for cache in caches]
    steps = [ht.schedule(plan, cache) for cache in caches]
    assert attends(lambda i: ht.attend(q, caches[i], schedule=steps[i]), truths, "") == 0


def test_a_schedule_follows_its_lengths_or_says_that_it_cannot(cache, q):
    plan = ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32")
    lengths = cache.lengths.copy()
    step = ht.schedule(plan, lengths)
    frozen = lengths.view()
    frozen.flags.writeable = False
    copied = ht.schedule(plan, frozen)
    lengths[:] = [7, 9]
    with pytest.raises(ht.InvalidArgumentError, match="^kv_lengths is a read-only array, of which .* a copy"):
        copied.update()
    step.update()
    cache.lengths[:] = lengths
    np.testing.assert_array_equal(ht.attend(q, cache, schedule=step), ht.attend(q, cache))


@pytest.mark.parametrize("capturing", [False, True])
def test_a_schedule_serves_one_stream_at_a_time(cache, q, monkeypatch, capturing):
    """As on CUDA, where native calls say that the stream is another one (tests/python/test_gpu.py has the streams)."""
    step = ht.schedule(ht.plan(cache, q_heads=Q_HEADS, q_dtype="f32"), cache)
    truth, runs, moves = ht.attend(q, cache, schedule=step), [], []

    def run(*arguments):
        runs.append(arguments[-1])
        return arguments[-1] and real(*arguments)

    real = _native.run
    monkeypatch.setattr(_native, "run", run)
    monkeypatch.setattr(_native, "reschedule", lambda *_: False)
    monkeypatch.setattr(_native, "follow_stream", lambda *_: moves.append(1))
    monkeypatch.setattr(_arrays, "is_capturing", lambda *_: capturing)
    step.update()
    if capturing:  # records a call, which is on any stream
        np.testing.assert_array_equal(ht.attend(q, cache, schedule=step), truth)
        assert runs == [False, True] and moves == []
    else:
        out = np.full_like(q, np.nan)
        with pytest.raises(ht.InvalidArgumentError, match=r"^stream is another .* call schedule.update\(\) there"):
            ht.attend(q, cache, schedule=step, out=out)
        assert np.isnan(out).all() and runs == [False] and moves == [1]
    np.testing.assert_array_equal(ht.attend(q, cache), truth)  # with a schedule of its own, on the stream of the call


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_captures_are_seen_on_the_stream_of_the_call(monkeypatch, name):
    current = [7]
    stream = types.SimpleNamespace(is_capturing=lambda: current[0] == 9)
    cuda = types.SimpleNamespace(is_current_stream_capturing=lambda: current[0] == 9, get_current_stream=lambda: stream)
    device = types.SimpleNamespace(type="cuda", index=0)
    array = type("Array", (), {"__module__": name, "__dlpack_device__": lambda self: (2, 0), "device": device})()

    class On:
        def __init__(self, x, number):
            self.number = current[0] if number is None else number

        def __enter__(self):
            current.append(current[0])
            current[0] = self.number

        def __exit__(self, *_):
            current[0] = current.pop()

    monkeypatch.setattr(_frameworks, "load", lambda _: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_arrays, "on_stream", On)
    assert not _arrays.is_capturing(array) and _arrays.is_capturing(array, 9) and current == [7]
    assert not _arrays.is_capturing(np.zeros(1))


def wrapped(source, lengths, pages=None):
    """The geometry, the table and copies of the pages of ``source`` under the caller's lengths."""
    pages = source.pages.copy() if pages is None else pages
    return ht.PagedKVCache.wrap(source.spec, pages, source.block_table, lengths)


def test_layers_that_share_lengths_do_not_advance_them_twice(rng):
    source, _, _ = filled_cache(rng, [40, 64], max_len=128)
    source.reserve(8)
    lengths, k = source.lengths.copy(), normal(rng, 2, KV_HEADS, DIM)
    first, second = (wrapped(source, lengths) for _ in range(2))
    first.append(k, k)
    before = second.pages.copy()
    for _ in range(2):
        with pytest.raises(ht.InvalidArgumentError, match="^lengths is shared .*: wrap these pages .* append_slots"):
            second.append(k, k)
    np.testing.assert_array_equal(second.pages, before)
    assert lengths.tolist() == [41, 65]
    slots = source.block_table[[0, 1], [0, 1]].astype(np.int64) * 64 + [40, 0]
    second.append_slots(k, k, slots)
    np.testing.assert_array_equal(second.pages, first.pages)
    np.testing.assert_array_equal(second.dequantize()[0], first.dequantize()[0])
    first.append(k, k)
    again = wrapped(source, lengths, first.pages)  # another view of the same cache
    again.append(k, k)
    assert lengths.tolist() == [43, 67]
    del first, again
    second.append(k, k)  # nobody else does any more
    assert lengths.tolist() == [44, 68]
    owner = wrapped(source, source.lengths)
    with pytest.raises(ht.InvalidArgumentError, match="^lengths is shared"):
        owner.append(k, k)


def test_layers_with_lengths_of_their_own(rng):
    source, _, _ = filled_cache(rng, [40, 64], max_len=128)
    source.reserve(1)
    k = normal(rng, 2, KV_HEADS, DIM)
    layers = [wrapped(source, source.lengths.copy()) for _ in range(3)]
    for layer in layers:
        layer.append(k, k)
        assert layer.lengths.tolist() == [41, 65]
    empty = ht.PagedKVCache(0, 64, spec=source.spec)
    for _ in range(2):
        ht.PagedKVCache.wrap(source.spec, empty.pages, empty.block_table, empty.lengths).append(k[:0], k[:0], [])


def test_torch_layers_that_share_lengths(rng):
    torch = pytest.importorskip("torch")
    import halftone.torch as hot

    source = ht.PagedKVCache(2, 64, kv_heads=KV_HEADS, head_dim=DIM, framework="torch")
    source.reserve(4)
    lengths, k = source.lengths.clone(), torch.from_numpy(normal(rng, 2, KV_HEADS, DIM))
    first, second = (
        ht.PagedKVCache.wrap(source.spec, source.pages.clone(), source.block_table, lengths) for _ in range(2)
    )
    hot.append(first, k, k)
    for append in (lambda: hot.append(second, k, k), lambda: second.append(k, k)):
        with pytest.raises(ht.InvalidArgumentError, match="^lengths is shared"):
            append()
    hot.append(first, k, k)
    assert lengths.tolist() == [2, 2] and not second.pages.any()
