"""Formats, geometry, the page pool, static scales, files and foreign rows."""

import copy
import json
import os
import pickle
import struct
import subprocess

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, filled_cache, normal

import halftone as ht


def test_format_builders_agree_with_the_names():
    assert ht.KVFormat.int4(group=32) == ht.KVFormat("int4-g32")
    assert ht.KVFormat.int4() == ht.KVFormat("int4-row")
    assert ht.KVFormat.int8() == ht.KVFormat("int8-head")
    assert ht.KVFormat.int8(granularity="tensor") == ht.KVFormat("int8-tensor")
    assert ht.KVFormat.fp8() == ht.KVFormat("fp8")
    assert ht.KVFormat.fp8(granularity="head") == ht.KVFormat("fp8-static-head")
    assert ht.KVFormat.bf16().granularity == "none"
    form = ht.KVFormat.int8(group=64, symmetric=False, scale_dtype="f32")
    assert (form.name, form.group_size, form.asymmetric) == ("int8-g64-asym-f32", 64, True)
    assert hash(form) == hash(ht.KVFormat("int8-g64-asym-f32")) and str(form) == form.name


def test_geometry():
    spec = ht.KVCacheSpec(2, 128, "int4-g32", page_size=16)
    assert spec.bytes_per_token == 320 and spec.page_bytes == 16 * 320
    assert spec.v_format == spec.k_format and spec.v_head_dim == 128
    assert spec == ht.KVCacheSpec(**json.loads(spec.key))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_formats_specs_and_plans_are_copied_and_pickled(copied):
    form = ht.KVFormat("int8-g64-asym-f32")
    assert copied(form) == form and copied(form).group_size == 64 and hash(copied(form)) == hash(form)
    spec = ht.KVCacheSpec(2, 128, form, "fp8", page_size=32, rotate_k=True)
    assert spec.page_bytes  # with its caches filled
    again = copied(spec)
    assert again == spec and again.key == spec.key and again.layout == spec.layout
    plan = ht.plan(spec, q_heads=8, batch=3, max_kv_len=64, q_dtype="f32")
    assert copied(plan) is plan


def test_decode_steps_deal_pages_when_they_need_them(rng):
    """One token for each: few steps look at every request, and those keep the books as an append with counts does."""
    options = dict(kv_heads=KV_HEADS, head_dim=DIM, page_size=16)
    cache, twin = (ht.PagedKVCache(3, 64, **options) for _ in range(2))
    k = normal(rng, 20, KV_HEADS, DIM)
    for each in (cache, twin):
        each.append(k, k, [15, 5, 0])
    for i in range(40):
        k = normal(rng, 3, KV_HEADS, DIM)
        cache.append(k, k)
        twin.append(k, k, [1, 1, 1])
        if i == 20:
            for each in (cache, twin):
                each.free(0)
        assert cache.host_lengths == twin.host_lengths == cache.lengths.tolist() == twin.lengths.tolist()
        np.testing.assert_array_equal(cache.block_table, twin.block_table)
    np.testing.assert_array_equal(cache.pages, twin.pages)
    cache.append(k[:0], k[:0], [0, 0, 0])
    assert cache.host_lengths == [19, 45, 40]
    for _ in range(19):
        cache.append(k, k)
    with pytest.raises(ht.OutOfRangeError, match="request 1 would have 65 tokens, but max_len is 64"):
        cache.append(k, k)
    assert cache.host_lengths == [38, 64, 59] == cache.lengths.tolist()


def test_pages_are_dealt_on_demand_and_come_back(rng):
    cache = ht.PagedKVCache(3, 256, kv_heads=KV_HEADS, head_dim=DIM, num_pages=5)
    k = normal(rng, 130, KV_HEADS, DIM)
    cache.append(k, k, [65, 1, 64])
    assert cache.host_lengths == [65, 1, 64] == cache.lengths.tolist()
    pages, lengths = cache.pages.copy(), cache.lengths.copy()
    with pytest.raises(ht.ResourceExhaustedError, match="num_pages is 5, of which 1 are free"):
        cache.append(k[:129], k[:129], [64, 64, 1])
    np.testing.assert_array_equal(cache.pages, pages)
    np.testing.assert_array_equal(cache.lengths, lengths)
    cache.free(0)
    assert cache.host_lengths == [0, 1, 64]
    cache.append(k[:129], k[:129], [0, 64, 65])
    q = normal(rng, 3, Q_HEADS, DIM)
    check(ht.attend(q, cache), None, q, *cache.dequantize(), [1, 1, 1], [0, 65, 129])


def test_reserve_deals_pages_ahead(rng):
    cache = ht.PagedKVCache(2, 128, kv_heads=KV_HEADS, head_dim=DIM)
    cache.reserve(100)
    table = cache.block_table.copy()
    assert sorted(table.ravel().tolist()) == [0, 1, 2, 3]
    for _ in range(3):
        k = normal(rng, 2, KV_HEADS, DIM)
        cache.append(k, k)
    np.testing.assert_array_equal(cache.block_table, table)
    cache.advance(7)
    assert cache.host_lengths == [10, 10]
    with pytest.raises(ht.OutOfRangeError, match="max_len is 128"):
        cache.reserve(119)


def test_wrapped_pages_and_slots(rng):
    source, k, v = filled_cache(rng, [70])
    pages = np.zeros((4, source.spec.page_bytes), np.uint8)
    table, lengths = np.array([[3, 1]], np.int32), np.array([70], np.int32)
    cache = ht.PagedKVCache.wrap(source.spec, pages, table, lengths)
    slots = np.concatenate([3 * 64 + np.arange(64), 64 + np.arange(6)]).astype(np.int64)
    cache.append_slots(k, v, slots)
    np.testing.assert_array_equal(pages[3], source.pages[0])
    for ours, theirs in zip(cache.dequantize(), source.dequantize()):
        np.testing.assert_array_equal(ours, theirs)
    assert cache.host_lengths == [70] and cache.max_len == 128
    with pytest.raises(ht.InvalidArgumentError, match="wraps the caller's"):
        cache.free(0)


def test_rope_is_applied_before_quantising(rng):
    positions = np.arange(5, 45, dtype=np.int32)
    angle = np.outer(np.arange(64), 10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    cache = ht.PagedKVCache(1, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format="fp16")
    k = normal(rng, 40, KV_HEADS, DIM)
    cache.append(k, k, rope=ht.Rope(cos, sin, positions))
    c, s = cos[positions][:, None], sin[positions][:, None]
    low, high = k[..., :32], k[..., 32:64]
    turned = np.concatenate([low * c - high * s, high * c + low * s, k[..., 64:]], -1)
    stored_k, stored_v = cache.dequantize()
    np.testing.assert_allclose(stored_k, turned, rtol=0, atol=4e-3)
    np.testing.assert_array_equal(stored_v, k.astype("f2").astype("f4"))


def test_static_scales_cover_the_sample(rng):
    x = normal(rng, 50, KV_HEADS, DIM)
    scale, minimum = ht.calibrate(x, "int8-static-head")
    np.testing.assert_allclose(scale, np.abs(x).max((0, 2)) / 127, rtol=1e-6)
    assert minimum is None
    scale, minimum = ht.calibrate(x, "int4-tensor")
    np.testing.assert_allclose(minimum, [x.min()], rtol=1e-6)
    with pytest.raises(ht.InvalidArgumentError):
        ht.calibrate(x, "int8-head")
    outputs = np.empty(KV_HEADS, np.float32), np.empty(KV_HEADS, np.float32)
    got = ht.calibrate(x, "int4-static-head", scale_out=outputs[0], min_out=outputs[1])
    assert got[0] is outputs[0] and got[1] is outputs[1]
    for ours, theirs in zip(got, ht.calibrate(x, "int4-static-head")):
        np.testing.assert_array_equal(ours, theirs)
    for bad, match in [
        ({"scale_out": outputs[0][:1]}, r"scale_out is f32 \[1\], but must be f32 \[2\]"),
        ({"scale_out": outputs[0].astype("f8")}, "scale_out is float64"),
        ({"scale_out": "x"}, "scale_out is a str"),
        ({"min_out": outputs[1]}, "min_out is given, but int8-head-static|min_out is given, but int8-static-head"),
    ]:
        with pytest.raises(ht.InvalidArgumentError, match=match):
            ht.calibrate(x, "int8-static-head", **bad)


def test_fbgemm_rows_round_trip(rng):
    cache, _, _ = filled_cache(rng, [64], k_format="int4-row")
    slots = np.arange(64, dtype=np.int64)
    rows = ht.export_fbgemm_int4(cache, "k", slots)
    assert rows.shape == (64, KV_HEADS, 4 + DIM // 2)
    before = cache.pages.copy()
    cache.pages[:] = 0
    ht.import_fbgemm_int4(cache, "k", rows, slots)
    ht.import_fbgemm_int4(cache, "v", ht.export_fbgemm_int4(filled_copy(cache, before), "v", slots), slots)
    np.testing.assert_array_equal(cache.pages[0], before[0])


def filled_copy(cache, pages):
    return ht.PagedKVCache.wrap(cache.spec, pages.copy(), cache.block_table, cache.lengths)


@pytest.mark.parametrize("name, largest", [("int8-head", 127), ("fp8-token-head", 448)])
def test_f32_scales_of_other_engines_are_converted_once(rng, name, largest):
    # docs/formats.md: the codes stay, the scales are rounded to f16.
    x = normal(rng, 60, KV_HEADS, DIM)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(largest)
    codes = x / scale
    if name == "int8-head":
        codes = np.rint(codes)
    else:
        codes = codes.astype(pytest.importorskip("ml_dtypes").float8_e4m3fn).astype(np.float32)
    theirs = codes * scale
    cache = ht.PagedKVCache(1, 64, kv_heads=KV_HEADS, head_dim=DIM, k_format=name)
    cache.append(theirs, theirs)
    ours = cache.dequantize()[0]
    rounded = scale.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(ours, codes * rounded)
    assert (np.abs(ours - theirs) <= np.abs(theirs) * 2**-11).all()


@pytest.mark.parametrize("name", ["int4-g32", "fp8"])
def test_files_round_trip(rng, tmp_path, name):
    pytest.importorskip("safetensors")
    x = normal(rng, 200, KV_HEADS, DIM)
    scale = ht.calibrate(x, name)[0] if ht.KVFormat(name).static_scale else None
    cache, _, _ = filled_cache(rng, [130, 0, 64], k_format=name, k_scale=scale, v_scale=scale, rotate_k=True)
    cache.to_safetensors(tmp_path / "cache.safetensors")
    again = ht.PagedKVCache.from_safetensors(tmp_path / "cache.safetensors", max_len=300)
    assert again.spec == cache.spec and again.host_lengths == [130, 0, 64] and again.max_len == 300
    for ours, theirs in zip(again.dequantize(), cache.dequantize()):
        np.testing.assert_array_equal(ours, theirs)
    assert os.listdir(tmp_path) == ["cache.safetensors"]


@pytest.mark.parametrize(
    "table, length, match",
    [
        ((9, 1), 100, r"block_table\[0, 0\] is 9"),
        ((0, -1), 100, r"block_table\[0, 1\] is -1"),
        ((0, 1), 129, r"lengths\[0\] is 129, but the block table holds 128"),
        ((0, 1), -1, r"lengths\[0\] is -1"),
    ],
)
def test_files_of_wrapped_caches_hold_live_pages_only(rng, tmp_path, table, length, match):
    pytest.importorskip("safetensors")
    source, _, _ = filled_cache(rng, [100])
    cache = ht.PagedKVCache.wrap(
        source.spec, source.pages[:2], np.array([table], np.int32), np.array([length], np.int32)
    )
    for read in (lambda: cache.to_safetensors(tmp_path / "x"), cache.dequantize):
        with pytest.raises(ht.OutOfRangeError, match=match):
            read()
    assert not os.listdir(tmp_path)


def test_files_that_cannot_be_written(rng, tmp_path):
    pytest.importorskip("safetensors")
    cache, _, _ = filled_cache(rng, [3])
    with pytest.raises(OSError, match="path .* cannot be written .*: choose a folder that exists"):
        cache.to_safetensors(tmp_path / "absent" / "x.safetensors")
    with pytest.raises(OSError):
        cache.to_safetensors(tmp_path)  # a folder
    with pytest.raises(ht.InvalidArgumentError, match="path is 3"):
        cache.to_safetensors(3)
    with pytest.raises(ht.InvalidArgumentError, match="batch 0"):
        ht.PagedKVCache(0, 64, kv_heads=2, head_dim=128).to_safetensors(tmp_path / "x.safetensors")
    assert not os.listdir(tmp_path)


def test_the_command_reads_our_files(rng, tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    command = os.environ.get("HALFTONE_COMMAND")
    if not command:
        pytest.skip("HALFTONE_COMMAND does not name the halftone command")
    cache, _, _ = filled_cache(rng, [100])
    cache.to_safetensors(tmp_path / "packed.safetensors", prefix="layers")
    packed, unpacked = tmp_path / "packed.safetensors", tmp_path / "plain.safetensors"
    subprocess.run([command, "dequantize", packed, unpacked, "--dtype", "f32"], check=True)
    plain = load_file(unpacked)
    k, v = cache.dequantize()
    np.testing.assert_array_equal(plain["layers.0.k"], k)
    np.testing.assert_array_equal(plain["layers.0.v"], v)


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_file(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def break_spec(header):
    header["__metadata__"]["request.0.spec"] = "[" * 5000


def break_length(header):
    header["__metadata__"]["request.0.spec"] = header["__metadata__"]["request.0.spec"].replace("128", "64", 1)


def drop_layer(header):
    del header["__metadata__"]["request.0.spec"]


@pytest.mark.parametrize("damage", [break_spec, break_length, drop_layer])
def test_contradictory_files_are_refused(rng, tmp_path, damage):
    pytest.importorskip("safetensors")
    path = tmp_path / "cache.safetensors"
    filled_cache(rng, [100])[0].to_safetensors(path)
    header, body = header_of(path)
    damage(header)
    write_file(path, header, body)
    with pytest.raises(ht.CorruptFileError, match="cache.safetensors"):
        ht.PagedKVCache.from_safetensors(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_files_are_refused(rng, tmp_path, keep):
    pytest.importorskip("safetensors")
    path = tmp_path / "cache.safetensors"
    filled_cache(rng, [100])[0].to_safetensors(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ht.CorruptFileError):
        ht.PagedKVCache.from_safetensors(path)


def test_other_files_are_refused(rng, tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(ht.InvalidArgumentError, match="no packed cache"):
        ht.PagedKVCache.from_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        ht.PagedKVCache.from_safetensors(tmp_path)
