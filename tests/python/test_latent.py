"""Latent (MLA) caches: geometry, the bytes of a token, append, dequantize, files and errors."""

import copy
import json
import os
import pickle
import re
import subprocess

import numpy as np
import pytest

import halftone as ht


def token_values(record):
    """The 656 bytes of one token as FlashMLA reads them: 512 e4m3, 4 f32 scales, 64 bf16."""
    codes, scales = record[:512].astype(np.int64), record[512:528].view("<f4")
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    latent = np.where(codes >> 7, -magnitude, magnitude) * np.repeat(scales.astype(np.float64), 128)
    rotary = (record[528:].view("<u2").astype(np.uint32) << 16).view("<f4")
    return np.concatenate([latent, rotary])


def filled(rng, counts=(5, 70), **options):
    cache = ht.PagedKVCache(len(counts), 200, spec=ht.KVCacheSpec.latent(**options))
    k = rng.standard_normal((sum(counts), 1, cache.spec.head_dim)).astype(np.float32)
    cache.append(k, counts=list(counts))
    return cache, k


def test_geometry():
    spec = ht.KVCacheSpec.latent()
    assert (spec.kv_heads, spec.head_dim, spec.v_head_dim, spec.rope_dim) == (1, 576, 512, 64)
    assert spec.bytes_per_token == 656 and spec.page_bytes == 64 * 656 and spec.layout["row_bytes"] == 656
    assert spec == ht.KVCacheSpec(**json.loads(spec.key))
    for again in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert again == spec and again.key == spec.key
    assert "rope_dim" not in ht.KVCacheSpec(2, 128).key and ht.KVCacheSpec(2, 128).layout["row_bytes"] == 0


def test_spans():
    latent, rotary = ht.KVCacheSpec.latent().spans
    assert (str(latent.format), latent.dims, latent.order, latent.k_first, latent.v_first) == (
        "fp8-g128-f32", 512, "rows", 0, 0)  # fmt: skip
    assert (str(rotary.format), rotary.dims, rotary.k_first, rotary.v_first) == ("bf16", 64, 512, None)
    assert (latent.param_offset, rotary.data_offset) == (512, 528)
    spec = ht.KVCacheSpec(2, 128, "int4-g32", "bf16", rotate_k=True)
    k, v = spec.spans
    assert (k.order, k.rotate, k.k_first, k.v_first) == ("fragments", True, 0, None)
    assert (v.order, v.rotate, v.k_first, v.v_first) == ("rows", False, None, 0)
    assert v.data_offset == spec.layout["v_data_offset"] and k.param_offset == spec.layout["k_param_offset"]


def test_tokens_are_records_of_656_bytes(rng):
    cache, k = filled(rng, page_size=16)
    k_back, v_back = cache.dequantize()
    assert k_back.shape == (75, 1, 576) and v_back.shape == (75, 1, 512)
    assert np.array_equal(k_back[..., :512], v_back)
    assert np.all(np.abs(k_back - k) <= np.abs(k).max() * 2.0**-4)
    records = cache.pages.reshape(-1, 656)
    row = 0
    for request, length in enumerate((5, 70)):
        for position in range(length):
            slot = cache.block_table[request, position // 16] * 16 + position % 16
            assert np.allclose(token_values(records[slot]), k_back[row, 0], rtol=1e-6, atol=0)
            row += 1


def test_slots_and_rope_give_the_same_bytes(rng):
    cache, twin = (ht.PagedKVCache(1, 64, spec=ht.KVCacheSpec.latent(page_size=16)) for _ in range(2))
    k = rng.standard_normal((20, 1, 576)).astype(np.float32)
    angles = rng.standard_normal((32, 32)).astype(np.float32)
    cos, sin, positions = np.cos(angles), np.sin(angles), np.arange(20, dtype=np.int32)
    rotated = k.copy()
    a, b, c, s = k[:, 0, 512:544], k[:, 0, 544:], cos[:20], sin[:20]
    rotated[:, 0, 512:544], rotated[:, 0, 544:] = a * c - b * s, b * c + a * s
    cache.append(k, rope=ht.Rope(cos, sin, positions))
    twin.append_slots(rotated, None, (cache.block_table[0, np.arange(20) // 16] * 16 + np.arange(20) % 16).astype("i8"))
    assert np.array_equal(cache.pages, twin.pages)


def test_files(rng, tmp_path):
    pytest.importorskip("safetensors")
    cache, _ = filled(rng)
    cache.to_safetensors(tmp_path / "latent.safetensors")
    again = ht.PagedKVCache.from_safetensors(tmp_path / "latent.safetensors")
    assert again.spec == cache.spec and again.host_lengths == cache.host_lengths
    for x, y in zip(cache.dequantize(), again.dequantize()):
        assert np.array_equal(x, y)


def test_the_command_dequantizes_a_latent_cache(rng, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    command = os.environ.get("HALFTONE_COMMAND")
    if not command:
        pytest.skip("HALFTONE_COMMAND does not name the halftone command")
    cache, _ = filled(rng, counts=(70,))
    cache.to_safetensors(tmp_path / "packed.safetensors")
    unpacked = tmp_path / "unpacked.safetensors"
    subprocess.run([command, "dequantize", tmp_path / "packed.safetensors", unpacked, "--dtype", "f32"], check=True)
    tensors = safetensors.load_file(unpacked)
    for name, values in zip("kv", cache.dequantize()):
        assert np.array_equal(tensors[f"request.0.{name}"], values)


def softmax_rows(q, k, scale):
    logits = np.einsum("qhd,td->qht", q.astype(np.float64), k) * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_dense_decode(rng):
    cache, _ = filled(rng)
    q = rng.standard_normal((2, 16, 576)).astype(np.float32)
    out = ht.attend(q, cache, scale=0.1)
    k, _ = cache.dequantize()
    for request, (begin, end) in enumerate(((0, 5), (5, 75))):
        own = k[begin:end, 0].astype(np.float64)
        expected = softmax_rows(q[request : request + 1], own, 0.1) @ own[:, :512]
        assert np.allclose(out[request : request + 1], expected, rtol=0, atol=2e-5)


def test_page_of_584_byte_tokens(rng):
    spec = ht.KVCacheSpec.latent("fp8-g64-e8m0", 448, 64, rotary_v=True)
    assert (spec.head_dim, spec.v_head_dim, spec.page_bytes) == (512, 512, 65 * 576)
    assert spec == ht.KVCacheSpec(**json.loads(spec.key))
    cache = ht.PagedKVCache(1, 64, spec=spec)
    k = rng.standard_normal((3, 1, 512)).astype(np.float32)
    cache.append(k)
    scales = cache.pages[0, 64 * 576 :].reshape(-1, 8)[:3, :7].astype(np.float64)
    largest = np.abs(k[:, 0, :448]).reshape(3, 7, 64).max(-1)
    assert np.array_equal(scales, 127 + np.ceil(np.log2(largest / 448)))
    back_k, back_v = cache.dequantize()
    assert np.array_equal(back_k, back_v) and np.abs(back_k - k).max() < 0.15


def test_listed_keys(rng):
    cache, _ = filled(rng, counts=(90,))
    window, _ = filled(rng, counts=(30,), k_format="bf16", page_size=16)
    q = rng.standard_normal((3, 8, 576)).astype(np.float32)
    page = cache.block_table[0].astype(np.int64)
    tokens = rng.integers(0, 90, (3, 40))
    indices = (page[tokens // 64] * 64 + tokens % 64).astype(np.int32)
    indices[:, ::5] = -1
    near = window.block_table[0][np.arange(20) // 16] * 16 + np.arange(20) % 16
    extra = np.tile(near.astype(np.int32), (3, 1))
    counts, extra_counts = np.array([40, 7, 0], np.int32), np.array([20, 0, 3], np.int32)
    given = dict(counts=counts, extra_cache=window, extra_indices=extra, extra_counts=extra_counts)
    out, lse = ht.attend_listed(q, cache, indices, lse=True, scale=0.1, **given)
    keys, near_keys = cache.dequantize()[0][:, 0], window.dequantize()[0][:, 0]
    for i in range(3):
        listed = tokens[i, : counts[i]][indices[i, : counts[i]] >= 0]
        own = np.concatenate([keys[listed], near_keys[: extra_counts[i]]]).astype(np.float64)
        logits = q[i].astype(np.float64) @ own.T * 0.1
        assert np.allclose(lse[i], np.log(np.exp(logits).sum(-1)), atol=1e-5)
        assert np.allclose(out[i], softmax_rows(q[i : i + 1], own, 0.1)[0] @ own[:, :512], atol=2e-5)

    made = ht.plan(cache, batch=3, q_heads=8, q_dtype="f32", top_k=40, extra=window, extra_top_k=20, scale=0.1)
    assert "list of up to 40 slots" in made.describe() and pickle.loads(pickle.dumps(made)) is made
    step = ht.schedule(made, counts=counts, extra_counts=extra_counts)
    lists = dict(extra_cache=window, extra_indices=extra)
    assert np.array_equal(ht.attend_listed(q, cache, indices, schedule=step, **lists), out)
    counts[:] = 0
    extra_counts[:] = 0
    step.update()
    assert not ht.attend_listed(q, cache, indices, schedule=step, **lists).any()

    indices[1, 2] = 64 * cache.pages.shape[0]
    with pytest.raises(ht.OutOfRangeError, match=r"indices\[1, 2\] is"):
        ht.attend_listed(q, cache, indices)
    with pytest.raises(ht.InvalidArgumentError, match="go together"):
        ht.attend_listed(q, cache, indices, extra_cache=window)
    with pytest.raises(ht.InvalidArgumentError, match="mask.causal is set"):
        ht.plan(cache, batch=3, q_heads=8, top_k=40, causal=True)


def test_listed_keys_of_torch(rng):
    torch = pytest.importorskip("torch")
    cache, _ = filled(rng, counts=(20,))
    q = rng.standard_normal((2, 4, 576)).astype(np.float32)
    indices = cache.block_table[0, 0] * 64 + rng.integers(0, 20, (2, 9)).astype(np.int32)
    out = ht.attend_listed(torch.from_numpy(q), cache, torch.from_numpy(indices.astype(np.int32)))
    assert isinstance(out, torch.Tensor)
    assert np.array_equal(out.numpy(), ht.attend_listed(q, cache, indices.astype(np.int32)))


def test_errors(rng):
    cache, k = filled(rng)
    before = cache.pages.copy()
    with pytest.raises(ht.InvalidArgumentError, match="v is present, but V of a latent cache is a part of k"):
        cache.append(k, k[..., :512].copy(), [5, 70])
    with pytest.raises(ht.InvalidArgumentError, match=r"pass 576"):
        cache.append(k[..., :512].copy(), counts=[5, 70])
    assert np.array_equal(before, cache.pages) and cache.host_lengths == [5, 70]
    with pytest.raises(ht.UnsupportedError, match="k_format is int8-tensor"):
        ht.KVCacheSpec.latent("int8-tensor")
    with pytest.raises(ht.InvalidArgumentError, match="v_head_dim is 384.*use 512"):
        ht.KVCacheSpec.latent(latent_dim=384)
    with pytest.raises(ht.InvalidArgumentError, match="rope_dim is 0"):
        ht.KVCacheSpec.latent(rope_dim=0)
    with pytest.raises(ht.InvalidArgumentError, match="kv_heads is 2.*use 1"):
        ht.KVCacheSpec(2, 576, "fp8-g128-f32", None, 512, rope_dim=64)
    with pytest.raises(ht.InvalidArgumentError, match="format is fp8-g128-f32, but only per-tensor"):
        ht.calibrate(k[..., :512].copy(), "fp8-g128-f32")
    with pytest.raises(ht.InvalidArgumentError, match="v is None"):
        ht.PagedKVCache(1, 10, kv_heads=1, head_dim=64).append(k[:1, :, :64].copy())


def test_lses_as_flashmla_returns_them(rng):
    cache, _ = filled(rng, (30, 40))
    q = rng.standard_normal((6, 4, 576)).astype(np.float32)
    slots = (cache.block_table[[0, 0, 0, 1, 1, 1], 0, None] * 64 + np.arange(8)).astype(np.int32)
    slots[[0, 4]] = -1
    parts, lses = zip(*(ht.attend_listed(q, cache, x, lse=True) for x in (slots, slots + (slots >= 0))))
    lse = lses[0]
    assert np.isneginf(lse[[0, 4]]).all() and np.isfinite(lse[[1, 2, 3, 5]]).all()
    flat = ht.export_flash_mla_lse(lse)
    assert flat.dtype == np.float32 and np.isposinf(flat[[0, 4]]).all()
    np.testing.assert_array_equal(flat[[1, 2, 3, 5]], lse[[1, 2, 3, 5]])
    decode = ht.export_flash_mla_lse(lse, q_len=3)
    assert decode.shape == (2, 4, 3)
    for row in range(6):
        np.testing.assert_array_equal(decode[row // 3, :, row % 3], flat[row])
    assert np.isneginf(lse[0]).all()  # the argument is as it was
    for foreign in (flat, decode):
        np.testing.assert_array_equal(ht.import_flash_mla_lse(foreign), lse)
    merged = ht.merge(parts, [ht.import_flash_mla_lse(ht.export_flash_mla_lse(x, 2)) for x in lses])
    np.testing.assert_array_equal(merged, ht.merge(parts, lses))
    assert not merged[[0, 4]].any()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_lses_of_other_frameworks(framework):
    module = pytest.importorskip(framework)
    make = module.tensor if framework == "torch" else module.numpy.asarray
    lse = make(np.array([[1.5, -np.inf], [-2.0, 3.0]], np.float32).tolist())
    foreign = ht.export_flash_mla_lse(lse, 2)
    assert type(foreign) is type(lse) and ht._arrays.dtype_of(foreign) == "f32"
    assert foreign.tolist() == [[[1.5, -2.0], [np.inf, 3.0]]]
    assert ht.import_flash_mla_lse(foreign).tolist() == lse.tolist()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ht.export_flash_mla_lse(np.zeros((6, 2), np.float32), 4), "q_len is 4, but must divide lse's 6 rows"),
        (lambda: ht.export_flash_mla_lse(np.zeros((6, 2), np.float32), 0), "q_len is 0"),
        (lambda: ht.export_flash_mla_lse(np.zeros((6, 2), np.float32), 1.5), "q_len is 1.5"),
        (lambda: ht.export_flash_mla_lse(np.zeros((6, 2))), "lse has dtype float64, but must be f32"),
        (lambda: ht.export_flash_mla_lse(np.zeros((1, 6, 2), np.float32)), "lse is of shape (1, 6, 2)"),
        (lambda: ht.import_flash_mla_lse(np.zeros(6, np.float32)), "lse is of shape (6,)"),
        (lambda: ht.import_flash_mla_lse(None), "lse is None"),
    ],
)
def test_lses_that_are_refused(call, message):
    with pytest.raises(ht.InvalidArgumentError, match="^" + re.escape(message)):
        call()
