#!/usr/bin/env python3
"""Tests of the figures of docs/kernels/prefill-goals.md on small records."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import document_gpu
import prefill_goals
from prefill_goals import CUDNN, FA3, Cell, call, column

HEADS = (16, 16)


def recorded(tflops, *of, us=100.0, **rest):
    """A row as files have it: without the fields that it has no value for."""
    fields = {**call(*of, **rest), "tflops": tflops, "us": us}
    return {key: value for key, value in fields.items() if value is not None}


class Figures(unittest.TestCase):
    TENSORS = ("16-bit", "plain", HEADS, 128, False, 4096)
    CODES = ("half_int8", "plain", HEADS, 128, False, 4096)

    def test_the_best_peer_counts_and_is_named(self):
        cells = [Cell(call(*self.TENSORS), 1.03, peers=tuple(call(*self.TENSORS, peer=p) for p in (FA3, CUDNN)))]
        rows = [recorded(660.0, *self.TENSORS), recorded(600.0, *self.TENSORS, peer=FA3)]
        self.assertEqual(column(rows, cells, True), "**660 (1.100)**; 600")
        self.assertEqual(column(rows + [recorded(655.0, *self.TENSORS, peer=CUDNN)], cells, True),
                         "660 (1.007); 655 cuDNN")
        self.assertEqual(column(rows[:1], cells, True), "")
        self.assertEqual(column(rows[:1], cells, False), "660")

    def test_ratios_are_rounded_down_and_bold_from_the_goal_on(self):
        cells = [Cell(call(*self.CODES), 1, (call(*self.TENSORS),))]
        rows = lambda codes: [recorded(codes, *self.CODES), recorded(600.0, *self.TENSORS)]
        self.assertEqual(column(rows(599.9), cells, True), "0.999")
        self.assertEqual(column(rows(600.0), cells, True), "**1.000**")
        self.assertEqual(column(rows(600.0)[:1], cells, True), "")

    def test_a_rate_is_compared_with_what_is_wanted(self):
        cells = [Cell(call(*self.CODES), wanted) for wanted in (600, 700)]
        self.assertEqual(column([recorded(650.0, *self.CODES)], cells, False), "**650**, 650")

    def test_what_is_missing_is_a_dash_beside_what_is_there(self):
        cells = [Cell(call(*self.TENSORS), 1), Cell(call(*self.CODES), 700)]
        self.assertEqual(column([recorded(650.0, *self.CODES)], cells, False), "-, 650")

    def test_many_calls_are_counted(self):
        cells = [Cell(call("16-bit", "fp8", HEADS, 128, True, keys), 1, unit="times",
                      peers=(call("fp8", "fp8", HEADS, 128, True, keys, peer=FA3),)) for keys in (1024, 2048)]
        rows = [{**cell.call, "us": 1.0, "tflops": tflops} for cell, tflops in zip(cells, (90.0, 120.0))]
        rows += [{**cell.peers[0], "us": 1.0, "tflops": 100.0} for cell in cells]
        self.assertEqual(column(rows, cells, True), "1 of 2 calls; 0.900 to 1.200")

    def test_short_calls_have_their_time(self):
        cells = [Cell(call(*self.TENSORS), 1, peers=(call(*self.TENSORS, peer=FA3),), unit="us")]
        rows = [recorded(50.0, *self.TENSORS, us=20.0), recorded(40.0, *self.TENSORS, us=25.0, peer=FA3)]
        self.assertEqual(column(rows, cells, True), "**20.0 (1.250)**; 25.0")

    def test_a_step_is_a_share_of_its_parts(self):
        goal = prefill_goals.goals()["step, fp8"]
        step = lambda q_len, batch, us: {"table": "steps", "format_k": "fp8", "q_len": q_len, "batch": batch, "us": us}
        parts = [step(2048, 8, 500.0), step(1, 64, 250.0)]
        self.assertEqual(column([step(2048, 72, 750.0), *parts], goal, False), "**1.000**")
        self.assertEqual(column([step(2048, 72, 750.1), *parts], goal, False), "1.001")  # rounded up
        self.assertEqual(column([step(2048, 72, 600.0), parts[0]], goal, False), "")


class Page(unittest.TestCase):
    def test_figures_are_written_and_words_stay(self):
        goals = prefill_goals.goals()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            page = folder / "page.md"
            page.write_text("\n".join(f"| {work} | goal | old | old | designs | counters |" for work in goals)
                            + "\n| by hand | goal | 1.01 | | none | none |")
            document_gpu.write_goals(page, folder, *document_gpu.GOALS["docs/kernels/prefill-goals.md"])
            self.assertIn("| old | old |", page.read_text())  # no results
            tensors = recorded(764.0, "16-bit", "plain", HEADS, 128, False, 16384)
            for suite in ("prefill", "steps", "prefill-compare", "chunks-compare"):
                (folder / f"{suite}-h200.json").write_text(json.dumps({"rows": [tensors]}))
            document_gpu.write_goals(page, folder, *document_gpu.GOALS["docs/kernels/prefill-goals.md"])
            written = {line.split(" | ")[0][2:]: line for line in page.read_text().splitlines()}
            self.assertEqual(written["bf16, head_dim 128, TFLOP/s"],
                             "| bf16, head_dim 128, TFLOP/s | goal | **764**, - | **764**, - | designs | counters |")
            self.assertEqual(written["by hand"], "| by hand | goal | 1.01 | | none | none |")
            page.write_text("| by hand | goal | 1.01 | | none | none |")
            with self.assertRaises(SystemExit):
                document_gpu.write_goals(page, folder, *document_gpu.GOALS["docs/kernels/prefill-goals.md"])

    def test_no_two_calls_of_a_row_are_the_same(self):
        for work, cells in prefill_goals.goals().items():
            calls = [tuple(cell.call.items()) for cell in cells]
            self.assertEqual(len(calls), len(set(calls)), work)


if __name__ == "__main__":
    unittest.main()
