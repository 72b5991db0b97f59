#!/usr/bin/env python3
"""Writes the figures of bench/results/cpu-decode-peers.json into docs/benchmarks-cpu.md, from its "## Figures" on."""

import json
import sys

from compare_cpu import ROOT, wanted

sys.path.append(str(ROOT / "scripts"))
from check_prose import wrap  # noqa: E402

HEADING = "## Figures\n"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([" :-- "] + [" --: "] * (len(header) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def percent(fraction):
    return f"{100 * fraction:.0f}%"


def figures(report):
    where = report["machine"]
    state = f"commit {where['commit']}" + (" with uncommitted changes" if where["uncommitted_changes"] else "")
    yield (f"{where['cpu']}, {where['threads']} threads of {where['cpus']}, {where['simd']}, {where['compiler']}, "
           f"{state}, {where['date'][:10]}; {report['rounds']} rounds of {report['calls']} steps; load average "
           f"{where['load_average_before']:.1f} before"
           + (", timed at real-time priority." if where["realtime"] else "."))
    versions = sorted({row["version"] for row in report["rows"] if "version" in row})
    yield f"Peers: {', '.join(versions)}." + (f" Could not run: {report['left_out']}." if report["left_out"] else "")
    yield table(["reading memory", "median, GB/s", "lowest round", "highest round"],
                [(name, f"{read['gbs_median_of_rounds']:.1f}", f"{min(read['gbs_rounds']):.1f}",
                  f"{read['gbs_best']:.1f}") for name, read in report["read"].items()])
    ratio = lambda row, name: f"{row[f'times_{name}']:.2f}" if f"times_{name}" in row else "1"
    yield table(["one decode step", "ms", "MB", "GB/s", "of one stream", "of fastest read", "error",
                 "time / int8-head", "time / int4-g32"],
                [(row["name"], f"{row['us'] / 1e3:.2f}", f"{row['bytes'] / 1e6:.0f}", f"{row['gbs']:.1f}",
                  percent(row["of_sequential_read"]), percent(row["of_read"]), f"{row['relative_error']:.4f}",
                  ratio(row, "int8-head"), ratio(row, "int4-g32")) for row in report["rows"]])
    yield table(["target", "wanted", "measured", ""],
                [(t["what"], wanted(t), f"{t['measured']:.2f}",
                  "met" if t["met"] else "**missed**") for t in report["targets"]])
    yield ("Beyond the cache: resident memory of the process over the filled cache, q and the output, at its highest "
           "during plan, schedule and run, or the workspace if that is larger.")
    for axis, formats in report["scaling"].items():
        fixed = next(iter(formats.values()))["fixed"]
        yield (f"Time against {axis}, {', '.join(f'{k} {v}' for k, v in fixed.items())}, from `halftone bench` (4 KB "
               "pages): " + "; ".join(f"{name} grows with {axis} to the power {s['exponent']:.2f}"
                                      for name, s in formats.items()) + ".")
        points = list(next(iter(formats.values()))["us"])
        yield table(["ms at " + axis] + points,
                    [[name] + [f"{s['us'][p] / 1e3:.2f}" for p in points] for name, s in formats.items()])


def main():
    report = json.loads((ROOT / "bench/results/cpu-decode-peers.json").read_text())
    page = ROOT / "docs/benchmarks-cpu.md"
    text = page.read_text().split(HEADING)[0].rstrip() + "\n\n" + HEADING + "\n"
    page.write_text(wrap(text + "\n\n".join(figures(report)) + "\n"))


main()
