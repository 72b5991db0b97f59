"""From a model to a recipe and back: capture, `halftone recipe`, the cache, and what it costs the model."""

import json
import math
import os
import subprocess

import models
import pytest
import torch

import halftone as ht
from halftone.capture import capture
from halftone.recipe import measure
from halftone.recipe.__main__ import main
from halftone.transformers import HalftoneCache

TEXT = "Low precision keys and values of every layer. " * 20


def halftone(*arguments):
    return subprocess.run([os.environ["HALFTONE_COMMAND"], *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def recipe_of(tmp_path):
    """A recipe for a model, of what the command chooses for a capture of 200 tokens."""

    def made(model, *limit):
        capture(model, models.prompt(1, 200)[0], str(tmp_path / "capture.safetensors"))
        halftone("recipe", tmp_path / "capture.safetensors", *limit, "--output", tmp_path / "recipe.json")
        return tmp_path / "recipe.json"

    return made


@pytest.fixture
def folder(tmp_path, llama):
    llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_cache_of_a_recipe(llama, recipe_of):
    """Its path, as text or not, and what load_recipe() gives are the same as the formats named by hand."""
    path = recipe_of(llama, "--bytes-per-token", "450")
    recipe, ids = ht.load_recipe(path), models.prompt(1, 64, seed=3)
    names = [
        tuple(f"{form}{'+rot' * rotated}" for form, rotated in pairs)
        for pairs in (((s.k_format, s.rotate_k), (s.v_format, s.rotate_v)) for s in recipe.specs())
    ]
    channels = {name: recipe.scales("torch")[name] for name in ("k_offset", "k_channel_scale")}
    expected = models.divergence(llama, ids, HalftoneCache(llama.config, 64, names, **channels))
    for formats in (path, str(path), recipe):
        cache = HalftoneCache(llama.config, 64, formats)
        assert cache.bytes_per_token == recipe.bytes_per_token <= 450
        assert models.divergence(llama, ids, cache) == expected
    assert HalftoneCache(llama.config, 64, path, page_size=16).layer(1).spec == recipe.specs(16)[1]


def test_static_scales_come_along(llama, recipe_of):
    path = recipe_of(llama, "--formats", "fp8-static-head,int8-tensor", "--error", "50%")
    cache = HalftoneCache(llama.config, 64, path)
    assert models.divergence(llama, models.prompt(1, 64, seed=3), cache) < 0.05
    with pytest.raises(ht.InvalidArgumentError, match="k_scale is given beside a recipe"):
        HalftoneCache(llama.config, 64, path, k_scale=[None, None])


def test_recipes_of_other_models(llama, recipe_of, tmp_path):
    path = recipe_of(llama, "--formats", "bf16,int8-head", "--error", "5%")
    content = json.loads(path.read_text())

    def refused(change, sentence):
        other = json.loads(json.dumps(content))
        change(other["layers"])
        (tmp_path / "other.json").write_text(json.dumps(other))
        with pytest.raises(ht.InvalidArgumentError, match=sentence):
            HalftoneCache(llama.config, 64, tmp_path / "other.json")

    refused(lambda layers: layers.pop(), "has no layer 1, but the model has: make it from a capture of all layers")
    refused(lambda layers: layers[0].update(kv_heads=4), "has kv_heads 4 in layer 0, but the model 2")
    refused(lambda layers: layers.append({**layers[1], "layer": 2}), "has a layer 2, but the model's last is 1")


def test_what_is_measured(model):
    """KL as the tests of generation compute it; perplexity as the loss of the model itself."""
    ids = models.prompt(1, 100, seed=5)
    report = measure(model, ids[0], {"exact": "fp16", "coarse": "int4-row"}, chunk=16)
    assert report.tokens == 100
    model.set_attn_implementation("eager")
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert math.isclose(report.perplexity, math.exp(loss), rel_tol=1e-4)
    expected = models.divergence(model, ids, HalftoneCache(model.config, 100, "int4-row"))
    assert math.isclose(report.rows["coarse"].kl, expected, rel_tol=1e-2, abs_tol=1e-6)
    assert report.rows["exact"].kl < 1e-2 * report.rows["coarse"].kl
    assert math.isclose(report.rows["exact"].perplexity, report.perplexity, rel_tol=1e-2)
    assert report.rows["coarse"].bytes_per_token == HalftoneCache(model.config, 1, "int4-row").bytes_per_token


def test_the_model_is_as_it_was(llama):
    llama.set_attn_implementation("sdpa")
    llama.train()
    measure(llama, models.prompt(1, 8)[0], {"a": "bf16"})
    assert llama.config._attn_implementation == "sdpa" and llama.training
    llama.eval()
    with pytest.raises(ht.InvalidArgumentError, match="tokens has 1 ids"):
        measure(llama, [5], {"a": "bf16"})


def test_layers_with_a_window_of_their_own(recipe_of):
    """Gemma 2, whose layers differ in their attention: the recipe is for all of them, and HalftoneCache takes it."""
    gemma = models.make(models.gemma2)
    path = recipe_of(gemma, "--error", "3%")
    recipe, ids = ht.load_recipe(path), models.prompt(1, 80, seed=4)[0]
    assert list(recipe.layers) == [0, 1] and 0 < recipe.error <= 0.03
    report = measure(gemma, ids, {"recipe": path, "int4-row": "int4-row"}, chunk=32)
    assert report.rows["recipe"].kl < report.rows["int4-row"].kl


def test_more_bytes_diverge_less(llama, recipe_of):
    ids = models.prompt(1, 200, seed=8)[0]
    found = []
    for budget in ("320", "420", "600"):
        found.append(measure(llama, ids, {"recipe": recipe_of(llama, "--bytes-per-token", budget)}).rows["recipe"].kl)
    assert found == sorted(found, reverse=True) and found[0] > 3 * found[2]


def test_the_command(llama, folder, recipe_of, tmp_path, capsys):
    path, text, out = recipe_of(llama, "--error", "5%"), tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text(TEXT)
    arguments = [folder, path, "--text", text, "--tokenizer", "bytes", "--tokens", "120", "--skip", "10"]
    assert main([*map(str, arguments), "--formats", "bf16,int8-head+rot", "--json", str(out)]) == 0
    said, content = capsys.readouterr().out, json.loads(out.read_text())
    assert "own cache" in said and f"Wrote {out}." in said
    assert [row["name"] for row in content["rows"]] == ["recipe", "bf16", "int8-head+rot"]
    ids = [byte % models.VOCABULARY for byte in TEXT.encode()][10:130]
    report = measure(llama, ids, {"recipe": path})
    assert content["tokens"] == 120 and math.isclose(content["perplexity"], report.perplexity, rel_tol=1e-4)
    assert math.isclose(content["rows"][0]["kl"], report.rows["recipe"].kl, rel_tol=1e-2)
    page = tmp_path / "page.html"
    halftone(
        "eval", tmp_path / "capture.safetensors", "--formats", "bf16,int8-head+rot", "--recipe", path, "--quality", out,
        "--html", page,
    )  # fmt: skip
    shown = page.read_text()
    for row in (content["rows"][0], content["rows"][2]):
        assert f"{row['perplexity']:.3f}" in shown


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "--text and --prompt are missing"),
        (["--text", "none.txt"], "none.txt"),
        (["--text", "t", "--tokens", "0"], "--tokens is 0"),
        (["--prompt", "a", "--tokenizer", "bytes"], "--tokenizer is bytes"),
    ],
)
def test_mistakes(llama, folder, recipe_of, capsys, arguments, sentence):
    assert main([str(folder), str(recipe_of(llama, "--error", "5%")), *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("halftone.recipe: ") and sentence in said and said.count("\n") == 1
