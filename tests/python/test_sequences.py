"""Operations on the requests of a cache: its bytes, and results over it, are those of one built from the tokens."""

import copy
import pickle

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, normal

import halftone as ht
from halftone import _arrays

PAGE = 16
FRAMEWORKS = ["numpy", "torch"]


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param)
    return request.param


class Requests:
    """A cache, and the tokens that each of its requests should hold."""

    def __init__(self, rng, batch, framework="numpy", max_len=128, **options):
        self.rng, self.framework = rng, framework
        options = {"kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE, "k_format": "int8-g32", **options}
        self.options = dict(options, max_len=max_len)
        self.cache = ht.PagedKVCache(batch, framework=framework, **self.options)
        self.k = [normal(rng, 0, KV_HEADS, DIM) for _ in range(batch)]
        self.v = list(self.k)

    def array(self, x):
        return x if self.framework == "numpy" else pytest.importorskip("torch").from_numpy(x)

    def append(self, counts, **options):
        k, v = (normal(self.rng, sum(counts), KV_HEADS, DIM) for _ in range(2))
        self.cache.append(self.array(k), self.array(v), *([] if "cu_seqlens" in options else [counts]), **options)
        at = np.cumsum([0, *counts])
        for i in range(len(counts)):
            self.k[i] = np.concatenate([self.k[i], k[at[i] : at[i + 1]]])
            self.v[i] = np.concatenate([self.v[i], v[at[i] : at[i + 1]]])

    def select(self, slices):
        """Request i becomes the first ``length`` tokens of ``source``, for (source, length) in ``slices``."""
        self.k, self.v = ([x[source][:length] for source, length in slices] for x in (self.k, self.v))

    def check(self, attended=True, cache=None):
        cache = self.cache if cache is None else cache
        lengths = [len(x) for x in self.k]
        assert cache.host_lengths == lengths == _arrays.to_list(cache.lengths)
        fresh = ht.PagedKVCache(len(lengths), **{**self.options, "num_pages": None})
        fresh.append(np.concatenate(self.k), np.concatenate(self.v), lengths)
        for ours, theirs in zip(cache.dequantize(), fresh.dequantize()):
            np.testing.assert_array_equal(ours, theirs)
        if attended:
            q = normal(self.rng, len(lengths), Q_HEADS, DIM)
            np.testing.assert_array_equal(ht.attend(self.array(q), cache), ht.attend(q, fresh))


def references(cache):
    """Of each page, how many rows of the books name it; and that the pool counts alike."""
    pool = cache._sequences.pool
    counts = np.zeros(cache.num_pages, int)
    for row in pool.rows():
        np.add.at(counts, [page for page in row if page >= 0], 1)
    assert counts.tolist() == [pool.references(page) for page in range(cache.num_pages)]
    assert cache.free_pages == (counts == 0).sum()
    return counts


def test_any_operations_give_a_cache_of_the_tokens(rng, framework):
    choose = np.random.default_rng(7)
    for round in range(6):
        batch = 4
        requests = Requests(rng, batch, framework, num_pages=40)
        for _ in range(25):
            lengths = [len(x) for x in requests.k]
            which = choose.integers(6)
            if which <= 1:
                counts = [min(int(n), 128 - length) for n, length in zip(choose.integers(0, 20, batch), lengths)]
                try:
                    requests.append(counts)
                except ht.ResourceExhaustedError:
                    requests.cache.free(0)
                    requests.select([(0, 0), *((i, None) for i in range(1, batch))])
            elif which == 2:
                kept = [max(0, n - int(choose.integers(9))) for n in lengths]
                requests.cache.truncate(kept, keep_pages=bool(choose.integers(2)))
                requests.select(list(enumerate(kept)))
            elif which == 3:
                src, length = int(choose.integers(batch)), int(choose.integers(129))
                dst = [i for i in range(batch) if i != src and choose.integers(2)]
                length = min(length, lengths[src])
                requests.cache.fork(src, dst, length=length)
                requests.select([(src, length) if i in dst else (i, None) for i in range(batch)])
            elif which == 4:
                index = choose.integers(0, batch, batch)
                requests.cache.reorder(requests.array(index))
                requests.select([(i, None) for i in index])
            elif not any(lengths):
                continue
            else:
                request = int(choose.integers(batch))
                requests.cache.free(request)
                requests.select([(i, 0 if i == request else None) for i in range(batch)])
            references(requests.cache)
            requests.check(attended=round == 0)
        for i in range(batch):
            requests.cache.free(i)
        assert requests.cache.free_pages == 40


def test_the_prompt_of_samples_is_shared_until_they_part(rng, framework):
    requests = Requests(rng, 4, framework)
    requests.append([40, 0, 0, 0])
    pages = requests.cache.pages[:3] + 0
    free = requests.cache.free_pages
    requests.cache.fork(0, [1, 2, 3])
    assert requests.cache.free_pages == free
    requests.select([(0, None)] * 4)
    requests.check()
    requests.append([1, 1, 1, 1])
    requests.check()
    assert requests.cache.free_pages == free - 3  # one page of three is copied for three of four
    np.testing.assert_array_equal(requests.cache.pages[:2], pages[:2])
    np.testing.assert_array_equal(references(requests.cache)[:2], 4)


def test_a_reorder_copies_at_most_a_page_of_each_request(rng, monkeypatch):
    copied, written = [], []
    copy_rows, put = _arrays.copy_rows, _arrays.put
    monkeypatch.setattr(_arrays, "copy_rows", lambda x, c: (copied.extend(c), copy_rows(x, c))[1])
    monkeypatch.setattr(_arrays, "put", lambda x, e: (written.extend(e), put(x, e))[1])
    requests = Requests(rng, 4, max_len=8192, num_pages=560, k_format="int4-row")
    requests.append([8000, 0, 0, 0])
    requests.cache.fork(0, [1, 2, 3])
    requests.select([(0, None)] * 4)
    requests.append([5, 5, 5, 5])
    for index in ([1, 1, 0, 3], [3, 2, 1, 0], [2, 2, 2, 2]):
        copied.clear(), written.clear()
        requests.cache.reorder(index)
        assert copied == [] and len(written) <= 4  # the beams share all pages but the last
        requests.select([(i, None) for i in index])
        requests.append([1, 1, 1, 1])
        assert len(copied) <= 4
    requests.check()


def test_drafts_are_rolled_back(rng, framework):
    requests = Requests(rng, 2, framework)
    requests.append([14, 30])
    requests.cache.reserve(40)
    free = requests.cache.free_pages
    for accepted in ([1, 5], [3, 1], [5, 5]):
        before = requests.cache.host_lengths
        requests.append([5, 5])
        lengths = [n + a for n, a in zip(before, accepted)]
        requests.cache.truncate(lengths, keep_pages=True)
        requests.select(list(enumerate(lengths)))
        assert requests.cache.free_pages == free
        requests.check()
    requests.cache.truncate(20)  # at most
    requests.select([(0, 20), (1, 20)])
    requests.check()
    assert requests.cache.free_pages == requests.cache.num_pages - 4


@pytest.mark.parametrize("clamped", [False, True])
def test_a_window_does_not_miss_evicted_pages(rng, q, clamped):
    window, requests = 40, Requests(rng, 2, clamped=clamped)
    cache, options = requests.cache, dict(causal=True, window_left=40)
    requests.append([100, 30])
    for _ in range(3):
        cache.evict_before([n - window for n in cache.host_lengths])
        requests.append([5, 1])
        lengths = [len(x) for x in requests.k]
        drafts = normal(rng, 6, Q_HEADS, DIM)
        cu = np.array([0, 5, 6], np.int32)
        out = ht.attend(drafts, cache, cu_q=cu, **options)
        fresh = ht.PagedKVCache(2, **requests.options)
        fresh.append(np.concatenate(requests.k), np.concatenate(requests.v), lengths)
        np.testing.assert_array_equal(out, ht.attend(drafts, fresh, cu_q=cu, **options))
        check(out, None, drafts, *fresh.dequantize(), [5, 1], lengths, **options)
    assert cache.status is None or cache.status.tolist() == [0]
    assert cache._sequences.pool.row(0)[:4] == [-1] * 4 == cache.block_table[0, :4].tolist()
    assert references(cache).sum() == cache.num_pages - cache.free_pages == 4 + 3
    if clamped:
        ht.attend(q, cache)
        assert cache.status.tolist() == [1]
    else:
        with pytest.raises(ht.OutOfRangeError, match=r"block_table\[0, 0\] is -1"):
            ht.attend(q, cache)
        with pytest.raises(ht.OutOfRangeError, match=r"block_table\[0, 0\] is -1"):
            cache.dequantize()
    with pytest.raises(ht.OutOfRangeError, match="the first 64 tokens of request 0 were evicted"):
        cache.truncate([40, 30])
    cache.evict_before(20)
    cache.fork(0, 1)
    cache.append(*[normal(rng, 2, KV_HEADS, DIM)] * 2)
    twin = pickle.loads(pickle.dumps(cache))
    np.testing.assert_array_equal(ht.attend(q, twin, **options), ht.attend(q, cache, **options))
    cache.truncate([0, 0])
    assert cache.free_pages == cache.num_pages


def test_batches_grow_and_shrink(rng, framework):
    requests = Requests(rng, 2, framework, num_pages=30)
    requests.append([20, 33])
    old = requests.cache.lengths
    for batch in (5, 1, 3):
        requests.cache.resize(batch)
        requests.k = (requests.k + [requests.k[0][:0]] * 5)[:batch]
        requests.v = (requests.v + [requests.v[0][:0]] * 5)[:batch]
        assert requests.cache.batch == batch == requests.cache.block_table.shape[0]
        requests.append([3] * batch)
        requests.check()
        requests.append([1] * batch)  # the running sums of decode are made anew
        references(requests.cache)
    assert _arrays.to_list(old) == [20, 33] and requests.cache.num_pages == 30
    other = ht.PagedKVCache(1, 64, spec=requests.cache.spec, framework=framework)
    mine = ht.PagedKVCache.wrap(other.spec, other.pages, other.block_table, old[:1], clamped=True)
    mine.append(*[requests.array(normal(rng, 1, KV_HEADS, DIM))] * 2)  # nobody else advances them any more
    assert _arrays.to_list(old) == [21, 33]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: x.clone(), lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_caches_of_their_own(rng, framework, copied):
    scale = np.array([0.05], np.float32)
    requests = Requests(rng, 3, framework, num_pages=20, k_format="int8-tensor", k_scale=scale, v_scale=scale)
    requests.append([40, 3, 0])
    requests.cache.fork(0, 2)
    requests.select([(0, None), (1, None), (0, None)])
    twin = copied(requests.cache)
    assert (twin.spec, twin.framework, twin.max_len) == (requests.cache.spec, framework, 128)
    assert references(twin).tolist() == references(requests.cache).tolist()
    requests.check(cache=twin)
    requests.cache.truncate([5, 0, 7])
    requests.check(cache=twin)
    own = twin.dequantize()[0] + 0
    requests.select([(0, 5), (1, 0), (0, 7)])
    requests.append([30, 30, 30])
    np.testing.assert_array_equal(twin.dequantize()[0], own)
    twin.append(*[requests.array(normal(rng, 3, KV_HEADS, DIM))] * 2)
    assert twin.host_lengths == [41, 4, 41]
    other = copied(requests.cache)
    other.append(*[requests.array(normal(rng, 3, KV_HEADS, DIM))] * 2)  # on pages that it has
    requests.check()


def test_copies_of_wrapped_caches(rng, q):
    source = Requests(rng, 2)
    source.append([20, 33])
    arrays = source.cache.pages, source.cache.block_table, source.cache.lengths.copy()
    cache = ht.PagedKVCache.wrap(source.cache.spec, *arrays, clamped=True)
    for twin in (cache.clone(), pickle.loads(pickle.dumps(cache))):
        assert twin.clamped and twin._sequences is None and twin.pages is not cache.pages
        np.testing.assert_array_equal(ht.attend(q, twin), ht.attend(q, cache))
        twin.lengths[0] += 1
        assert cache.host_lengths == [20, 33]


def test_running_sums_instead_of_counts(rng, framework):
    requests = Requests(rng, 3, framework)
    for counts in ([5, 0, 20], [1, 1, 1], [0, 30, 2]):
        requests.append(counts, cu_seqlens=requests.array(np.cumsum([0, *counts], dtype=np.int32)))
        requests.check()
    k = requests.array(normal(rng, 4, KV_HEADS, DIM))
    for sums, match in [([0, 1, 2, 3], "from 0 to 3, but must rise from 0 to the 4"), ([0, 3, 2, 4], "must rise"),
                        ([1, 1, 2, 4], "from 1 to 4"), ([0, 4], "has 2 entries, but must have 4")]:  # fmt: skip
        with pytest.raises(ht.InvalidArgumentError, match=f"^cu_seqlens .*{match}"):
            requests.cache.append(k, k, cu_seqlens=requests.array(np.array(sums, np.int32)))
    with pytest.raises(ht.InvalidArgumentError, match="^cu_seqlens is given beside counts"):
        requests.cache.append(k, k, [4, 0, 0], cu_seqlens=requests.array(np.array([0, 4, 4, 4], np.int32)))
    requests.check()


def test_lengths_that_only_the_device_knows(rng, monkeypatch):
    """As on a GPU, where running sums are read only when a request may lack room."""
    requests = Requests(rng, 2, num_pages=16)
    cache, asked = requests.cache, []
    to_list = _arrays.to_list
    cache.reserve(50)
    cache.__dict__["device"] = "cuda:0"
    monkeypatch.setattr(_arrays, "to_list", lambda x: (asked.append(1), to_list(x))[1])

    def append(*counts):
        requests.append(list(counts), cu_seqlens=np.cumsum([0, *counts], dtype=np.int32))

    for _ in range(5):
        append(3, 7)
    assert asked == []  # 50 of 64 tokens on 4 pages each, at most
    append(10, 5)  # might be 65 tokens of a request, for all that the host knows: it asks for the lengths
    assert len(asked) == 1
    append(10, 20)  # might be 70 of request 1 even so: it asks for the running sums, too
    assert len(asked) == 3
    cache.truncate([20, 35])
    requests.select([(0, 20), (1, 35)])
    cache.__dict__["device"] = "cpu"
    requests.check()


def test_a_failure_changes_neither_books_nor_arrays(rng, monkeypatch):
    requests = Requests(rng, 3)
    requests.append([20, 5, 0])
    before = [x.copy() for x in (requests.cache.block_table, requests.cache.lengths)]
    real = _arrays.put

    def fail_once(target, entries):
        monkeypatch.setattr(_arrays, "put", real)
        real(target, entries[:1])
        raise KeyboardInterrupt

    calls = (
        lambda c: c.fork(0, [1, 2]),
        lambda c: c.reorder([1, 0, 2]),
        lambda c: c.truncate([3, 3, 0]),
        lambda c: c.free(0),
        lambda c: c.evict_before([16, 0, 0]),
        lambda c: c.reserve(60),
    )
    for call in calls:
        monkeypatch.setattr(_arrays, "put", fail_once)
        with pytest.raises(KeyboardInterrupt):
            call(requests.cache)
        for array, old in zip((requests.cache.block_table, requests.cache.lengths), before):
            used = old >= 0 if old.ndim == 2 else slice(None)
            np.testing.assert_array_equal(array[used], old[used])
        references(requests.cache)
        requests.check()


def test_operations_within_a_capture(rng, monkeypatch):
    requests = Requests(rng, 2)
    requests.append([20, 5])
    monkeypatch.setattr(_arrays, "is_capturing", lambda *_: True)
    cache = requests.cache
    for call in (
        lambda: cache.fork(0, 1), lambda: cache.reorder([1, 0]), lambda: cache.truncate(3), lambda: cache.free(0),
        lambda: cache.evict_before(16), lambda: cache.resize(3), lambda: cache.reserve(60),
    ):  # fmt: skip
        with pytest.raises(ht.InvalidArgumentError, match="capture"):
            call()
    monkeypatch.undo()
    requests.check()


def test_arguments(rng):
    requests = Requests(rng, 2)
    requests.append([20, 5])
    cache, table = requests.cache, requests.cache.block_table.copy()
    for call, error, match in [
        (lambda: cache.fork(2, 0), ht.OutOfRangeError, "^src is 2"),
        (lambda: cache.fork(0, [0]), ht.InvalidArgumentError, r"^dst\[0\] is 0, which is src"),
        (lambda: cache.fork(0, "x"), ht.InvalidArgumentError, "^dst is 'x'"),
        (lambda: cache.fork(0, 1, length=21), ht.OutOfRangeError, "^length is 21, but request 0 has 20"),
        (lambda: cache.fork(0, 1, length=-1), ht.InvalidArgumentError, "^length is -1"),
        (lambda: cache.reorder([0, 2]), ht.OutOfRangeError, r"^index\[1\] is 2"),
        (lambda: cache.reorder([0.5, 1]), ht.InvalidArgumentError, r"^index\[0\] is 0.5"),
        (lambda: cache.reorder([[0, 1]]), ht.InvalidArgumentError, r"^index\[0\]"),
        (lambda: cache.truncate([21, 5]), ht.OutOfRangeError, r"^lengths\[0\] is 21"),
        (lambda: cache.truncate(-1), ht.OutOfRangeError, r"^lengths\[0\] is -1"),
        (lambda: cache.truncate([1]), ht.InvalidArgumentError, "^lengths has 1 entries"),
        (lambda: cache.truncate(1, keep_pages=1), ht.InvalidArgumentError, "^keep_pages is 1"),
        (lambda: cache.evict_before([21, 0]), ht.OutOfRangeError, r"^positions\[0\] is 21"),
        (lambda: cache.evict_before(None), ht.InvalidArgumentError, "^positions is None"),
        (lambda: cache.resize(-1), ht.InvalidArgumentError, "^batch is -1"),
        (lambda: cache.resize(2**24 + 1), ht.InvalidArgumentError, "^batch is 16777217"),
        (lambda: cache.advance(40), ht.OutOfRangeError, r"^counts\[0\] is 40, but the pages .* reserve"),
    ]:
        with pytest.raises(error, match=match):
            call()
    np.testing.assert_array_equal(cache.block_table, table)
    requests.check()
    view = ht.PagedKVCache.wrap(cache.spec, cache.pages, cache.block_table, cache.lengths)
    for call in (
        lambda: view.fork(0, 1), lambda: view.truncate(3), lambda: view.reorder([0, 1]), lambda: view.resize(3),
        lambda: view.evict_before(3), lambda: view.reserve(3), lambda: view.free_pages,
    ):  # fmt: skip
        with pytest.raises(ht.InvalidArgumentError, match="deals its own pages, but this one wraps the caller's"):
            call()
