"""The table, the JSON file and the plot of a comparison."""

from __future__ import annotations

from html import escape
from typing import Any

_WIDTH, _LEFT, _BAR, _GAP = 900, 250, 17, 30
_STYLE = """text{font:12px sans-serif;fill:#222}.t{font-size:15px;font-weight:bold}.c{font-weight:bold}.n{fill:#666}
.h{fill:#2a7ab8}.p{fill:#b9bec4}.r{stroke:#c0392b;stroke-width:2}"""


def not_captured(rows: list[dict[str, Any]]) -> list[str]:
    """For people: who was timed by calls because there is no graph of them."""
    reasons = dict.fromkeys((row["label"], row["no_graph"]) for row in rows if "no_graph" in row)
    return [f"{label} was timed by calls from Python, the host included: {why}" for label, why in reasons]


def table(report: dict[str, Any]) -> str:
    """For people; times in microseconds."""
    meta = report["meta"]
    lines = [
        f"{meta['device']}: a large copy moves {meta['bandwidth'] / 1e9:.0f} GB/s. halftone {meta['halftone']}.",
        f"time: {meta['timing']}. GB/s: bytes of K and V that the",
        "format makes it read. roof: its share of the copy's rate. error: relative, against double precision on the",
        "values before quantisation; kernel: on the values as the cache holds them.",
        "",
    ]
    for case in report["cases"]:
        lines.append(case["name"])
        lines.append(f"  {'':38} {'us':>9} {'GB/s':>7} {'roof':>6} {'error':>9} {'kernel':>9}")
        for row in case["rows"]:
            if "us" not in row:
                lines.append(f"  {row['label']:38} {row['why']}")
                continue
            kernel = f"{row['kernel_error']:.1e}" if row.get("kernel_error") is not None else "-"
            lines.append(
                f"  {row['label']:38} {row['us']:9.1f} {row['gb_per_s']:7.0f} {row['roof']:6.0%} "
                f"{row['error']:9.1e} {kernel:>9}"
            )
        lines.append("")
    lines += not_captured([row for case in report["cases"] for row in case["rows"]])
    for name, state in report["peers"].items():
        lines.append(f"{name}: {state}")
    return "\n".join(lines)


def plot(report: dict[str, Any]) -> str:
    """A self-contained SVG: times as bars, and on each bar a red mark at its bytes over the bandwidth."""
    body: list[str] = []
    y = 64
    meta = report["meta"]
    for case in report["cases"]:
        rows = [row for row in case["rows"] if "us" in row]
        if not rows:
            continue
        longest = max(row["us"] for row in rows)
        body.append(f'<text class="c" x="16" y="{y}">{escape(case["name"])}</text>')
        y += 8
        for row in rows:
            width = (_WIDTH - _LEFT - 220) / longest
            kind = "h" if row["label"].startswith("halftone") else "p"
            mark = _LEFT + row["roof_us"] * width
            body.append(
                f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(row["label"])}</text>'
                f'<rect class="{kind}" x="{_LEFT}" y="{y + 2}" width="{row["us"] * width:.1f}" height="{_BAR - 4}"/>'
                f'<line class="r" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y}" y2="{y + _BAR}"/>'
                f'<text class="n" x="{max(_LEFT + row["us"] * width, mark) + 6:.1f}" y="{y + 13}">'
                f"{row['us']:.1f} us, {row['roof']:.0%}, error {row['error']:.0e}</text>"
            )
            y += _BAR
        y += _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}">'
        f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{y}" fill="#fff"/>'
        f'<text class="t" x="16" y="24">{escape(meta["suite"])} on {escape(meta["device"])}</text>'
        f'<text class="n" x="16" y="42">Bars: median time. Red: the time in which memory moves the bytes of K and V '
        f"that the format needs, at {meta['bandwidth'] / 1e9:.0f} GB/s.</text>"
    )
    return head + "".join(body) + "</svg>\n"
