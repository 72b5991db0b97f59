"""python -m halftone.capture: the values are the model's, and `halftone eval` reads the file."""

import gc
import importlib
import json
import os
import pathlib
import subprocess
import sys
import weakref

import models
import pytest
import torch
import transformers as tf
from safetensors import safe_open
from safetensors.torch import load_file

import halftone as ht
from halftone.capture import capture
from halftone.capture.__main__ import main, size_of
from halftone.capture.writer import Entry, StreamWriter

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "capture.safetensors")


@pytest.fixture
def folder(tmp_path, llama):
    """A model as it lies on a disk."""
    llama.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_values_are_those_that_enter_attention(model, path):
    """Before RoPE k is what its projection gives; after it, what the model's own rotation makes of that."""
    ids = models.prompt(1, 40)
    projected, positions = {}, torch.arange(40)[None]
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _, __, out, i=i: projected.__setitem__(i, out[0]))
        for i, layer in enumerate(model.model.layers)
    ]
    summary = capture(model, ids[0], path, before_rope=True, chunk=64)
    for hook in hooks:
        hook.remove()
    found = load_file(path)
    rotate = sys.modules[type(model).__module__].apply_rotary_pos_emb
    assert summary.layers == [0, 1] and summary.tokens == 40
    for i in summary.layers:
        q, k = (found[f"layers.{i}.{name}_before_rope"] for name in "qk")
        assert torch.equal(k, projected[i].reshape(k.shape))
        cos, sin = model.model.rotary_emb(q, positions)
        rotated = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        for name, exact in zip("qk", rotated):
            assert torch.allclose(found[f"layers.{i}.{name}"], exact[0].transpose(0, 1), atol=1e-5)
    assert summary.data_bytes == sum(x.nbytes for x in found.values())


@pytest.mark.parametrize("chunk", [7, 16])
def test_parts_make_the_same_file(model, tmp_path, chunk):
    """Sliding windows, too: 50 tokens are longer than every window."""
    ids = models.prompt(1, 50)[0]
    paths = [str(tmp_path / name) for name in ("whole", "parts")]
    capture(model, ids, paths[0], chunk=50)
    capture(model, ids, paths[1], chunk=chunk)
    whole, parts = map(load_file, paths)
    assert whole.keys() == parts.keys() and len(whole) == 6
    for name, exact in whole.items():
        assert torch.allclose(parts[name], exact, atol=1e-4 * exact.abs().max())


def test_layers_dtypes_and_metadata(path):
    model = models.make(models.gemma2)
    implementation = model.config._attn_implementation
    summary = capture(model, models.prompt(1, 30)[0], path, layers=[-1], dtype="bf16", metadata={"source_text": "none"})
    with safe_open(path, "pt") as file:
        about = file.metadata()
        assert sorted(file.keys()) == ["layers.1.k", "layers.1.q", "layers.1.v"]
        assert file.get_tensor("layers.1.q").dtype == torch.bfloat16
    assert about["source_text"] == "none" and about["tokens"] == "30" and about["layers"] == "1"
    assert json.loads(about["attention"]) == {"1": {"softcap": 20.0}}
    assert summary.options == {1: {"softcap": 20.0}}
    assert model.config._attn_implementation == implementation


def test_what_is_left_behind(path):
    """The model's attention and its RoPE are its own again, and nothing keeps the model."""
    model = models.make(models.llama)
    rotate = sys.modules[type(model).__module__].apply_rotary_pos_emb
    capture(model, models.prompt(1, 8)[0], path, before_rope=True)
    assert sys.modules[type(model).__module__].apply_rotary_pos_emb is rotate
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_eval_reads_it(folder, tmp_path, capsys, path):
    text = tmp_path / "text.txt"
    text.write_text("Keys of trained models have outlier channels. " * 4)
    arguments = [folder, "--text", str(text), "--out", path, "--tokenizer", "bytes", "--tokens", "100"]
    assert main([*arguments, "--before-rope", "--layers", "1,0"]) == 0
    said = capsys.readouterr().out
    assert f"Wrote {path}: 2 layers, 100 tokens" in said and f"halftone eval {path} --html" in said
    command = os.environ["HALFTONE_COMMAND"]
    run = subprocess.run(
        [command, "eval", path, "--formats", "fp16,int8-head", "--json", "-"], check=True, capture_output=True
    )
    report = json.loads(run.stdout)
    assert [f["name"] for f in report["formats"]] == ["fp16", "int8-head"]
    assert report["metadata"]["model"] == "model"
    assert report["formats"][0]["error_worst"] < 0.01 < 100 * report["formats"][1]["error_worst"]


def test_eval_knows_each_layers_attention(tmp_path, capsys, path):
    """Gemma 2: a softcap, and a sliding window of 23 keys in the first of two layers."""
    models.make(models.gemma2).save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("a window of twenty-three keys " * 3)
    assert main([str(tmp_path / "model"), "--text", str(text), "--out", path, "--tokenizer", "bytes"]) == 0
    assert f"Next: halftone eval {path} --html report.html" in capsys.readouterr().out
    run = subprocess.run(
        [os.environ["HALFTONE_COMMAND"], "eval", path, "--formats", "bf16", "--json", "-"],
        check=True,
        capture_output=True,
    )
    layers = json.loads(run.stdout)["layers"]
    assert [(layer["softcap"], layer["window"]) for layer in layers] == [(20, 22), (20, -1)]


def test_a_configuration_alone(tmp_path, path):
    tf.LlamaConfig(**models.COMMON, **models.GROUPED).save_pretrained(tmp_path / "config")
    text = tmp_path / "text.txt"
    text.write_text("no weights")
    command = [sys.executable, "-m", "halftone.capture", str(tmp_path / "config"), "--text", str(text), "--out", path]
    subprocess.run(
        [*command, "--random-weights", "3", "--tokenizer", "bytes", "--dtype", "f16"], check=True, timeout=120
    )
    with safe_open(path, "pt") as file:
        assert file.metadata()["model"] == "config with random weights of seed 3"
        assert file.get_tensor("layers.0.q").shape == (10, 4, 64)


def test_nothing_is_written_on_an_error(llama, tmp_path, path):
    pathlib.Path(path).write_text("what was there")
    ids = models.prompt(1, 20)[0]
    broken = models.make(models.llama)
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight[3, 5] = float("inf")
    each = 2 * 4 * (4 + 2 + 2) * 64  # bytes of a token in f32
    cases = [
        (lambda: capture(llama, ids, path, max_bytes=10 * each), ht.ResourceExhaustedError, "at most 10 tokens"),
        (lambda: capture(llama, ids, path, layers=[2]), ht.InvalidArgumentError, "layers has 2, .* use -2 to 1"),
        (lambda: capture(llama, ids, path, layers=[]), ht.InvalidArgumentError, "layers is empty"),
        (lambda: capture(llama, [], path), ht.InvalidArgumentError, "tokens is empty"),
        (lambda: capture(llama, [5, 211], path), ht.InvalidArgumentError, "the id 211, but the model has 211"),
        (lambda: capture(llama, [5] * 1025, path), ht.InvalidArgumentError, "1025 ids, .* sequences of 1024"),
        (lambda: capture(llama, ids, path, dtype="int8"), ht.InvalidArgumentError, "dtype is 'int8'"),
        (lambda: capture(broken, ids, path), ht.InvalidArgumentError, "not finite"),
    ]
    for call, error, sentence in cases:
        with pytest.raises(error, match=sentence):
            call()
    assert [entry.name for entry in tmp_path.iterdir()] == ["capture.safetensors"]
    assert pathlib.Path(path).read_text() == "what was there"


def test_a_file_that_lacks_rows_is_not_kept(tmp_path, path):
    with pytest.raises(ht.InternalError), StreamWriter(path, [Entry("k", torch.float32, (4, 1, 2))], {}) as writer:
        writer.write("k", torch.ones(3, 1, 2))
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_command(folder, tmp_path, capsys, path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "text").write_text("text")
    for arguments, sentence in (
        ([str(tmp_path / "none"), "--text", str(tmp_path / "text")], "none"),
        ([folder, "--text", str(tmp_path / "binary")], "give a file in UTF-8"),
        ([folder, "--text", str(tmp_path / "text"), "--tokens", "0"], "--tokens is 0"),
    ):
        assert main([*arguments, "--out", path, "--tokenizer", "bytes"]) == 1
        assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([folder, "--text", "x", "--max-size", "2T"])
    assert [size_of("7"), size_of("3K"), size_of("2G")] == [7, 3 << 10, 2 << 30]


def test_the_script_of_the_shipped_sample_captures_the_same(path, monkeypatch):
    """data/train_and_capture.py trains a decoder of its own; as a Llama of transformers, it gives the same capture."""
    monkeypatch.syspath_prepend(ROOT / "data")
    script = importlib.import_module("train_and_capture")
    torch.manual_seed(1)
    config = script.ModelConfig(layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=64, ffn=192, vocab_size=211)
    decoder = script.Decoder(config, 48, torch.device("cpu"))
    own = models.llama()
    own.config.rms_norm_eps, own.config.rope_parameters["rope_theta"] = config.norm_eps, config.rope_theta
    model = tf.LlamaForCausalLM(own.config).eval()
    model.load_state_dict(llama_names(decoder.state_dict()))
    ids = models.prompt(1, 48)
    layers = []
    with torch.no_grad():
        decoder.features(ids, captured=layers)
    capture(model, ids[0], path)
    found = load_file(path)
    for i, layer in enumerate(layers):
        for name, exact in zip("qkv", layer):
            assert torch.allclose(found[f"layers.{i}.{name}"], exact[0].transpose(0, 1), atol=1e-5)


def llama_names(state):
    """The weights of that script's decoder under the names of transformers' Llama."""
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    parts = {"attention": "self_attn", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    made = {}
    for name, value in state.items():
        if name.startswith("blocks."):
            _, layer, part, *rest = name.split(".")
            renamed = parts.get(part, f"mlp.{part}")
            name = ".".join(["model.layers", layer, renamed, *rest])
        made[names.get(name, name)] = value
    return made
