"""Suites whose rows are for the record: prefill, chunks and mla. Every participant of a case gets the same inputs, its
output is held against double precision and against the first one's, and its row says at which clock it was measured."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

import halftone as ht

from .oracle import relative_error
from .peers import Refusal, line_of
from .report import not_captured


@dataclass
class Part:
    """What one participant does in a case: ``call`` returns its output, in any shape of as many elements."""

    call: Callable[[], Any]
    fields: dict[str, Any] = field(default_factory=dict)  # what its rows say beside the case's fields
    read_bytes: float = 0.0  # of K and V; 0: not what limits this suite
    lse: Callable[[], Any] | None = None  # the LSE of the same call, f32 [total_q, q_heads], in halftone's convention
    schedule: Callable[[], Any] | None = None  # makes halftone's schedule anew, on the current stream


@dataclass
class Work:
    """A case with its inputs.

    ``fields`` are those of all its rows, ``flops`` is what a call computes, ``parts`` makes the participants, by the
    name of the peer ("halftone" for our own) and a label; ``error`` holds an output against double precision,
    ``lse_error`` an LSE. ``gather_gbs``: GB/s that reading what lists name reaches, if that is known.
    """

    name: str
    fields: dict[str, Any]
    flops: float
    parts: list[tuple[str, str, Callable[[], Part]]]
    error: Callable[[Any], float]
    lse_error: Callable[[Any], float] | None = None
    gather_gbs: float | None = None


def as_host(x: Any) -> NDArray[Any]:
    """f64 on the host."""
    return np.asarray(x, np.float64) if isinstance(x, np.ndarray) else x.detach().double().cpu().numpy()


def difference(actual: Any, expected: Any) -> float:
    """Relative (Frobenius) difference of two outputs, wherever they lie."""
    if isinstance(actual, np.ndarray) or isinstance(expected, np.ndarray):
        return relative_error(as_host(actual).reshape(-1), as_host(expected).reshape(-1))
    other = expected.reshape(-1).float()
    return float((actual.reshape(-1).float() - other).norm() / other.norm())


def measure(
    work: Work, present: set[str], timer: Any, rate: float
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Rows, and who was left out with the reason."""
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    first: Any = None
    for peer, label, make in work.parts:
        if peer not in present:
            continue
        try:
            part = make()
            out = part.call()
            row = dict(work.fields, **part.fields, label=label, error=work.error(out))
            if first is None:
                first = out.clone() if hasattr(out, "clone") else out.copy()
            row["difference"] = difference(out, first)
            if part.lse is not None and work.lse_error is not None:
                row["lse_error"] = work.lse_error(part.lse())
            timed, how = timer.captured(part.call, part.schedule)
            row.update(_figures(work, part, timer.settled(timed), rate), **how)
            if peer != "halftone":
                row["peer"] = peer
            rows.append(row)
        except (Refusal, ht.UnsupportedError) as error:
            left_out.append({"case": work.name, "label": label, "why": str(error)})
        except Exception as error:  # a peer's failure is a finding, not the end of the comparison
            left_out.append({"case": work.name, "label": label, "why": f"failed: {line_of(error)}"})
        part = out = timed = None  # type: ignore[assignment]
        gc.collect()
    return rows, left_out


def _figures(work: Work, part: Part, times: tuple[float, float | None], rate: float) -> dict[str, Any]:
    seconds, mhz = times
    figures: dict[str, Any] = {"us": seconds * 1e6, "tflops": work.flops / seconds / 1e12, "mhz": mhz}
    if part.read_bytes:
        figures["gbs"] = part.read_bytes / seconds / 1e9
        # A copy's rate bounds contiguous reads. Gathers are timed by `halftone bench --table mla`.
        figures["ceiling_gbs"] = work.gather_gbs if work.fields.get("top_k") else rate / 1e9
    return figures


def run(
    works: Any, present: set[str], timer: Any, rate: float, result: dict[str, Any], save: Callable[[], None]
) -> None:
    """Measures what ``works`` yields, case by case, so that inputs of one are gone before the next, into ``result``.

    ``save`` is called after each case, so that what was measured outlives an interruption.
    """
    result.update(rows=[], left_out=[])
    for make in works:
        work = make()
        print(f"measuring {work.name}", file=sys.stderr, flush=True)
        rows, left_out = measure(work, present, timer, rate)
        result["rows"] += [dict(suite=result["meta"]["suite"], case=work.name, **row) for row in rows]
        result["left_out"] += left_out
        save()
        work = None


def _is_wide(row: dict[str, Any]) -> bool:
    return bool(row.get("arithmetic", "16-bit") == "16-bit")


def table(result: dict[str, Any]) -> str:
    """For people: rows by case, with the time relative to the fastest peer's of as wide operands."""
    meta = result["meta"]
    lines = [
        f"{meta['device']}: a large copy moves {meta['bandwidth'] / 1e9:.0f} GB/s. halftone {meta['halftone']}.",
        f"time: {meta['timing']}. ratio: the time of the fastest peer, of those with",
        "16-bit operands or of those with narrower ones, over it. error: relative, against double precision on a few",
        "rows; differs: the whole output, from the first line's.",
    ]
    reasons: dict[tuple[str, str], None] = {}
    for case in dict.fromkeys([row["case"] for row in result["rows"]] + [x["case"] for x in result["left_out"]]):
        rows = [row for row in result["rows"] if row["case"] == case]
        best = {
            wide: min((row["us"] for row in rows if "peer" in row and _is_wide(row) == wide), default=None)
            for wide in (True, False)
        }
        lines += [
            "",
            case,
            f"  {'':40} {'us':>9} {'TFLOP/s':>8} {'GB/s':>6} {'MHz':>5} {'ratio':>6} {'error':>8} {'differs':>8}",
        ]
        for row in rows:
            fastest = best[_is_wide(row)]
            ratio = f"{fastest / row['us']:.2f}" if fastest is not None else "-"
            mhz, gbs = (f"{row[key]:.0f}" if row.get(key) else "-" for key in ("mhz", "gbs"))
            lines.append(
                f"  {row['label']:40} {row['us']:9.1f} {row['tflops']:8.1f} {gbs:>6} {mhz:>5} {ratio:>6} "
                f"{row['error']:8.1e} {row['difference']:8.1e}"
            )
        reasons.update(((x["label"], x["why"]), None) for x in result["left_out"] if x["case"] == case)
    lines += ["", *(f"{label} was left out: {why}" for label, why in reasons), *not_captured(result["rows"]), ""]
    return "\n".join(lines + [f"{name}: {state}" for name, state in result["peers"].items()])
