"""Recipes: the file of the command as KVCacheSpecs, and what is wrong with files that are none."""

import copy
import json
import math
import os
import pathlib
import subprocess

import numpy as np
import pytest
from support import normal

import halftone as ht

ROOT = pathlib.Path(__file__).parents[2]
LAYER = {
    "layer": 0, "k_format": "int8-head", "rotate_k": True, "v_format": "int4-g32", "rotate_v": False, "kv_heads": 2,
    "head_dim": 64, "v_head_dim": 64, "bytes_per_token": 212.0, "error": 0.03,
}  # fmt: skip
STATIC = {
    **LAYER, "layer": 3, "k_format": "fp8-static-head", "v_format": "int8-tensor", "rotate_k": False, "error": 0.04,
    "k_scale": [0.5, 0.25], "v_scale": [0.125],
}  # fmt: skip
GOOD = {"halftone_recipe": 1, "about": {"anything": None}, "layers": [STATIC, LAYER]}


@pytest.fixture
def write(tmp_path):
    def written(content):
        path = tmp_path / "recipe.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return written


def test_specs_in_the_order_of_the_layers(write):
    recipe = ht.load_recipe(write(GOOD))
    assert list(recipe.layers) == [0, 3]
    first, last = recipe.specs(page_size=16)
    assert first == ht.KVCacheSpec(2, 64, "int8-head", "int4-g32", page_size=16, rotate_k=True)
    assert last == ht.KVCacheSpec(2, 64, "fp8-static-head", "int8-tensor", page_size=16)
    assert recipe.layers[0].spec.page_size == 64 and recipe.layers[3].scales["k_scale"] == (0.5, 0.25)
    assert recipe.bytes_per_token == first.bytes_per_token + last.bytes_per_token
    assert math.isclose(recipe.error, math.sqrt((0.03**2 + 0.04**2) / 2))


def test_a_cache_of_all_layers(write):
    recipe = ht.load_recipe(str(write(GOOD)))
    cache = ht.LayeredKVCache(1, 64, layers=recipe.specs(), **recipe.scales())
    rng = np.random.default_rng(0)
    k, v = normal(rng, 40, 2, 64), normal(rng, 40, 2, 64)
    for i, spec in enumerate(recipe.specs()):
        cache.layer(i).append(k, v, [40])
        one = {name: values[i] for name, values in recipe.scales().items()}
        alone = ht.PagedKVCache(1, 64, spec=spec, **one)
        alone.append(k, v, [40])
        for ours, theirs in zip(cache.layer(i).dequantize(), alone.dequantize()):
            np.testing.assert_array_equal(ours, theirs)


def changed(**fields):
    made = copy.deepcopy(GOOD)
    made["layers"][1].update(fields)
    return made


def without(field):
    made = copy.deepcopy(GOOD)
    del made["layers"][1][field]
    return made


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("", "no JSON object with a halftone_recipe: name a file"),
        ("[1]", "no JSON object with a halftone_recipe"),
        ({"layers": [LAYER]}, "no JSON object with a halftone_recipe"),
        ({**GOOD, "halftone_recipe": 2}, "halftone_recipe is 2, but this halftone reads version 1"),
        ({**GOOD, "layers": []}, "layers is no list with an entry"),
        ({**GOOD, "layers": [7]}, r"layers\[0\]: it is no object"),
        ({**GOOD, "layers": [LAYER, LAYER]}, r"layers\[1\] is layer 0 once more"),
        (changed(k_format="int9"), r"layers\[1\]: .*int9"),
        (changed(k_format=8), "k_format is 8, but must be a text"),
        (changed(rotate_k=1), "rotate_k is 1, but must be true or false"),
        (changed(kv_heads=True), "kv_heads is True, but must be an integer"),
        (changed(layer=-1), "layer is -1, but must be 0 or more"),
        (changed(head_dim=65), "head_dim is 65"),
        (changed(k_bias=[1.0]), "it has 'k_bias', which this halftone does not know"),
        (changed(k_scale=[1.0]), "k_scale must be a list of 0 numbers"),
        (changed(v_format="int8-tensor"), "v_scale must be a list of 1 numbers"),
        (changed(v_format="int8-tensor", v_scale=["1"]), "v_scale must be a list of 1 numbers"),
        (without("rotate_v"), "rotate_v is missing"),
    ],
)
def test_files_that_are_no_recipes(write, content, sentence):
    with pytest.raises(ht.InvalidArgumentError, match=f"recipe .*{sentence}"):
        ht.load_recipe(write(content))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        ht.load_recipe(tmp_path / "none.json")


@pytest.mark.skipif("HALFTONE_COMMAND" not in os.environ, reason="the halftone command is not built")
def test_the_file_of_the_command(tmp_path):
    capture, path = ROOT / "data/llama-tiny-capture.safetensors", tmp_path / "recipe.json"
    formats = "int8-head+rot,int4-g32,int8-static-head:int4-g32"
    subprocess.run(
        [os.environ["HALFTONE_COMMAND"], "recipe", capture, "--formats", formats, "--bytes-per-token", "850"]
        + ["--max-queries", "64", "--output", path],
        check=True,
        capture_output=True,
    )
    recipe, content = ht.load_recipe(path), json.loads(path.read_text())
    assert list(recipe.layers) == [3, 5]
    assert recipe.bytes_per_token == content["bytes_per_token"] <= 850
    assert math.isclose(recipe.error, content["error"])
    ht.LayeredKVCache(1, 64, layers=recipe.specs(), **recipe.scales())
