#!/usr/bin/env python3
"""Writes the tables of docs/measured.md and of docs/kernels/layer-measured.md, decode-goals.md, prefill-measured.md,
prefill-codes-measured.md, prefill-chunks-measured.md and latent-measured.md from these files of bench/results:

    decode-h200.json           halftone bench --backend cuda --table NAMES --json FILE, all tables but those below
    append-h200.json           the same with --table append
    layer-h200.json            the same with --table layer
    drafts-h200.json           the same with --table drafts
    mla-h200.json              the same with --table mla
    prefill-h200.json          the same with --table prefill
    steps-h200.json            the same with --table steps
    mla-compare-h200.json      python -m halftone.compare --suite mla --json FILE: beside FlashMLA
    prefill-compare-h200.json  python -m halftone.compare --suite prefill --json FILE: beside FlashAttention-3, cuDNN
    chunks-compare-h200.json   the same with --suite chunks
    decode-cudnn-h200.json     the same with --suite decode: beside cuDNN

each between its `<!-- figures: NAME -->` and the next `<!-- end -->`. Where there are no results, or none of a table's
rows in them, what stands there stays. Of the tables of goals in decode-goals.md, latent-measured.md and
prefill-goals.md only the columns of figures are written: the others are words of these pages."""

import json
import pathlib
import re
import statistics

import goals
import prefill_goals
from recorded import rows_of, name, share, us

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOP_PER_CLOCK = 4096  # of a Hopper SM's tensor cores, 16-bit operands


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def names(rows):
    return list(dict.fromkeys(name(row) for row in rows))


def headline(rows):
    wanted = lambda row: goals.WANTED.get(name(row), ("", "", ""))[(32, 128, 512).index(row["batch"])]
    return table(["format", "batch", "us", "GB/s", "of the ceiling", "wanted"],
                 [(name(r), r["batch"], us(r), f"{r['gbs']:.0f}", share(r), f"{wanted(r)}%" if wanted(r) else "")
                  for r in rows])


def by_column(rows, key, text, cell, corner="format"):
    columns = list(dict.fromkeys(key(row) for row in rows))
    cells = {(name(row), key(row)): cell(row) for row in rows}
    return table([corner] + [text(c) for c in columns],
                 [[n] + [cells.get((n, c), "") for c in columns] for n in names(rows)])


def chain(rows):
    return by_column(rows, lambda r: r["batch"], str, us)


def speculative(rows):
    return by_column(rows, lambda r: (r["context"], r["batch"]), lambda c: f"{c[0]} x {c[1]}", us)


def shapes(rows):
    heads = list(dict.fromkeys((r["q_heads"], r["kv_heads"]) for r in rows))
    parts = []
    for head in heads:
        own = [r for r in rows if (r["q_heads"], r["kv_heads"]) == head and r.get("us")]
        parts.append(by_column(own, lambda r: (r["context"], r["batch"]), lambda c: f"{c[0]} x {c[1]}", us,
                               f"{head[0]}/{head[1]} heads"))
    return "\n\n".join(parts)


def geometry(rows):
    return by_column(rows, lambda r: (r["head_dim"], r["page_size"], r["batch"]),
                     lambda c: f"dim {c[0]}, pages of {c[1]}, batch {c[2]}", share)


def mixed(rows):
    kind = lambda r: (f"{r['q_heads']}/{r['kv_heads']}", r["lengths"])
    formats = names(rows)
    cells = {(kind(r), name(r)): f"{us(r)} us, {share(r)}" for r in rows}
    return table(["heads", "lengths"] + formats,
                 [[*k] + [cells.get((k, f), "") for f in formats] for k in dict.fromkeys(kind(r) for r in rows)])


def policies(rows):
    order = ("fast", "reproducible", "batch_invariant")
    shape = lambda r: (name(r), f"{r['q_heads']}/{r['kv_heads']}", f"{r['context']} x {r['batch']}")
    cells = {(shape(r), r["policy"]): us(r) for r in rows}
    return table(["format", "heads", "context x batch", *order],
                 [[*k] + [cells[k, policy] for policy in order] for k in dict.fromkeys(shape(r) for r in rows)])


def append(rows):
    kinds = list(dict.fromkeys((r["q_len"], r["batch"]) for r in rows))
    text = lambda kind: f"{kind[0] * kind[1]} tokens" if kind[0] > 1 else f"{kind[1]} requests"
    cells = {(name(r), (r["q_len"], r["batch"])): (us(r), share(r)) for r in rows}
    header = ["format"]
    for kind in kinds:
        header += [f"{text(kind)}, us"] + (["of the ceiling"] if kind[0] > 1 else [])
    lines = []
    for n in names(rows):
        line = [n]
        for kind in kinds:
            line += list(cells[n, kind])[: 2 if kind[0] > 1 else 1]
        lines.append(line)
    return table(header, lines)


LAYERS = {"none": "attention alone", "separate": "append() and run()", "fused": "run() appends"}


def layer_lines(rows, cell):
    """A line for each format and batch: `cell` of the rows of each way to append."""
    own = lambda *key: [r for r in rows if (name(r), r["batch"], r["append"]) == key]
    return [[n, batch, *(cell(own(n, batch, way)) for way in LAYERS)]
            for n in names(rows) for batch in sorted({r["batch"] for r in rows})]


def layer(rows):
    return table(["format", "batch", *LAYERS.values()],
                 layer_lines([r for r in rows if "before" not in r], lambda own: us(own[0])))


def drafts(rows):
    shape = lambda r: (r["q_len"], f"{r['context']} x {r['batch']}", name(r))
    cells = {(shape(r), r["append"]): us(r) for r in rows}
    return table(["new tokens", "keys x requests", "format", *LAYERS.values()],
                 [[*own, *(cells.get((own, way), "") for way in LAYERS)] for own in dict.fromkeys(map(shape, rows))])


def layer_behind(rows):
    """What layers add to a GEMM: late, early."""
    rows = [r for r in rows if "before" in r]
    if not rows:
        return None
    lines = layer_lines(rows, lambda own: ", ".join(us(r) for r in sorted(own, key=lambda r: r["early"])))
    gemm = lambda batch: statistics.median(r["gemm_us"] for r in rows if r["batch"] == batch)
    heads = [f"{text}: late, early" for text in LAYERS.values()]
    return table(["format", "batch", "GEMM", *heads],
                 [[n, batch, f"{gemm(batch):.1f}", *cells] for n, batch, *cells in lines])


def prefill_shape(row):
    keys = f"{row['context']} x {row['batch']}"
    dims = f"{row['head_dim']}, {row['v_head_dim']} of V" if row.get("v_head_dim") else row["head_dim"]
    return (f"{row['q_heads']}/{row['kv_heads']}", dims, "causal" if row["causal"] else "none",
            keys if row["q_len"] == row["context"] else f"last {row['q_len']} of {keys}")


def prefill_figures(row, multiprocessors):
    mhz = row["mhz"]
    bound = f"{100 * row['tflops'] * 1e6 / (FLOP_PER_CLOCK * multiprocessors * mhz):.0f}%" if mhz else ""
    return us(row), f"{row['tflops']:.0f}", f"{mhz:.0f}" if mhz else "", bound


def prefill(rows, device):
    columns = ("us", "TFLOP/s", "MHz", "of its bound")
    rows = [row for row in rows if row["arithmetic"] == "16-bit"]
    cells = {(prefill_shape(r), r["format_k"]): prefill_figures(r, device["multiprocessors"]) for r in rows}
    shapes_of = dict.fromkeys(prefill_shape(r) for r in rows if r["format_k"] in ("plain", "bf16"))
    places = {"plain": "tensors", "bf16": "pages"}
    header = ["heads", "head_dim", "mask", "keys x batch"]
    return table(header + [f"{p}: {c}" for p in places.values() for c in columns],
                 [[*s] + [c for p in places for c in cells.get((s, p), ("",) * len(columns))] for s in shapes_of])


def prefill_codes(rows):
    of_codes = lambda r: r["arithmetic"] != "16-bit" or r["format_k"] not in ("plain", "bf16")
    return table(["heads", "head_dim", "mask", "keys x batch", "cache", "arithmetic", "us", "TFLOP/s", "MHz"],
                 [[*prefill_shape(r), name(r), r["arithmetic"], us(r), f"{r['tflops']:.0f}", f"{r['mhz']:.0f}"]
                  for r in rows if of_codes(r)])


def steps(rows):
    lines = []
    for form in names(rows):
        both, prompts, queries = (prefill_goals.find(rows, {"format_k": form, **part})["us"]
                                  for part in prefill_goals.STEP)
        lines.append([form, *(f"{x:.1f}" for x in (both, prompts, queries)), f"{both / (prompts + queries):.3f}"])
    return table(["format", "both in one call", "prompts alone", "queries alone", "call / sum"], lines)


def speed(row):
    return f"{row['tflops']:.0f} @ {row['mhz']:.0f}" if row and row["mhz"] else f"{row['tflops']:.0f}" if row else ""


def ratio(ours, theirs):
    """How many times as fast the best of ours is as the best of theirs."""
    best = lambda rows: min((row["us"] for row in rows if row), default=None)
    return f"{best(theirs) / best(ours):.2f}" if best(ours) and best(theirs) else ""


def prefill_columns(rows, columns, ours, theirs):
    """A line for each shape in which one of `ours` was measured; `columns`: header -> which rows stand there."""
    lines = []
    for shape in dict.fromkeys(map(prefill_shape, rows)):
        own = [row for row in rows if prefill_shape(row) == shape]
        cells = {name: next((row for row in own if chosen(row)), None) for name, chosen in columns.items()}
        if any(cells[name] for name in ours):
            lines.append([*shape, *map(speed, cells.values()),
                          ratio([cells[name] for name in ours], [cells[name] for name in theirs])])
    return table(["heads", "head_dim", "mask", "keys x batch", *columns, "halftone / best peer"], lines)


def prefill_peers(rows):
    bf16 = lambda row: row["arithmetic"] == "16-bit"
    ours = {"tensors": lambda row: "peer" not in row and bf16(row) and row["format_k"] == "plain",
            "bf16 pages": lambda row: "peer" not in row and bf16(row) and row["format_k"] == "bf16"}
    theirs = {name: lambda row, peer=peer: row.get("peer") == peer and bf16(row)
              for name, peer in (("FlashAttention-3", "flash_attn 3"), ("cuDNN", "torch SDPA cudnn"),
                                 ("FlashInfer", "flashinfer")) if any(row.get("peer") == peer for row in rows)}
    return prefill_columns(rows, {**ours, **theirs}, ["tensors"], list(theirs))


def prefill_peers_8bit(rows):
    kinds = dict.fromkeys((row["arithmetic"], name(row)) for row in rows
                          if "peer" not in row and row["arithmetic"] != "16-bit")
    own = lambda kind: lambda row: "peer" not in row and (row["arithmetic"], name(row)) == kind
    ours = {f"{kind[0]}, {kind[1]}": own(kind) for kind in kinds}
    theirs = {"FlashAttention-3 fp8": lambda row: row.get("peer") == "flash_attn 3" and row["arithmetic"] == "fp8"}
    beside = {"FlashAttention-3 bf16": lambda row: row.get("peer") == "flash_attn 3" and row["arithmetic"] == "16-bit"}
    return prefill_columns(rows, {**ours, **theirs, **beside}, list(ours), list(theirs))


def chunk_peers(rows):
    """Drafts and chunks, us; what is as fast as 1.00 takes as long as the faster of FlashAttention-3's two."""
    shape = lambda r: (f"{r['q_heads']}/{r['kv_heads']}", r["q_len"] * r["q_heads"] // r["kv_heads"],
                       f"{r['context']} x {r['batch']}")
    own = lambda arithmetic, form: lambda r: (
        "peer" not in r and r["arithmetic"] == arithmetic and r["format_k"] == form)
    peer = lambda arithmetic, paged: lambda r: (
        "peer" in r and r["arithmetic"] == arithmetic and (r["format_k"] != "plain") == paged)
    bf16, fp8 = own("16-bit", "bf16"), own("fp8", "fp8")
    columns = {"bf16": bf16, "FA3 bf16": peer("16-bit", False), "its pages": peer("16-bit", True),
               "FA3 / bf16": ([bf16], [peer("16-bit", False), peer("16-bit", True)]),
               "fp8": own("16-bit", "fp8"), "int8-head": own("16-bit", "int8-head"),
               "int4-g32": own("16-bit", "int4-g32"), "`fp8`": fp8, "FA3 fp8": peer("fp8", False),
               "its pages ": peer("fp8", True), "FA3 / `fp8`": ([fp8], [peer("fp8", False), peer("fp8", True)])}
    lines = []
    for key in dict.fromkeys(map(shape, rows)):
        find = lambda chosen, key=key: next((r for r in rows if shape(r) == key and chosen(r)), None)
        cell = lambda what: (ratio(*([find(c) for c in side] for side in what)) if isinstance(what, tuple)
                             else us(find(what)) if find(what) else "")
        lines.append([*key, *map(cell, columns.values())])
    return table(["heads", "rows", "keys x batch", *(c.strip() for c in columns)], lines)


def mla_peers(rows):
    shape = lambda r: (r["kind"].replace("_", " "), r["q_heads"], f"{r['batch']} x {r['q_len']}",
                       f"{r['top_k']} of {r['context']}" if r["top_k"] else r["context"])
    find = lambda key, form, peer: next((r for r in rows if shape(r) == key and r["format"] == form
                                         and ("peer" in r) == peer), None)
    figures = lambda r: [us(r), speed(r), f"{r['gbs']:.0f}"] if r else [""] * 3
    kinds = list(dict.fromkeys(shape(row)[0] for row in rows))
    order = lambda row: (kinds.index(shape(row)[0]), -row["q_heads"], row["top_k"] or row["context"], row["batch"],
                         row["q_len"])
    lines = []
    for theirs in sorted((row for row in rows if "peer" in row), key=order):
        key, form = shape(theirs), theirs["format"]
        ours, fp8 = find(key, form, False), find(key, "fp8-g128-f32", False) if form == "bf16" else None
        lines.append([*key, form, *figures(ours), *figures(theirs), ratio([ours], [theirs]), us(fp8) if fp8 else ""])
    figures_of = lambda name: [f"{name}: us", "TFLOP/s @ MHz", "GB/s"]
    return table(["kind", "heads", "requests x queries", "keys", "format", *figures_of("halftone"),
                  *figures_of("FlashMLA"), "halftone / FlashMLA", "halftone fp8-g128-f32: us"], lines)


def mla(rows):
    second = lambda r: f", {r['extra_top_k']} of a second cache" if r.get("extra_top_k") else ""
    keys = lambda r: f"{r['top_k']} of {r['context']}{second(r)}" if r["top_k"] else r["context"]
    calls = lambda r: f", each of {r['chain']} in a graph" if r["chain"] > 1 else ""
    shape = lambda r: (r["kind"].replace("_", " "), r["q_heads"] if r["kind"] != "append" else "",
                       f"{r['batch']} x {r['q_len']}{calls(r)}", keys(r) if r["kind"] != "append" else "")
    formats = names(rows)
    figure = lambda r: f"{us(r)}, {r['tflops']:.0f} TF" if r["tflops"] and r["q_heads"] > 32 else (
        f"{us(r)}, {share(r)}" if r["ceiling_gbs"] else us(r))
    cells = {(shape(r), name(r)): figure(r) for r in rows}
    return table(["kind", "heads", "requests x queries", "keys", *formats],
                 [[*k] + [cells.get((k, f), "") for f in formats] for k in dict.fromkeys(map(shape, rows))])


PAGES = {
    ("docs/measured.md", "decode-h200.json"): (headline, chain, speculative, shapes, geometry, mixed, policies),
    ("docs/measured.md", "append-h200.json"): (append,),
    ("docs/measured.md", "layer-h200.json"): (layer,),
    ("docs/kernels/layer-measured.md", "layer-h200.json"): (layer_behind,),
    ("docs/kernels/layer-measured.md", "drafts-h200.json"): (drafts,),
    ("docs/kernels/prefill-measured.md", "prefill-h200.json"): (prefill,),
    ("docs/kernels/prefill-measured.md", "steps-h200.json"): (steps,),
    ("docs/kernels/prefill-codes-measured.md", "prefill-h200.json"): (prefill_codes,),
    ("docs/measured.md", "mla-h200.json"): (mla,),
    ("docs/measured.md", "prefill-compare-h200.json"): (prefill_peers, prefill_peers_8bit),
    ("docs/kernels/prefill-chunks-measured.md", "chunks-compare-h200.json"): (chunk_peers,),
    ("docs/measured.md", "mla-compare-h200.json"): (mla_peers,),
}
GOALS = {  # page -> its goals, what a row shows of rows and a goal, files of halftone alone, files beside peers
    "docs/kernels/decode-goals.md": (goals.decode_goals, goals.column,
                                     ("decode-h200.json", "layer-h200.json", "append-h200.json"),
                                     ("chunks-compare-h200.json", "decode-cudnn-h200.json")),
    "docs/kernels/latent-measured.md": (goals.latent_goals, goals.column, ("mla-h200.json",),
                                        ("mla-compare-h200.json",)),
    "docs/kernels/prefill-goals.md": (prefill_goals.goals, prefill_goals.column,
                                      ("prefill-h200.json", "steps-h200.json"),
                                      ("prefill-compare-h200.json", "chunks-compare-h200.json")),
}


def write_page(page, report, tables):
    text = page.read_text()
    for what in tables:
        own = what.__name__
        of = own.split("_")[0]  # prefill_codes: of the rows of prefill
        rows = [row for row in report["rows"] if row.get("table", of) == of and row.get("us")]
        mark = re.compile(rf"(<!-- figures: {what.__name__} -->\n).*?(<!-- end -->)", re.S)
        if not mark.search(text):
            raise SystemExit(f"{page} has no '<!-- figures: {what.__name__} -->'")
        lines = what(rows, report["device"]) if own == "prefill" else what(rows)
        if lines:
            text = mark.sub(lambda m: f"{m[1]}\n{lines}\n\n{m[2]}", text)
    page.write_text(text)


def write_goals(page, results, wanted, column, alone, beside):
    """Writes the third and fourth column of tables of six, whose first one says which of the goals a row is: what runs
    of halftone `alone` have and what those `beside` peers have. Other rows stay as they are; so does the page where a
    file is missing."""
    if not all((results / file).exists() for file in alone + beside):
        return
    read = lambda files: [row for file in files for row in rows_of(json.loads((results / file).read_text()))]
    rows, goals_of, written, lines = (read(alone), read(beside)), wanted(), set(), []
    for line in page.read_text().split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] in goals_of and len(cells) == 6:
            written.add(cells[0])
            cells[2:4] = (column(rows[peers], goals_of[cells[0]], peers) for peers in (False, True))
            line = "| " + " | ".join(cells) + " |"
        lines.append(line)
    if written != set(goals_of):
        raise SystemExit(f"{page} has no row for {', '.join(sorted(set(goals_of) - written))}")
    page.write_text("\n".join(lines))


def main():
    results = ROOT / "bench/results"
    for (page, file), tables in PAGES.items():
        if (results / file).exists():
            write_page(ROOT / page, json.loads((results / file).read_text()), tables)
    for page, goal in GOALS.items():
        write_goals(ROOT / page, results, *goal)


if __name__ == "__main__":
    main()
