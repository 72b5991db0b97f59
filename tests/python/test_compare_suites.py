"""The comparison's suites for the record, prefill, chunks and mla: their options, a small run each on the CPU, rows, peers."""

import json
import sys
import types

import numpy as np
import pytest

import halftone as ht
from halftone.compare import __main__ as compare
from halftone.compare import chunks, clock, latent, oracle, peers, prefill, records
from halftone.compare.cases import Case, make_inputs


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "mla", "--kv-heads", "1"], "--kv-heads is not for --suite mla"),
        (["--suite", "mla", "--head-dim", "576"], "--head-dim is not for --suite mla"),
        (["--suite", "mla", "--no-causal"], "--no-causal is not for --suite mla"),
        (["--suite", "mla", "--kind", "dense_decode", "--top-k", "9"], "--top-k is not for --kind dense_decode"),
        (["--suite", "mla", "--kind", "append"], "invalid choice: 'append'"),
        (["--suite", "mla", "--formats", "bf16,fp8"], "--formats fp8: k_format is fp8, but a latent cache"),
        (["--suite", "prefill", "--top-k", "9"], "--top-k is not for --suite prefill"),
        (["--suite", "mla", "--gathers", "/nonexistent.json"], "/nonexistent.json is no JSON of halftone bench: "),
        (["--suite", "prefill", "--plot", "x.svg"], "--plot is not for --suite prefill"),
        (["--suite", "prefill", "--formats", "plain@int3"], "--formats plain@int3: arithmetic is 'int3'"),
        (["--suite", "prefill", "--formats", "int9"], "--formats int9: "),
        (["--suite", "prefill", "--formats", "plain+rot"], "--formats plain+rot: +rot is not for it"),
        (["--suite", "prefill", "--formats", ""], "--formats : there is no format: name at least one"),
        (["--suite", "chunks", "--no-causal"], "--no-causal is not for --suite chunks"),
        (["--suite", "chunks", "--plot", "x.svg"], "--plot is not for --suite chunks"),
        (["--suite", "chunks", "--formats", "fp8@int3"], "--formats fp8@int3: arithmetic is 'int3'"),
        (["--formats", "int8-head@half_int8"], "--formats int8-head@half_int8: "),
        (["--no-causal"], "--no-causal is not for --suite decode"),
        (["--suite", "speed"], "invalid choice: 'speed'"),
        (["--suite", "mla", "--kind", "dense_decode", "--q-len", "9000"], "--q-len 9000 exceeds --context 8192"),
    ],
)
def test_options_are_checked_before_anything_is_measured(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(["--smoke", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, shapes",
    [
        (["--suite", "prefill"], prefill.SHAPES["cpu"]),
        (["--suite", "prefill", "--smoke"], prefill.SMOKE["cpu"]),
        (["--suite", "prefill", "--context", "64"], [prefill.Shape(Case(1, 64, 8, 1, 128, 64), True)]),
        (["--suite", "prefill", "--context", "64", "--q-len", "9", "--batch", "2,3", "--no-causal"],
         [prefill.Shape(Case(b, 9, 8, 1, 128, 64), False) for b in (2, 3)]),
        (["--suite", "chunks"], chunks.SHAPES["cpu"]),
        (["--suite", "chunks", "--smoke"], chunks.SMOKE["cpu"]),
        (["--suite", "chunks", "--context", "64"], [prefill.Shape(Case(1, 16, 8, 1, 128, 64), True)]),
        (["--suite", "chunks", "--context", "9"], [prefill.Shape(Case(1, 9, 8, 1, 128, 9), True)]),
        (["--suite", "chunks", "--q-len", "3", "--q-heads", "16", "--batch", "2,3"],
         [prefill.Shape(Case(b, 3, 16, 1, 128, 8192), True) for b in (2, 3)]),
        (["--suite", "mla"], latent.SHAPES["cpu"]),
        (["--suite", "mla", "--q-heads", "16"], [latent.Shape("sparse_decode", 1, 1, 16, 8192, 2048)]),
        (["--suite", "mla", "--kind", "dense_decode", "--batch", "2", "--q-len", "3"],
         [latent.Shape("dense_decode", 2, 3, 8, 8192)]),
        (["--suite", "mla", "--kind", "sparse_prefill", "--top-k", "64", "--context", "128"],
         [latent.Shape("sparse_prefill", 1, 1, 8, 128, 64)]),
    ],
)  # fmt: skip
def test_shape_options_replace_the_shapes(arguments, shapes):
    assert compare.choose_cases(compare.parse(arguments), "cpu") == shapes


def test_the_suites_have_the_shapes_of_the_published_figures():
    cells = {(s.case.head_dim, s.causal, s.case.context) for s in prefill.SHAPES["cuda"]
             if s.case.q_heads == s.case.kv_heads}  # fmt: skip
    assert cells == {(d, m, n) for d in (64, 128, 256) for m in (False, True) for n in (1024, 4096, 16384)}
    sparse = {(s.q_heads, s.batch, s.top_k) for s in latent.SHAPES["cuda"] if s.kind == "sparse_decode"}
    assert sparse >= {(h, b, k) for h in (64, 128) for b in (2, 128) for k in (2048, 16384)}
    assert sparse >= {(h, b, 2048) for h in (8, 16, 32) for b in (8, 128)}


def test_the_chunks_are_drafts_and_pieces_of_prompts():
    cases = [s.case for s in chunks.SHAPES["cuda"]]
    assert len(cases) == len(set(cases)) == 25
    assert all(s.causal for s in chunks.SHAPES["cuda"]) and all(c.context % peers.PAGE == 0 for c in cases)
    drafts = [c for c in cases if c.q_len == 3]
    assert len(drafts) == 8 and {c.tokens for c in drafts} == {2**18}
    rows = {(c.q_heads, c.kv_heads, c.q_len * c.q_heads // c.kv_heads) for c in cases} - {(8, 8, 128)}
    assert rows == {(16, 1, n) for n in (48, 128, 192, 256)} | {(32, 8, n) for n in (128, 256, 512, 1024)}


def test_what_is_counted():
    shape = prefill.Shape(Case(2, 3, 4, 1, 64, 5), True)
    assert shape.flops == 4 * 2 * 4 * 64 * (3 + 4 + 5)
    assert prefill.Shape(shape.case, False).flops == 4 * 2 * 4 * 64 * 15
    assert latent.Shape("sparse_decode", 2, 3, 8, 100, 7).pairs == 2 * 3 * 7
    assert latent.Shape("dense_decode", 2, 3, 8, 5).pairs == 2 * (3 + 4 + 5)


FIELDS = {
    "prefill": {"suite", "arithmetic", "format_k", "format_v", "scales", "head_dim", "q_heads", "kv_heads", "causal",
                "q_len", "context", "batch", "us", "tflops", "mhz", "policy"},
    "mla": {"suite", "format", "kind", "q_heads", "batch", "q_len", "top_k", "context", "us", "tflops", "gbs",
            "ceiling_gbs", "mhz"},
}  # fmt: skip


FIELDS["chunks"] = FIELDS["prefill"]


def small_run(suite, tmp_path, *more):
    path = tmp_path / "rows.json"
    arguments = ["--suite", suite, "--device", "cpu", "--smoke", "--seconds", "0.001", "--json", str(path), *more]
    code = compare.main(arguments)
    return code, json.loads(path.read_text())


def test_a_small_run_of_prefill(tmp_path, capsys):
    code, result = small_run("prefill", tmp_path, "--formats", "plain,int8-head@half_int8,int4-g32+rot")
    assert code == 0 and len(result["rows"]) == 6
    for row in result["rows"]:
        assert FIELDS["prefill"] <= set(row) and "peer" not in row
        assert row["us"] > 0 and row["tflops"] > 0 and row["mhz"] is None
    plain, half, rotated = result["rows"][:3]
    assert (plain["format_k"], plain["scales"], plain["arithmetic"]) == ("plain", None, "16-bit")
    assert (half["format_k"], half["scales"], half["arithmetic"]) == ("int8-head", "token_head", "half_int8")
    assert (rotated["format_k"], rotated["rotate_k"]) == ("int4-g32", True)
    assert plain["error"] < 1e-6 < half["error"] < 0.03 < rotated["error"] < 0.3
    assert plain["difference"] == 0 < half["difference"] < 0.03
    assert result["peers"]["flash_attn 3"] == "not for cpu"
    text = capsys.readouterr().out
    assert "halftone int8-head@half_int8" in text and "2 queries" not in text


def test_a_small_run_of_chunks(tmp_path, capsys):
    code, result = small_run("chunks", tmp_path)
    assert code == 0 and not result["left_out"]
    assert [row["label"] for row in result["rows"]] == ["halftone bf16", "halftone int8-head"] * 2
    for row in result["rows"]:
        assert FIELDS["chunks"] <= set(row) and "peer" not in row
        assert row["suite"] == "chunks" and row["causal"] and row["q_len"] < row["context"]
        assert row["page_size"] == peers.PAGE and row["us"] > 0 and row["error"] < 0.03
    assert result["peers"] == {"halftone": ht.__version__, "flash_attn 3": "not for cpu"}
    assert "3 queries, causal" in capsys.readouterr().out


class Tensor(np.ndarray):
    """Enough of a tensor for a participant: eight bits keep the values of 16."""

    def to(self, dtype):
        return self.copy()


class FlashAttention3:
    """A stand-in for flash_attn_interface that holds its arguments against each other and computes in fp64."""

    __version__ = "3.0.0"

    def __init__(self):
        self.planned = []

    def get_scheduler_metadata(self, *sizes, **options):
        self.planned.append((sizes[:6], options))
        return len(self.planned) - 1

    def flash_attn_with_kvcache(self, q, k, v, cache_seqlens, causal, num_splits, scheduler_metadata, page_table=None,
                                **descales):  # fmt: skip
        sizes, options = self.planned[scheduler_metadata]
        assert sizes == (len(q), q.shape[1], cache_seqlens[0], q.shape[2], k.shape[2], q.shape[3])
        assert options["page_size"] == (None if page_table is None else k.shape[1])
        assert options["causal"] == causal and options["num_splits"] == num_splits == 0
        assert all(x.shape == (len(q), k.shape[2]) and (x == 1).all() for x in descales.values())
        outs = []
        for i, length in enumerate(cache_seqlens):
            keys, values = (x[i] if page_table is None else np.concatenate(x[page_table[i]]) for x in (k, v))
            outs.append(oracle.attention(q[i], keys[:length], values[:length], causal=causal)[0])
        return np.stack(outs)


def test_chunks_beside_flash_attention_3(monkeypatch):
    module = FlashAttention3()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    torch = types.SimpleNamespace(
        int32=np.int32, float8_e4m3fn="e4m3",
        full=lambda shape, value, dtype, device: np.full(shape, value, dtype),
        ones=lambda *shape, device: np.ones(shape), arange=lambda n, dtype, device: np.arange(n, dtype=dtype),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)

    def tensors(case, device):
        inputs = make_inputs(case, device)
        return type(inputs)(case, device, *(x.view(Tensor) for x in (inputs.q, inputs.k, inputs.v)))

    monkeypatch.setattr(prefill, "make_inputs", tensors)
    assert compare.probe("cuda", chunks.PEERS)[1]["flash_attn 3"] == "3.0.0"
    shapes = [prefill.Shape(Case(2, 3, 4, 2, 64, context), True) for context in (192, 200)]
    works = chunks.works(shapes, "cpu", ["bf16"])
    result = {"meta": {"suite": "chunks"}}
    records.run(works, {"flash_attn 3"}, StubTimer([1.0] * 6), 4e12, result, lambda: None)
    whole = [row for row in result["rows"] if row["context"] == 192]
    assert [(row["label"], row["arithmetic"], row["format_k"], row["scales"], row.get("page_size")) for row in whole] == [
        ("flash_attn 3 bf16 tensors", "16-bit", "plain", None, None),
        ("flash_attn 3 bf16 pages", "16-bit", "bf16", None, peers.PAGE),
        ("flash_attn 3 fp8 tensors", "fp8", "plain", "tensor", None),
        ("flash_attn 3 fp8 pages", "fp8", "fp8", "tensor", peers.PAGE),
    ]  # fmt: skip
    for row in result["rows"]:
        assert FIELDS["chunks"] <= set(row) and row["peer"] == "flash_attn 3"
        assert row["error"] < 1e-6 and row["difference"] < 1e-6
    assert len(module.planned) == len(result["rows"]) == 6  # once for each, not in every call
    assert {(x["label"], x["why"]) for x in result["left_out"]} == {
        (f"flash_attn 3 {form} pages", "is measured with whole pages only") for form in ("bf16", "fp8")
    }


def test_a_small_run_of_mla(tmp_path, capsys):
    code, result = small_run("mla", tmp_path, "--formats", "fp8-g128-f32,int4-g64")
    assert code == 0 and len(result["rows"]) == 6
    for row in result["rows"]:
        assert FIELDS["mla"] <= set(row) and "peer" not in row
        assert row["error"] < 1e-5 and row["us"] > 0 and row["gbs"] > 0
        assert 0 < row["lse_error"] < 1e-5
        assert (row["ceiling_gbs"] is None) == (row["kind"] != "dense_decode")
    assert [row["kind"] for row in result["rows"][:3]] == list(latent.KINDS)
    assert "sparse_prefill" in capsys.readouterr().out


def bench_report(tmp_path, device, **fields):
    row = {"format_k": "bf16", "batch": 2, "q_len": 1, "top_k": 32, "context": 256, "q_heads": 128, "chain": 1,
           "gather_us": 2.0, "ceiling_gbs": 123.0}  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"device": {"name": device}, "rows": [dict(row, **fields)]}))
    return str(path)


@pytest.mark.parametrize(
    "fields, ceiling",
    [
        ({}, 123.0), ({"format": "bf16", "format_k": ""}, 123.0), ({"top_k": 33}, None), ({"chain": 4}, None),
        ({"extra_top_k": 8}, None), ({"gather_us": None}, None), ({"format": "fp8-g128-f32"}, None),
    ],
)  # fmt: skip
def test_ceilings_of_lists_are_those_of_gathers(tmp_path, fields, ceiling):
    report = bench_report(tmp_path, compare.measure.describe_device("cpu"), **fields)
    code, result = small_run("mla", tmp_path, "--formats", "bf16", "--gathers", report)
    assert code == 0
    rates = {row["kind"]: row["ceiling_gbs"] for row in result["rows"]}
    assert rates.pop("dense_decode") == result["meta"]["bandwidth"] / 1e9
    assert rates == {"sparse_decode": ceiling, "sparse_prefill": None}


def test_gathers_of_another_device_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="--gathers: measured on another GPU, but this is "):
        small_run("mla", tmp_path, "--gathers", bench_report(tmp_path, "another GPU"))
    for text in ("{", "{}", "[]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(SystemExit):
            small_run("mla", tmp_path, "--gathers", str(tmp_path / "other.json"))
        assert "other.json is no JSON of halftone bench: " in capsys.readouterr().err


class StubTimer:
    """Times that are known: each call takes as many microseconds as its participant is told."""

    def __init__(self, times):
        self.times = iter(times)

    def captured(self, call, schedule=None):
        return call, {}

    def settled(self, call):
        call()
        return next(self.times) * 1e-6, 1500.0


def work_of(parts):
    fields = {"q_heads": 4}
    return records.Work("a case", fields, 2e6, parts, lambda out: float(np.abs(np.asarray(out) - 1).max()))


def test_rows_of_stubbed_timings():
    def refuse():
        raise peers.Refusal("has one head only")

    def fail():
        raise RuntimeError("no kernel image\nis available")

    def unsupported():
        raise ht.UnsupportedError("arithmetic is fp8")

    part = lambda value, **fields: lambda: records.Part(lambda: np.full((2, 2), value), fields, 3e6)  # noqa: E731
    parts = [
        ("halftone", "halftone a", part(1.0, arithmetic="16-bit")), ("halftone", "halftone b", unsupported),
        ("flash_attn 3", "flash_attn 3 bf16", part(1.5)), ("flashinfer", "flashinfer bf16", refuse),
        ("absent", "absent bf16", part(9.0)), ("broken", "broken bf16", fail),
    ]  # fmt: skip
    present = {"halftone", "flash_attn 3", "flashinfer", "broken"}
    result = {"meta": {"suite": "prefill", "device": "a GPU", "bandwidth": 4e12, "halftone": "1", "timing": "median"},
              "peers": {"halftone": "1", "absent": "absent"}}  # fmt: skip
    saved = []
    save = lambda: saved.append(len(result["rows"]))  # noqa: E731
    records.run([lambda: work_of(parts)] * 2, present, StubTimer([10.0, 20.0, 1.0, 1.0]), 4e12, result, save)
    assert saved == [2, 4]
    result = {**result, "rows": result["rows"][:2], "left_out": result["left_out"][:3]}
    ours, theirs = result["rows"]
    assert "peer" not in ours and theirs["peer"] == "flash_attn 3"
    assert (ours["us"], ours["mhz"], ours["difference"], theirs["error"]) == (10.0, 1500.0, 0.0, 0.5)
    assert ours["tflops"] == pytest.approx(0.2) and ours["gbs"] == pytest.approx(300) and ours["ceiling_gbs"] == 4000
    assert theirs["difference"] == pytest.approx(0.5)
    assert [(x["label"], x["why"]) for x in result["left_out"]] == [
        ("halftone b", "arithmetic is fp8"), ("flashinfer bf16", "has one head only"),
        ("broken bf16", "failed: RuntimeError: no kernel image"),
    ]  # fmt: skip
    text = records.table(result)
    assert " 2.00 " in text and " 1.00 " in text  # the only peer's time over each
    assert "flashinfer bf16 was left out: has one head only" in text and "absent: absent" in text


def test_ratios_are_those_of_operands_of_one_width():
    row = dict(case="a case", tflops=1.0, mhz=None, error=0.0, difference=0.0)
    rows = [
        dict(row, label="ours", us=10.0, arithmetic="16-bit"), dict(row, label="ours fp8", us=5.0, arithmetic="fp8"),
        dict(row, label="theirs", us=20.0, arithmetic="16-bit", peer="theirs"),
        dict(row, label="theirs fp8", us=4.0, arithmetic="fp8", peer="theirs"),
    ]  # fmt: skip
    meta = {"device": "a GPU", "bandwidth": 4e12, "halftone": "1", "timing": "median"}
    lines = records.table({"meta": meta, "peers": {}, "rows": rows, "left_out": []}).splitlines()
    ratios = {line[:20].strip(): line.split()[-3] for line in lines if line.startswith("  ours")}
    assert ratios == {"ours": "2.00", "ours fp8": "0.80"}


def test_a_failure_of_our_own_is_an_exit_status(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("wrong")

    monkeypatch.setattr(latent, "_halftone", fail)
    code, result = small_run("mla", tmp_path)
    assert code == 1 and not result["rows"]
    assert result["left_out"][0]["why"] == "failed: RuntimeError: wrong"


def test_peers_that_are_missing_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    present, states = compare.probe("cuda", latent.PEERS)
    assert set(states) == set(latent.PEERS) and states["flash_mla"].startswith("absent")
    assert [peer.name for peer in present] == ["halftone"]
    monkeypatch.setitem(sys.modules, "flash_mla", types.SimpleNamespace(__version__="1.0.0"))
    assert compare.probe("cuda", latent.PEERS)[1]["flash_mla"] == "1.0.0"
    assert set(compare.probe("cuda", prefill.PEERS)[1]) == set(prefill.PEERS)
    for suite in (prefill, chunks):
        assert set(suite._MAKERS) | {"halftone"} == set(suite.PEERS)


def test_rows_in_double_precision(rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((6, 4, 8), (9, 2, 8), (9, 2, 8)))
    expected, expected_lse = oracle.attention(q, k, v, causal=True)
    rows = [0, 3, 5]
    out, lse = oracle.attention_rows(q[rows], k, v, [4, 7, 9])
    np.testing.assert_allclose(out, expected[rows], rtol=1e-12)
    np.testing.assert_allclose(lse, expected_lse[rows], rtol=1e-12)


@pytest.mark.parametrize("name", ["fp8-g128-f32", "bf16", "int4-g64"])
def test_records_that_a_list_names(rng, name):
    cache = latent.Caches("cpu").get(name, 2, 200)
    tokens = rng.integers(0, 200, 70)
    slots = cache.block_table[1, tokens // 64].astype(np.int64) * 64 + tokens % 64
    k, v = latent.stored(cache, slots)
    whole_k, whole_v = cache.dequantize()
    np.testing.assert_array_equal(k, whole_k[200 + tokens])
    np.testing.assert_array_equal(v, whole_v[200 + tokens])


def test_the_clock_is_that_of_the_sms_that_ran():
    first, last = np.zeros((2, 256, 2), np.int64)
    assert clock.clock_of(first, last) is None
    first[:3], last[:3] = (1000, 500), (19000, 10500)
    first[3] = (7, 7)  # ran before only
    assert clock.clock_of(first, last) == pytest.approx(1800.0)


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["prefill", "chunks", "mla"])
def test_a_small_run_on_a_gpu(suite, tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["--suite", suite, "--device", "cuda:0", "--smoke", "--seconds", "0.01", "--json", str(path)]
    assert compare.main(arguments) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if "peer" not in row]
    assert rows and FIELDS[suite] <= set(rows[0])
    for row in rows:
        assert row["us"] > 0 and 300 < row["mhz"] < 3000
        assert row["graph"] is True and "no_graph" not in row
        assert row["error"] < (0.005 if row.get("arithmetic", "16-bit") == "16-bit" else 0.2)
        assert row.get("lse_error", 0) < 0.01
