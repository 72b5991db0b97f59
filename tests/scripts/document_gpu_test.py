#!/usr/bin/env python3
"""Tests of bench/document_gpu.py on small records, as older and newer commands write them."""

import json
import pathlib
import shutil
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import document_gpu
import goals
from recorded import rows_of


def write_goals(page, name, alone, beside):
    """Fills the page in as the one of that name, with rows of halftone alone and of runs beside peers."""
    results, goal = page.parent, document_gpu.GOALS[f"docs/kernels/{name}"]
    for files, rows in zip(goal[2:], (alone, beside)):
        for file in files:
            (results / file).write_text(json.dumps({"rows": rows}))
    document_gpu.write_goals(page, results, *goal)


def latent_row(form, **fields):
    row = {"suite": "mla", "format_k": form, "format_v": form, "batch": 2, "context": 32768, "q_heads": 16, "q_len": 1,
           "us": 10.0, "gbs": 1500.0, "ceiling_gbs": 3000.0, "kind": "sparse_decode", "top_k": 2048, "gather_us": 8.0,
           "tflops": 20.0, "mhz": None, "chain": 1}
    return {**row, **fields}


class LatentTables(unittest.TestCase):
    FORMATS = ("fp8-g128-f32", "bf16")

    def test_a_row_for_each_shape_and_a_column_for_each_format(self):
        lines = document_gpu.mla([latent_row(f, q_heads=h) for f in self.FORMATS for h in (16, 128)]).splitlines()
        self.assertEqual(lines[0], "| kind | heads | requests x queries | keys | fp8-g128-f32 | bf16 |")
        self.assertEqual(lines[2:], [
            "| sparse decode | 16 | 2 x 1 | 2048 of 32768 | 10.0, 80% | 10.0, 80% |",
            "| sparse decode | 128 | 2 x 1 | 2048 of 32768 | 10.0, 20 TF | 10.0, 20 TF |"])

    def test_rows_with_one_format_and_a_clock_make_the_same_table(self):
        older = [latent_row(f) for f in self.FORMATS]
        newer = [latent_row(f, format=f, mhz=1605.0) for f in self.FORMATS]
        alone = [{k: v for k, v in row.items() if k not in ("format_k", "format_v")} for row in newer]
        for rows in (newer, alone):
            self.assertEqual(document_gpu.mla(rows), document_gpu.mla(older))

    def test_rows_beside_flashmla_may_have_the_rate_of_a_gather(self):
        rows = [dict(latent_row("bf16", format="bf16", mhz=1605.0), **peer) for peer in ({}, {"peer": "flash_mla"})]
        for ceiling in (None, 3000.0):
            lines = document_gpu.mla_peers([dict(row, ceiling_gbs=ceiling) for row in rows]).splitlines()
            self.assertEqual(len(lines), 3)
            self.assertIn("| 10.0 | 20 @ 1605 | 1500 | 10.0 | 20 @ 1605 | 1500 | 1.00 |", lines[2])

    def test_how_a_row_was_timed_changes_no_table(self):
        rows = [dict(latent_row("bf16", format="bf16", mhz=1605.0), **peer) for peer in ({}, {"peer": "flash_mla"})]
        timed = [dict(rows[0], graph=True), dict(rows[1], graph=False, no_graph="RuntimeError: it synchronises")]
        self.assertEqual(document_gpu.mla_peers(timed), document_gpu.mla_peers(rows))

    def test_goals_have_their_figures_and_keep_their_words(self):
        lists = [latent_row("fp8-g128-f32", q_heads=8, batch=128, q_len=q_len, us=us)
                 for q_len, us in ((1, 8.5), (2, 10.0))]
        row = "| 8 heads, lists | words | old | old | [design](x.md) | counters |"
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "page.md"
            page.write_text("\n".join(row.replace("8 heads, lists", work) for work in goals.latent_goals()))
            peers = lists + [dict(lists[0], peer="flash_mla", us=12.0)]
            write_goals(page, "latent-measured.md", lists, peers)
            written = {line.split(" | ")[0]: line for line in page.read_text().splitlines()}
            self.assertEqual(written["| 8 heads, lists"], "| 8 heads, lists | words | **8.5 (94%)**, 10.0 (80%) | "
                             "**8.5 (94%)**, 10.0 (80%); 12.0 | [design](x.md) | counters |")
            self.assertEqual(written["| 16 heads, lists"],
                             "| 16 heads, lists | words |  |  | [design](x.md) | counters |")
            page.write_text(row)
            with self.assertRaises(SystemExit):
                write_goals(page, "latent-measured.md", lists, peers)

    def test_a_goal_beside_bf16_is_a_share_of_its_time(self):
        dense = dict(kind="dense_decode", top_k=None, context=4096, batch=128, gather_us=None)
        rows = [latent_row(form, us=us, **dense) for form, us in (("fp8-g128-f32", 9.0), ("bf16", 15.0))]
        goal = goals.latent_goals()["16 heads, all keys, fp8"][0]
        for row in rows:
            row["format"] = row["format_k"]
        self.assertEqual(goals.goal_figure(rows, *goal), ("**9.0 (0.60)**", None))
        self.assertEqual(goals.goal_figure(rows[:1], *goal), (None, None))


def decode_row(form, us, **fields):
    return {"suite": "decode", "table": "headline", "format_k": form, "format_v": form, "batch": 32, "context": 8192,
            "q_heads": 8, "kv_heads": 1, "q_len": 1, "us": us, "gbs": 2000.0, "ceiling_gbs": 2500.0, **fields}


class DecodeGoals(unittest.TestCase):
    GOALS = goals.decode_goals()

    def figures(self, rows, work):
        return [goals.goal_figure(rows, *goal) for goal in self.GOALS[work]]

    def test_the_page_has_a_row_for_each_goal_and_keeps_its_words(self):
        source = document_gpu.ROOT / "docs/kernels/decode-goals.md"
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "page.md"
            page.write_text(source.read_text())
            write_goals(page, "decode-goals.md", [decode_row("fp8", 25.0)], [])
            before, after = (path.read_text().splitlines() for path in (source, page))
        self.assertEqual(len(before), len(after))
        for old, new in zip(before, after):
            if old != new:
                cells = [[cell.strip() for cell in line.split("|")] for line in (old, new)]
                self.assertEqual(*(row[:3] + row[5:] for row in cells))
        self.assertTrue(any(line.startswith("| 8/1 heads, fp8 | ") and "| **25.0 (80%)** |" in line for line in after))

    def test_a_layer_is_what_appends_and_two_launches_are_what_they_add(self):
        rows = [layer_row("bf16", way, us, table="layer", batch=64) for way, us in
                (("none", 470.0), ("separate", 472.0), ("fused", 474.0))]
        rows = [dict(row, before="gemm-4096", us=1.0) for row in rows] + rows
        self.assertEqual(self.figures(rows, "layers, batch 64")[0], ("**474.0**", None))
        self.assertEqual(self.figures(rows, "append apart, batch 64")[0], ("**472.0 (+2.0)**", None))
        self.assertEqual(self.figures(rows, "layers, batch 64")[1], (None, None))

    def test_bf16_is_beside_cudnn_alone_in_a_run_of_all(self):
        case = {"name": "batch 32", **{key: value for key, value in decode_row("", 0).items()
                                       if key in ("batch", "context", "q_heads", "kv_heads", "q_len")}}
        times = {"halftone bf16": 48.8, "halftone fp8": 32.0, "torch SDPA cudnn bf16": 49.5,
                 "torch SDPA flash bf16": 40.0}
        case["rows"] = [{"label": "sageattention", "why": "-"}, *({"label": x, "us": us} for x, us in times.items())]
        rows = rows_of({"cases": [case]})
        self.assertEqual([row.get("peer") for row in rows], [None, None, "torch SDPA cudnn", "torch SDPA flash"])
        self.assertEqual(self.figures(rows, "8/1 heads, beside cuDNN")[0], ("**48.8**", "49.5"))
        self.assertEqual(self.figures(rows, "8/1 heads, fp8")[0], (None, None))

    def test_rows_of_a_draft_are_beside_the_faster_of_its_peers(self):
        draft = {"q_heads": 16, "kv_heads": 1, "q_len": 3, "context": 1024, "batch": 256}
        rows = [decode_row(form, us, **draft, arithmetic=arithmetic, **({"peer": peer} if peer else {}))
                for form, us, arithmetic, peer in (
                    ("fp8", 41.0, "fp8", None), ("fp8", 26.0, "16-bit", None), ("plain", 42.4, "fp8", "flash_attn 3"),
                    ("fp8", 44.1, "fp8", "flash_attn 3"), ("bf16", 9.0, "16-bit", "flash_attn 3"))]
        self.assertEqual(self.figures(rows, "48 rows, fp8")[:2], [("**26.0**", "42.4"), (None, None)])


def layer_row(form, way, us, **fields):
    return {"suite": "layer", "format_k": form, "format_v": form, "batch": 8, "append": way, "us": us, **fields}


class LayerTables(unittest.TestCase):
    ALONE = [layer_row("int4-g32", way, us) for way, us in (("none", 25.6), ("separate", 27.7), ("fused", 25.7))]
    BEHIND = [layer_row("int4-g32", way, us - early, before="gemm-4096", early=early, gemm_us=7.6)
              for way, us in (("none", 29.9), ("separate", 31.9), ("fused", 30.1)) for early in (True, False)]

    def test_layers_and_layers_behind_a_projection_are_two_tables(self):
        self.assertEqual(document_gpu.layer(self.ALONE + self.BEHIND).splitlines()[2:],
                         ["| int4-g32 | 8 | 25.6 | 27.7 | 25.7 |"])
        lines = document_gpu.layer_behind(self.ALONE + self.BEHIND).splitlines()
        self.assertEqual(lines[0], "| format | batch | GEMM | attention alone: late, early "
                                   "| append() and run(): late, early | run() appends: late, early |")
        self.assertEqual(lines[2:], ["| int4-g32 | 8 | 7.6 | 29.9, 28.9 | 31.9, 30.9 | 30.1, 29.1 |"])

    def test_a_draft_is_a_line_of_three_ways(self):
        rows = [layer_row(form, way, us + n, q_len=4, context=2048) for n, form in enumerate(("bf16", "fp8"))
                for way, us in (("none", 8.2), ("separate", 9.8), ("fused", 9.9))]
        lines = document_gpu.drafts(rows + [layer_row("fp8", "none", 10.5, q_len=16, context=2048)]).splitlines()
        self.assertEqual(lines[0], "| new tokens | keys x requests | format | attention alone "
                                   "| append() and run() | run() appends |")
        self.assertEqual(lines[2:], ["| 4 | 2048 x 8 | bf16 | 8.2 | 9.8 | 9.9 |",
                                     "| 4 | 2048 x 8 | fp8 | 9.2 | 10.8 | 10.9 |",
                                     "| 16 | 2048 x 8 | fp8 | 10.5 |  |  |"])

    def test_what_stands_there_stays_where_no_row_is_behind_a_projection(self):
        self.assertIsNone(document_gpu.layer_behind(self.ALONE))
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "page.md"
            page.write_text("<!-- figures: layer_behind -->\n\nby hand\n\n<!-- end -->\n")
            report = {"device": {}, "rows": self.ALONE}
            document_gpu.write_page(page, report, (document_gpu.layer_behind,))
            self.assertIn("by hand", page.read_text())
            report["rows"] = self.ALONE + self.BEHIND
            document_gpu.write_page(page, report, (document_gpu.layer_behind,))
            self.assertNotIn("by hand", page.read_text())
            self.assertIn("| 29.9, 28.9 |", page.read_text())


class Pages(unittest.TestCase):
    def test_the_pages_are_those_of_the_results(self):
        root = document_gpu.ROOT
        for _, results in document_gpu.PAGES:
            self.assertTrue((root / "bench/results" / results).is_file(), results)
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            shutil.copytree(root / "docs", copy / "docs")
            shutil.copytree(root / "bench/results", copy / "bench/results")
            with mock.patch.object(document_gpu, "ROOT", copy):
                document_gpu.main()
            for page in sorted((root / "docs").rglob("*.md")):
                name = page.relative_to(root)
                with self.subTest(page=str(name)):
                    self.assertEqual((copy / name).read_text(), page.read_text(), "run bench/document_gpu.py")


if __name__ == "__main__":
    unittest.main()
