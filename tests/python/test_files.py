"""Cache files: what is written is complete, what is read is checked, and neither needs more than what was saved."""

import errno
import os
import stat
import sys
import threading

import numpy as np
import pytest
from support import DIM, KV_HEADS, filled_cache, normal

import halftone as ht
from halftone import _files

SPEC = dict(kv_heads=KV_HEADS, head_dim=DIM, page_size=16)


@pytest.fixture
def load():
    pytest.importorskip("safetensors")
    return ht.PagedKVCache.from_safetensors


@pytest.fixture
def small(rng):
    return filled_cache(rng, [3, 20], max_len=64, page_size=16)[0]


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture(params=["unnamed", "named"])
def hiding(request, monkeypatch):
    """Where the data waits for its name: some file systems have no O_TMPFILE."""
    if request.param == "named":
        real = os.open

        def refuse(path, flags, *rest):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *rest)

        monkeypatch.setattr(_files.os, "open", refuse)
    return request.param


def test_a_file_has_the_mode_of_any_other(small, tmp_path, umask, hiding):
    path = tmp_path / "x.safetensors"
    small.to_safetensors(path)
    assert mode_of(path) == 0o640
    for mode in (0o600, 0o664):
        path.chmod(mode)
        small.to_safetensors(path)
        assert mode_of(path) == mode
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_followed(small, tmp_path, load, dangling):
    (tmp_path / "real").mkdir()
    (tmp_path / "links").mkdir()
    target, link = tmp_path / "real" / "x.safetensors", tmp_path / "links" / "x.safetensors"
    if not dangling:
        target.write_bytes(b"old")
    link.symlink_to(target)
    small.to_safetensors(link)
    assert link.is_symlink() and not target.is_symlink()
    assert load(target).host_lengths == [3, 20]
    assert os.listdir(tmp_path / "real") == os.listdir(tmp_path / "links") == ["x.safetensors"]


def test_threads_may_save_to_one_folder_and_one_file(small, tmp_path, load, monkeypatch, hiding):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in every container
    failures = []

    def save(i):
        try:
            for repeat in range(40):
                small.to_safetensors(tmp_path / ("shared" if repeat % 2 else f"own{i}"))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(os.listdir(tmp_path)) == sorted(["shared", *(f"own{i}" for i in range(8))])
    assert load(tmp_path / "shared").host_lengths == [3, 20]


@pytest.mark.parametrize("at", ["write", "fsync", "replace", "fchmod"])
def test_a_failure_leaves_the_old_file(small, tmp_path, monkeypatch, hiding, at):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_files.os, at, fail)
    with pytest.raises(OSError, match="path .* cannot be written .No space left.*: free some space") as caught:
        small.to_safetensors(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def test_data_is_synced_before_it_gets_its_name(small, tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(_files.os, name, lambda *a, n=name, r=real: (done.append(n), r(*a))[1])
    small.to_safetensors(tmp_path / "x")
    assert done == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_what_is_no_file_is_written_as_it_is(small, tmp_path, load):
    small.to_safetensors(os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(OSError, match="'/dev/full' cannot be written .*: free some space or name another place"):
        small.to_safetensors("/dev/full")
    os.mkfifo(tmp_path / "fifo")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "fifo").read_bytes()))
    reader.start()
    small.to_safetensors(tmp_path / "fifo")
    reader.join()
    (tmp_path / "x").write_bytes(received[0])
    assert load(tmp_path / "x").host_lengths == [3, 20]


@pytest.mark.parametrize(
    "path, error, match",
    [
        ("absent/x", FileNotFoundError, "choose a folder that exists"),
        (".", IsADirectoryError, "name a file in it"),
        ("", ht.InvalidArgumentError, "^path is ''"),
        ("a\ud800", ht.InvalidArgumentError, r"^path is 'a\\ud800', but must be valid UTF-8"),
        (b"a\xff", ht.InvalidArgumentError, "^path is .* valid UTF-8"),
        ("a\0b", ht.InvalidArgumentError, r"^path is 'a\\x00b'"),
        (3, ht.InvalidArgumentError, "^path is 3"),
    ],
)
def test_paths(small, tmp_path, monkeypatch, load, path, error, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        small.to_safetensors(path)
    with pytest.raises(error if error is ht.InvalidArgumentError else FileNotFoundError):
        load(path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("prefix", ["\ud800", "a\0", 3, None])
def test_prefixes(small, tmp_path, prefix):
    with pytest.raises(ht.InvalidArgumentError, match="^prefix is"):
        small.to_safetensors(tmp_path / "x", prefix=prefix)
    assert not os.listdir(tmp_path)


def test_safetensors_reads_what_we_write(rng, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    scale, low = np.array([0.5, 0.25], np.float32), np.array([-1.0, -2.0], np.float32)
    options = dict(k_format="int8-static-head-asym", v_format="bf16", k_scale=scale, k_min=low)
    cache, _, _ = filled_cache(rng, [20, 0, 16], max_len=64, page_size=16, **options)
    cache.to_safetensors(tmp_path / "x", prefix="caché")
    tensors = numpy.load_file(tmp_path / "x")
    assert len(tensors) == 3 * 4
    np.testing.assert_array_equal(tensors["caché.0.pages"], cache.pages[cache.block_table[0, :2]])
    assert tensors["caché.1.pages"].tolist() == [[0] * cache.spec.page_bytes]
    for i, length in enumerate([20, 0, 16]):
        assert tensors[f"caché.{i}.lengths"].tolist() == [length]
        np.testing.assert_array_equal(tensors[f"caché.{i}.k_scale"], scale)
        np.testing.assert_array_equal(tensors[f"caché.{i}.k_min"], low)


def test_saving_needs_no_safetensors(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    small.to_safetensors(tmp_path / "x")
    with pytest.raises(ht.UnsupportedError, match=r"pip install 'halftone-attention\[safetensors\]'"):
        ht.PagedKVCache.from_safetensors(tmp_path / "x")


def test_wrapped_arrays_that_do_not_fit_the_spec_are_not_saved(small, tmp_path):
    arrays = dict(pages=small.pages, block_table=small.block_table, lengths=small.lengths)
    for bad, match in [
        ({"pages": small.pages.astype("f4")}, "cache.pages is f32, but must be uint8"),
        ({"pages": small.pages[:, :-16]}, "cache.pages has rows of"),
        ({"block_table": small.block_table.astype("i8")}, "cache.block_table is int64"),
        ({"lengths": small.lengths.astype("i8")}, "cache.lengths is int64"),
    ]:
        cache = ht.PagedKVCache.wrap(small.spec, **{**arrays, **bad})
        with pytest.raises(ht.InvalidArgumentError, match=match):
            cache.to_safetensors(tmp_path / "x")
    spec = ht.KVCacheSpec(KV_HEADS, DIM, "fp8", page_size=16)
    pages = np.zeros((8, spec.page_bytes), np.uint8)
    scales = dict(k_scale=np.ones(1, np.float16), v_scale=np.ones(1, np.float32))
    cache = ht.PagedKVCache.wrap(spec, pages, small.block_table, small.lengths, **scales)
    with pytest.raises(ht.InvalidArgumentError, match="cache.k_scale is f16, but must be f32"):
        cache.to_safetensors(tmp_path / "x")
    assert not os.listdir(tmp_path)


def test_a_ragged_pool_is_loaded_into_as_many_bytes(rng, tmp_path, load):
    lengths = [1000, *[0, 1, 16, 17] * 8]
    live = sum(-(-n // 16) for n in lengths)
    cache, _, _ = filled_cache(rng, lengths, max_len=1024, page_size=16, num_pages=live + 5)
    cache.to_safetensors(tmp_path / "x")
    again = load(tmp_path / "x")
    assert again.num_pages == live and again.max_len == 1008 and again.host_lengths == lengths
    for ours, theirs in zip(again.dequantize(), cache.dequantize()):
        np.testing.assert_array_equal(ours, theirs)
    x = normal(rng, 1, KV_HEADS, DIM)
    with pytest.raises(ht.ResourceExhaustedError, match=f"num_pages is {live}, of which 0 are free"):
        again.append(x, x, [0, 1, *[0] * (len(lengths) - 2)])
    with pytest.raises(ht.ResourceExhaustedError, match="num_pages is 5"):
        load(tmp_path / "x", num_pages=5)
    assert load(tmp_path / "x", max_len=1100).num_pages == 69 * len(lengths)
    roomy = load(tmp_path / "x", num_pages=live + 2, max_len=1100)
    roomy.append(x, x, [0, 1, *[0] * (len(lengths) - 2)])
    assert roomy.num_pages == live + 2 and roomy.host_lengths[:2] == [1000, 1]
    with pytest.raises(ht.OutOfRangeError, match="request 0 would have 1000 tokens, but max_len is 999"):
        load(tmp_path / "x", max_len=999)
    assert load(tmp_path / "x", num_pages=live).num_pages == live


def test_requests_without_tokens_are_loaded(rng, tmp_path, load):
    cache = ht.PagedKVCache(2, 64, **SPEC)
    cache.to_safetensors(tmp_path / "x")
    again = load(tmp_path / "x")
    assert again.num_pages == 0 and again.host_lengths == [0, 0] and again.dequantize()[0].shape == (0, KV_HEADS, DIM)
    assert not ht.attend(normal(rng, 2, 4, DIM), again).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -0.5, 1e-40, 1e38])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_static_scales_of_a_file_are_checked(rng, tmp_path, load, name, value):
    scales = dict(k_scale=np.array([0.5], np.float32), v_scale=np.array([0.25], np.float32))
    cache, _, _ = filled_cache(rng, [20], max_len=64, page_size=16, k_format="int8-tensor", **scales)
    cache.to_safetensors(tmp_path / "x")
    assert load(tmp_path / "x").host_lengths == [20]
    getattr(cache, name)[0] = value
    cache.to_safetensors(tmp_path / "x")
    with pytest.raises(ht.CorruptFileError, match=rf"x', layer 'request.0': cache.{name}\[0\] is .*, but must be"):
        load(tmp_path / "x")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_static_mins_of_a_file_are_checked(rng, tmp_path, load, value):
    scales = dict(k_scale=np.ones(2, np.float32), k_min=np.array([-1, -1], np.float32))
    options = dict(k_format="int4-static-head-asym", v_format="bf16", page_size=16)
    cache, _, _ = filled_cache(rng, [20], max_len=64, **options, **scales)
    cache.k_min[1] = value
    cache.to_safetensors(tmp_path / "x")
    with pytest.raises(ht.CorruptFileError, match=r"cache.k_min\[1\] is"):
        load(tmp_path / "x")
