"""The comparison: its oracle, its selection of participants, and one small run of the whole."""

import json
import subprocess
import sys
import types
import xml.etree.ElementTree

import numpy as np
import pytest

from halftone.compare import __main__ as compare
from halftone.compare import cases, oracle, peers


def test_the_oracle_on_a_case_done_by_hand():
    q = np.array([[[1.0, 0.0]]])
    k = np.array([[[np.log(1.0), 5.0]], [[np.log(3.0), -5.0]]])
    v = np.array([[[4.0]], [[8.0]]])
    out, lse = oracle.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(out, [[[7.0]]])
    np.testing.assert_allclose(lse, [[np.log(4.0)]])
    out, lse = oracle.attention(q, k, v, scale=1.0, sinks=[np.log(4.0)])
    np.testing.assert_allclose(out, [[[3.5]]])
    np.testing.assert_allclose(lse, [[np.log(8.0)]])
    out, _ = oracle.attention(q, k, v, scale=1.0, window_left=0)
    np.testing.assert_allclose(out, [[[8.0]]])
    out, lse = oracle.attention(np.zeros((2, 1, 2)), k[:1], v[:1], causal=True)
    np.testing.assert_allclose(out[:, 0, 0], [0.0, 4.0])
    assert np.isneginf(lse[0, 0])


def test_a_small_run(tmp_path, capsys):
    table, plot = tmp_path / "table.json", tmp_path / "plot.svg"
    arguments = ["--device", "cpu", "--smoke", "--seconds", "0.01", "--json", str(table), "--plot", str(plot)]
    assert compare.main(arguments) == 0
    result = json.loads(table.read_text())
    rows = {row["label"]: row for row in result["cases"][0]["rows"]}
    for name, error in {"bf16": 0.01, "int8-head": 0.03, "int8-g32": 0.03, "int4-g32+rot": 0.2}.items():
        row = rows[f"halftone {name}"]
        assert row["kernel_error"] < 2e-6 < row["error"] < error
        assert row["us"] > 0 and row["roof"] > 0 and row["schedule_us"] > 0
    assert rows["halftone bf16"]["kv_bytes"] == 2 * 2 * 2 * 128 * 2 * 128
    assert set(result["peers"]) == {peer.name for peer in peers.PEERS}
    assert result["peers"]["flash_mla"] == "not for cpu"
    assert "halftone int8-head" in capsys.readouterr().out
    svg = xml.etree.ElementTree.parse(plot).getroot()
    assert sum(e.get("class") == "h" for e in svg.iter("{http://www.w3.org/2000/svg}rect")) == 4


@pytest.mark.parametrize(
    "arguments, shapes",
    [
        (["--context", "64"], [cases.Case(1, 1, 8, 1, 128, 64)]),
        (["--kv-heads", "2", "--smoke"], [cases.Case(1, 1, 8, 2, 128, 8192)]),
        (["--batch", "1,8", "--q-len", "3"], [cases.Case(b, 3, 8, 1, 128, 8192) for b in (1, 8)]),
        (["--smoke"], cases.SMOKE["cpu"]),
        ([], cases.SHAPES["cpu"]),
    ],
)
def test_shape_options_replace_the_shapes(arguments, shapes):
    assert compare.choose_cases(compare.parse(arguments), "cpu") == shapes


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--batch", "1,x"], "'x' is not a whole number"),
        (["--batch", ""], "'' is not a whole number"),
        (["--context", "0"], "'0' is not a whole number"),
        (["--q-heads", "-8"], "'-8' is not a whole number"),
        (["--kv-heads", "3"], "--q-heads 8 is no multiple of --kv-heads 3"),
        (["--q-len", "9000"], "--q-len 9000 exceeds --context 8192"),
        (["--head-dim", "100"], "head_dim is 100"),
        (["--seconds", "nan"], "'nan' is not a positive number"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
        (["--plot", "/"], "not writable"),
    ],
)
def test_options_are_checked_before_anything_is_measured(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(["--smoke", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_gpu_that_this_build_cannot_use_is_mentioned(monkeypatch, capsys):
    cuda = types.SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(compare.ht, "has_cuda", False)
    assert compare.choose_device() == "cpu" and "make wheel" in capsys.readouterr().err
    monkeypatch.setattr(compare.ht, "has_cuda", True)
    assert compare.choose_device() == "cuda:0" and not capsys.readouterr().err


def test_without_numpy_it_says_what_to_install():
    script = "import sys, runpy; sys.modules['numpy'] = None; runpy.run_module('halftone.compare', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("python -m halftone.compare needs NumPy: pip install numpy\n")
    assert "Traceback" not in done.stderr


def test_absent_peers_are_listed():
    present, states = compare.probe("cuda")
    assert set(states) == {peer.name for peer in peers.PEERS}
    for peer in peers.PEERS:
        try:
            peer.version()
        except ImportError:
            assert states[peer.name].startswith("absent") and peer not in present
        except Exception:
            assert states[peer.name].startswith("does not load") and peer not in present
        else:
            assert peer in present


def test_a_peer_that_fails_does_not_stop_the_others():
    class Broken(peers.Peer):
        name, package = "broken", "json"

        def entries(self, inputs, formats):
            raise RuntimeError("no kernel image\nis available")

    class Refusing(peers.Peer):
        name, package = "refusing", "json"

        def entries(self, inputs, formats):
            raise peers.Refusal("has one head only")

    timer = compare.measure.Timer("cpu", 0.01)
    case = cases.SMOKE["cpu"][0]
    result = compare.measure_case(
        case, "cpu", [Broken(), Refusing(), peers.Halftone()], ["bf16", "int8-tensor"], timer, 1e10
    )
    whys = [row.get("why") for row in result["rows"]]
    assert whys == ["failed: RuntimeError: no kernel image", "has one head only", None, None]


@pytest.mark.parametrize("groups", [1, 4])
def test_fbgemm_rows_made_with_torch_are_those_of_the_library(rng, groups):
    torch = pytest.importorskip("torch")
    import halftone as ht

    x = rng.standard_normal((16, 1, 128), dtype=np.float32)
    cache = ht.PagedKVCache(
        1, 16, kv_heads=1, head_dim=128, k_format="int4-row" if groups == 1 else "int4-g32", page_size=16
    )
    cache.append(x, x)
    ours = ht.export_fbgemm_int4(cache, "k", np.arange(16, dtype=np.int64))
    theirs = peers._fbgemm_int4(torch.from_numpy(x), groups).numpy()
    np.testing.assert_array_equal(ours[..., : 4 * groups], theirs[..., : 4 * groups])
    assert (ours != theirs).mean() < 0.01  # a reciprocal instead of a division may round a code the other way
