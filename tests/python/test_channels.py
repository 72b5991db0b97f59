"""Offset and scale of K's channels: calibration, caches, copies, files and recipes."""

import copy
import json
import pickle

import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, check, normal

import halftone as ht

LENGTHS = [65, 1, 200]
NAMES = ("k_offset", "k_channel_scale")


def biased(rng, tokens):
    """K with large biases in a few channels, as of models whose projection of K has one."""
    k = normal(rng, tokens, KV_HEADS, DIM)
    k[:, :, 5::31] += 40
    k[:, :, 7] *= 9
    return k


def filled(rng, **options):
    k, v = biased(rng, sum(LENGTHS)), normal(rng, sum(LENGTHS), KV_HEADS, DIM)
    offset, scale = ht.calibrate_channels(k, "int4-row", offset=True, scale=True)
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "k_format": "int4-row", "k_offset": offset, **options}
    cache = ht.PagedKVCache(3, 256, k_channel_scale=scale, **options)
    cache.append(k, v, LENGTHS)
    return cache, k


@pytest.mark.parametrize("options", [{}, {"rotate_k": True, "k_format": "int8-head"}])
def test_attention_and_its_lse_are_those_of_the_values_read_back(rng, options):
    cache, k = filled(rng, **options)
    assert cache.spec.offset_k and cache.spec.scale_k
    q = normal(rng, 3, Q_HEADS, DIM)
    sinks = normal(rng, Q_HEADS)
    stored_k, stored_v = cache.dequantize()
    for more in ({}, {"sinks": sinks}, {"causal": True}):
        out, lse = ht.attend(q, cache, lse=True, **more)
        check(out, lse, q, stored_k, stored_v, [1] * 3, LENGTHS, **more)
    plain = ht.PagedKVCache(3, 256, kv_heads=KV_HEADS, head_dim=DIM, k_format=cache.spec.k_format)
    plain.append(k, k, LENGTHS)
    assert np.linalg.norm(stored_k - k) < 0.3 * np.linalg.norm(plain.dequantize()[0] - k)
    with pytest.raises(ht.UnsupportedError, match="softcap is 20"):
        ht.attend(q, cache, softcap=20.0)


def test_calibration_chooses(rng):
    k = biased(rng, 256)
    offset, scale = ht.calibrate_channels(k, "int8-head", q=normal(rng, 64, Q_HEADS, DIM))
    assert offset.shape == (KV_HEADS, DIM) and offset.dtype == np.float32
    np.testing.assert_allclose(offset, k.mean(0), rtol=1e-5, atol=1e-6)
    exact = np.tile(np.arange(DIM, dtype=np.float32) * np.array([1, -1], np.float32)[:, None, None], (8, KV_HEADS, 1))
    assert ht.calibrate_channels(exact, "int8-head") == (None, None)
    offset, scale = ht.calibrate_channels(k, "int8-head", offset=False, scale=True)
    assert offset is None
    np.testing.assert_allclose(scale, np.sqrt(np.abs(k).max(0)), rtol=1e-6)
    with pytest.raises(ht.InvalidArgumentError, match="chosen together"):
        ht.calibrate_channels(k, "int8-head", offset=True)
    with pytest.raises(ht.InvalidArgumentError, match="format is bf16"):
        ht.calibrate_channels(k, "bf16")


def test_static_scales_beside_channels(rng):
    k = biased(rng, sum(LENGTHS))
    offset, _ = ht.calibrate_channels(k, "int8-tensor", offset=True, scale=False)
    scale, low = ht.calibrate(k, "int8-tensor", k_offset=offset)
    np.testing.assert_allclose(scale, np.abs(k - offset).max() / 127, rtol=1e-5)
    assert low is None
    options = dict(kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-tensor", v_format="bf16")
    cache = ht.PagedKVCache(3, 256, k_scale=scale, k_offset=offset, **options)
    cache.append(k, k, LENGTHS)
    np.testing.assert_allclose(cache.dequantize()[0], k, atol=float(scale[0]) * 0.51)


def test_copies_and_files_keep_them(rng, tmp_path):
    cache, _ = filled(rng)
    expected = cache.dequantize()[0]
    cache.to_safetensors(tmp_path / "cache.safetensors")
    others = [
        cache.clone(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)),
        ht.PagedKVCache.from_safetensors(tmp_path / "cache.safetensors"),
    ]  # fmt: skip
    for other in others:
        assert other.spec == cache.spec and ht.KVCacheSpec(**json.loads(other.spec.key)) == cache.spec
        np.testing.assert_array_equal(other.dequantize()[0], expected)
        for name in NAMES:
            np.testing.assert_array_equal(getattr(other, name), getattr(cache, name))


def test_layers_have_their_own(rng):
    k = biased(rng, 4)
    offset, scale = ht.calibrate_channels(k, "int8-head", offset=True, scale=True)
    options = dict(kv_heads=KV_HEADS, head_dim=DIM, k_format="int8-head")
    cache = ht.LayeredKVCache(4, 64, layers=2, k_offset=[None, offset], k_channel_scale=[scale, None], **options)
    flags = [(layer.spec.offset_k, layer.spec.scale_k) for layer in (cache.layer(0), cache.layer(1))]
    assert flags == [(False, True), (True, False)]
    assert cache.clone().layer(1).k_offset is not offset
    specs = [cache.layer(0).spec, cache.layer(1).spec]
    with pytest.raises(ht.InvalidArgumentError, match="k_channel_scale is None, but scale_k of the spec is True"):
        ht.LayeredKVCache(4, 64, layers=specs)


def test_what_does_not_fit_is_refused(rng):
    spec = ht.KVCacheSpec(KV_HEADS, DIM, "int8-head", offset_k=True)
    offset = np.zeros((KV_HEADS, DIM), np.float32)
    with pytest.raises(ht.InvalidArgumentError, match="k_offset is None, but offset_k of the spec is True: pass what"):
        ht.PagedKVCache(1, 64, spec=spec)
    plain = ht.KVCacheSpec(KV_HEADS, DIM, "int8-head")
    with pytest.raises(ht.InvalidArgumentError, match="k_offset is given, but offset_k of the spec is False"):
        ht.PagedKVCache(1, 64, spec=plain, k_offset=offset)
    with pytest.raises(ht.UnsupportedError, match="offset_k is true, but k_format is bf16"):
        ht.PagedKVCache(1, 64, kv_heads=KV_HEADS, head_dim=DIM, k_offset=offset)
    cache = ht.PagedKVCache(1, 64, spec=spec, k_offset=offset[:1])
    k = normal(rng, 1, KV_HEADS, DIM)
    with pytest.raises(ht.InvalidArgumentError, match=r"cache.k_offset has shape \[1, 128\]"):
        cache.append(k, k, [1])


def test_recipes_have_them(rng, tmp_path):
    row = {
        "layer": 0, "k_format": "int4-row", "rotate_k": False, "v_format": "int8-head", "rotate_v": False,
        "kv_heads": KV_HEADS, "head_dim": 64, "v_head_dim": 64, "offset_k": True,
        "k_offset": [0.5 * i for i in range(KV_HEADS * 64)],
    }  # fmt: skip
    path = tmp_path / "recipe.json"
    other = {**row, "layer": 1, "offset_k": False, "k_offset": []}
    path.write_text(json.dumps({"halftone_recipe": 1, "layers": [row, other]}))
    recipe = ht.load_recipe(path)
    beside = recipe.scales()
    assert beside["k_offset"][0].shape == (KV_HEADS, 64) and beside["k_offset"][0][1, 3] == 0.5 * 67
    assert beside["k_offset"][1] is None and beside["k_channel_scale"] == [None, None]
    cache = ht.LayeredKVCache(2, 64, layers=recipe.specs(), **beside)
    assert [cache.layer(i).spec.offset_k for i in range(2)] == [True, False]
    path.write_text(json.dumps({"halftone_recipe": 1, "layers": [{**row, "k_offset": [1.0]}]}))
    with pytest.raises(ht.InvalidArgumentError, match="k_offset must be a list of 128 numbers"):
        ht.load_recipe(path)
