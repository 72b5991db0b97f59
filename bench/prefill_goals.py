"""What is wanted of prefill on a GPU, and which recorded rows say whether it is reached: the columns of figures of the
table in docs/kernels/prefill-goals.md, which bench/document_gpu.py writes."""

import math
from typing import NamedTuple

from recorded import mark, us

FA3, CUDNN, FLASHINFER = "flash_attn 3", "torch SDPA cudnn", "flashinfer"
SHORT = {FA3: "", CUDNN: " cuDNN", FLASHINFER: " FlashInfer"}  # FlashAttention-3 where nothing is said


class Cell(NamedTuple):
    """A call, and what is wanted of it."""

    call: dict  # fields of its row
    wanted: float  # how many times as fast as the best of `than`, or without these TFLOP/s
    than: tuple = ()  # fields of rows in the same file
    peers: tuple = ()  # likewise, of peers; what the best of them does is shown
    unit: str = "tflops"  # what is shown: "tflops", "us", or no more than how many "times"
    parts: tuple = ()  # fields of rows: at most `wanted` of their times together is wanted, and that share is shown


def call(arithmetic, form, heads, head_dim, causal, context, batch=1, q_len=None, peer=None):
    """The fields of a row; `form`: a format, or "plain" for tensors."""
    q_heads, kv_heads = heads
    return {"arithmetic": arithmetic, "format_k": form, "format_v": form, "q_heads": q_heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "v_head_dim": None, "causal": causal, "context": context, "batch": batch,
            "q_len": q_len or context, "peer": peer}


def prompts(heads, total, *contexts):
    """Shapes of prompts of `total` tokens in all: heads, keys, requests."""
    return [(heads, context, total // context) for context in contexts]


# Of a step: prompts beside single queries in one call; the prompts, the queries alone.
STEP = ({"q_len": 2048, "batch": 72}, {"q_len": 2048, "batch": 8}, {"q_len": 1, "batch": 64})


def goals():
    """Work, as the first column has it -> its cells, in the order in which the row shows them."""
    of = lambda arithmetic, form, head_dim, causal, shape, **rest: call(
        arithmetic, form, shape[0], head_dim, causal, *shape[1:], **rest)
    peers = lambda arithmetic, head_dim, causal, shape, names, **rest: tuple(
        of(arithmetic, "plain", head_dim, causal, shape, peer=name, **rest) for name in names)
    masks = (("", False), (", causal", True))
    even = {head_dim: prompts((heads, heads), 16384, 1024, 4096, 16384)
            for head_dim, heads in ((64, 32), (128, 16), (256, 8))}
    mqa = prompts((16, 1), 32768, 1024, 4096, 16384, 32768)
    gqa, last = prompts((32, 8), 16384, 4096, 16384), {"shape": ((32, 8), 32768, 1), "q_len": 2048}
    table = {}

    for head_dim, shapes in even.items():
        for text, causal in masks:
            table[f"bf16, head_dim {head_dim}{text}"] = [
                Cell(of("16-bit", "plain", head_dim, causal, shape), 1.03,
                     peers=peers("16-bit", head_dim, causal, shape, (FA3, CUDNN, FLASHINFER)))
                for shape in shapes]
    table["bf16, head_dim 128, TFLOP/s"] = [
        Cell(of("16-bit", "plain", 128, causal, even[128][-1]), wanted)
        for causal, wanted in ((False, 700), (True, 680))]

    masked = lambda arithmetic, form, head_dim, shape: Cell(
        of(arithmetic, form, head_dim, True, shape), 0.97, (of(arithmetic, form, head_dim, False, shape),))
    whole = lambda head_dim: even[head_dim][-1]
    for text, form in (("bf16", "plain"), ("bf16 pages", "bf16")):
        table[f"causal, {text}"] = [masked("16-bit", form, head_dim, whole(head_dim)) for head_dim in even]
    other = {96: ((21, 21), 16384, 1), 192: ((10, 10), 16384, 1)}
    table["causal, bf16, other dims"] = [
        masked("16-bit", form, head_dim, shape) for form in ("plain", "bf16") for head_dim, shape in other.items()]
    table["causal, codes in 16 bits"] = [
        masked("16-bit", form, 128, gqa[-1]) for form in ("fp8", "int8-head", "int4-g32")]
    for form in ("int8-head", "int8-tensor"):
        table[f"causal, `half_int8`, {form}"] = [masked("half_int8", form, 128, shape) for shape in mqa[2:]]
    table["causal, `half_int8`, tensors"] = [
        masked("half_int8", "plain", head_dim, whole(head_dim)) for head_dim in (128, 256)]
    table["causal, `fp8`"] = [
        masked("fp8", form, head_dim, whole(head_dim)) for form in ("plain", "fp8") for head_dim in (128, 256)]

    for form, wanted in (("int8-head", (860, 830)), ("int8-tensor", (930, 890))):
        for (text, causal), at_least in zip(masks, wanted):
            table[f"`half_int8`, {form}{text}"] = [
                Cell(of("half_int8", form, 128, causal, shape), at_least) for shape in mqa[2:]]
    not_below = lambda form, head_dim, causal, shape: Cell(
        of("half_int8", form, head_dim, causal, shape), 1, (of("16-bit", "plain", head_dim, causal, shape),))
    for form in ("int8-head", "int8-tensor"):
        for text, causal in masks:
            table[f"`half_int8` for 16 bits, {form}{text}"] = [
                not_below(form, 128, causal, shape) for shape in mqa]
    for head_dim in (128, 256):
        for text, causal in masks:
            table[f"`half_int8` for 16 bits, tensors, head_dim {head_dim}{text}"] = [
                not_below("plain", head_dim, causal, shape) for shape in even[head_dim]]

    beside_fp8 = lambda head_dim, causal, shape, **rest: Cell(
        of("fp8", "fp8", head_dim, causal, shape, **rest), 1.05,
        peers=peers("fp8", head_dim, causal, shape, (FA3,), **rest))
    for head_dim in (128, 256):
        for text, causal in masks:
            table[f"`fp8`, head_dim {head_dim}{text}"] = [
                beside_fp8(head_dim, causal, shape) for shape in even[head_dim]]
    for text, causal in masks:
        table[f"`fp8`, 16/1 heads{text}"] = [beside_fp8(128, causal, shape) for shape in mqa]
    table["`fp8`, 32/8 heads, causal"] = [beside_fp8(128, True, shape) for shape in gqa] + [
        beside_fp8(128, True, **last)]

    of_tensors = lambda form, wanted, head_dim, causal, shape, **rest: Cell(
        of("16-bit", form, head_dim, causal, shape, **rest), wanted,
        (of("16-bit", "plain", head_dim, causal, shape, **rest),))
    for head_dim, shapes in even.items():
        table[f"bf16 pages, head_dim {head_dim}"] = [
            of_tensors("bf16", 0.97, head_dim, causal, shape)
            for _, causal in masks for shape in shapes[1:]]
    for form, wanted in (("bf16", 0.97), ("fp8", 0.93), ("int8-head", 0.93), ("int4-g32", 0.88)):
        table[f"{form} pages, 32/8 heads, causal"] = [of_tensors(form, wanted, 128, True, shape) for shape in gqa]
    table["bf16 pages, 32/8 heads, causal"].append(of_tensors("bf16", 0.97, 128, True, **last))

    drafts = [((16, 1), 3, *keys) for keys in ((8192, 32), (16384, 16), (32768, 8), (65536, 4), (131072, 2))]
    many = [((16, 1), q_len, *keys) for q_len in (8, 12, 16) for keys in ((8192, 32), (131072, 2))]
    few = [((32, 8), 32, keys, 1) for keys in (8192, 32768, 131072)] + [
        ((32, 8), 64, keys, 1) for keys in (8192, 131072)] + [((8, 8), 128, 8192, 1)]

    def chunk(arithmetic, form, theirs, shape, unit="us"):
        heads, q_len, *keys = shape
        one = lambda arithmetic, form, peer=None: call(arithmetic, form, heads, 128, True, *keys, q_len, peer)
        return Cell(one(arithmetic, form), 1, peers=tuple(one(theirs[0], form, FA3) for form in theirs[1]), unit=unit)

    for text, arithmetic, form, theirs in (("bf16", "16-bit", "bf16", ("16-bit", ("plain", "bf16"))),
                                           ("`fp8`", "fp8", "fp8", ("fp8", ("plain", "fp8")))):
        for rows, shapes in (("48 rows", drafts), ("128 to 256 rows, 16/1 heads", many),
                             ("128 to 256 rows, 32/8 and 8/8 heads", few)):
            table[f"{text}, {rows}"] = [chunk(arithmetic, form, theirs, shape) for shape in shapes]
    for form in ("fp8", "int8-head", "int4-g32"):
        table[f"{form} in 16 bits, 48 to 256 rows"] = [
            chunk("16-bit", form, ("fp8", ("plain", "fp8")), shape, "times") for shape in drafts + many + few]
    for form in ("bf16", "fp8", "int8-head", "int4-g32"):
        both, *alone = ({"table": "steps", "format_k": form, **part} for part in STEP)
        table[f"step, {form}"] = [Cell(both, 1, parts=tuple(alone))]
    return table


def find(rows, wanted):
    return next((r for r in rows if r.get("us") and all(r.get(key) == value for key, value in wanted.items())), None)


def number(row, unit):
    """What a row has in a unit of Cell."""
    return us(row) if unit == "us" else f"{row[unit]:.0f}"


def best(rows, calls):
    return max(filter(None, (find(rows, one) for one in calls)), key=lambda row: row["tflops"], default=None)


def figure(rows, cell, beside):
    """What halftone has for a cell, bold where that is what is wanted, and what the best peer has: None where the rows
    lack it. `beside`: whether the column is the one of runs with peers. Ratios are rounded down, those of times up."""
    ours, theirs = find(rows, cell.call), best(rows, cell.peers)
    if cell.parts:
        parts = [find(rows, part) for part in cell.parts]
        if ours is None or None in parts:
            return None, None
        took = math.ceil(1000 * ours["us"] / sum(part["us"] for part in parts) - 1e-9) / 1000
        return mark(f"{took:.3f}", took <= cell.wanted), None
    than = theirs or best(rows, cell.than)
    if ours is None or (cell.than and than is None) or (beside and cell.peers and theirs is None):
        return None, None
    if than is None:
        return mark(number(ours, cell.unit), not cell.peers and ours["tflops"] >= cell.wanted), None
    ratio = math.floor(1000 * ours["tflops"] / than["tflops"] + 1e-9) / 1000
    text = f"{ratio:.3f}" if cell.unit == "times" or cell.than else f"{number(ours, cell.unit)} ({ratio:.3f})"
    peer = number(theirs, cell.unit) + SHORT[theirs["peer"]] if theirs and cell.unit != "times" else None
    return mark(text, ratio >= cell.wanted), peer


def column(rows, cells, beside):
    """A row's cell of the table: each figure, `-` for one that is not there, then those of peers."""
    figures = [figure(rows, cell, beside) for cell in cells]
    ours = [own for own, _ in figures if own]
    if not ours:
        return ""
    if all(cell.unit == "times" for cell in cells):  # too many to be listed
        ratios, met = [own.strip("*") for own in ours], sum(own.startswith("**") for own in ours)
        return mark(f"{met} of {len(ours)} calls; {min(ratios)} to {max(ratios)}", met == len(ours))
    peers = [peer or "-" for _, peer in figures]
    text = ", ".join(own or "-" for own, _ in figures)
    return text + (f"; {', '.join(peers)}" if any(peer != "-" for peer in peers) else "")
