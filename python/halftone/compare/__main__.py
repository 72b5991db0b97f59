"""The command line of ``python -m halftone.compare``. Needs NumPy, and torch on a GPU."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import os
import sys
from typing import Any

try:
    import numpy as np
    from numpy.typing import NDArray
except ImportError:
    sys.exit("python -m halftone.compare needs NumPy: pip install numpy")

import halftone as ht
from halftone import _arrays
from halftone._plan import _ARITHMETICS

from . import cases, chunks, latent, measure, prefill, records, report
from .oracle import relative_error
from .peers import PEERS, Entry, Peer, Refusal, line_of, truth_of

_FORMATS = {"cuda": "bf16,fp8,int8-head,int8-g32,int4-g32,int4-g32+rot", "cpu": "bf16,int8-head,int8-g32,int4-g32+rot"}
_SUITES: dict[str, Any] = {"decode": cases, "prefill": prefill, "chunks": chunks, "mla": latent}
_PLAIN = ("prefill", "chunks")  # suites with plain tensors and other arithmetics
_SHAPE = {"q_len": 1, "q_heads": 8, "kv_heads": 1, "head_dim": 128, "context": 8192}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m halftone.compare",
        description="Measures halftone beside every other attention package that can be imported here.",
    )
    parser.add_argument(
        "--suite", choices=tuple(_SUITES), default="decode",
        help="decode (the default): single queries and drafts; prefill: prompts; chunks: drafts and chunks of a few rows "
        "over many keys, beside FlashAttention-3 over tensors and pages; mla: latent caches",
    )  # fmt: skip
    parser.add_argument("--device", help="cpu or cuda:<index>; default: a Hopper GPU if there is one")
    parser.add_argument(
        "--formats",
        help="halftone's, comma-separated, +rot for rotated K and V, e.g. int8-head,int4-g32+rot; in prefill "
        "and chunks also plain (tensors) and @ARITHMETIC, e.g. plain@fp8; in mla those of latents, e.g. "
        "fp8-g128-f32,bf16",
    )
    shape = parser.add_argument_group("shape", "any of these takes the place of the suite's shapes")
    shape.add_argument("--batch", type=_counts, metavar="N,...", help="requests, comma-separated; default: 1")
    shape.add_argument("--context", type=_count, metavar="N", help="keys of each request; default: 8192")
    shape.add_argument(
        "--q-len", type=_count, metavar="N",
        help=f"queries of each request; default: 1, in prefill as many as keys, in chunks {chunks.Q_LEN}",
    )  # fmt: skip
    shape.add_argument("--q-heads", type=_count, metavar="N", help="default: 8")
    shape.add_argument("--kv-heads", type=_count, metavar="N", help="default: 1; not in mla")
    shape.add_argument("--head-dim", type=_count, metavar="N", help="default: 128; not in mla")
    shape.add_argument("--no-causal", action="store_true", help="prefill without a mask")
    shape.add_argument("--kind", choices=latent.KINDS, help="of mla; default: sparse_decode")
    shape.add_argument(
        "--top-k", type=_count, metavar="N", help="places of a list, in mla but dense_decode; default: 2048"
    )
    parser.add_argument(
        "--gathers", type=latent.Gathers.load, metavar="FILE",
        help="JSON of `halftone bench --table mla` on this device, in mla: how fast lists are only read",
    )  # fmt: skip
    parser.add_argument("--seconds", type=_seconds, default=0.3, help="spent on timing one participant, about")
    parser.add_argument(
        "--no-graph", action="store_true",
        help="on a GPU time calls from Python, host included where it is the slower one; default: replays of a CUDA "
        "graph of each call",
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="one small shape: does everything run?")
    parser.add_argument("--json", metavar="FILE", help="write every figure here")
    parser.add_argument("--plot", metavar="FILE", help="write a self-contained SVG here")
    options = parser.parse_args(arguments)
    _check_together(parser, options)
    return options


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {2**31 - 1}")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _check_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What can be known before anything is measured: a run may take minutes."""
    foreign = {"mla": ("kv_heads", "head_dim", "no_causal", "plot"), "prefill": ("kind", "top_k", "gathers", "plot"),
               "chunks": ("kind", "top_k", "gathers", "no_causal", "plot"),
               "decode": ("kind", "top_k", "gathers", "no_causal")}  # fmt: skip
    for name in foreign[options.suite]:
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} is not for --suite {options.suite}")
    if options.kind == "dense_decode" and options.top_k:
        parser.error("--top-k is not for --kind dense_decode, which sees all keys")
    for name in [] if options.formats is None else options.formats.split(","):
        try:
            _check_format(options.suite, name)
        except ht.Error as error:
            parser.error(f"--formats {name}: {error}")
    case = _shape_of(options)
    if case["q_heads"] % case["kv_heads"]:
        parser.error(f"--q-heads {case['q_heads']} is no multiple of --kv-heads {case['kv_heads']}")
    try:
        ht.KVCacheSpec(case["kv_heads"], case["head_dim"])
    except ht.Error as error:
        parser.error(str(error))
    if case["q_len"] > case["context"]:
        parser.error(f"--q-len {case['q_len']} exceeds --context {case['context']}")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            parser.error(f"--{name} {path}: there is no folder {folder}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            parser.error(f"--{name} {path}: not writable")
    if options.device is not None:
        try:
            _arrays.parse_device(options.device)
        except ht.InvalidArgumentError as error:
            parser.error(f"--device: {error}")
        if options.device != "cpu" and importlib.util.find_spec("torch") is None:
            parser.error(f"--device {options.device} needs torch: pip install torch")


def _check_format(suite: str, name: str) -> None:
    """One of --formats. Raises InvalidArgumentError and UnsupportedError."""
    form, at, arithmetic = name.partition("@") if suite in _PLAIN else (name, "", "")
    form, _, rotation = form.partition("+")
    if not form:
        raise ht.InvalidArgumentError("there is no format: name at least one, e.g. bf16.")
    if rotation not in ("", "rot") or (rotation and (suite == "mla" or form == "plain")):
        raise ht.InvalidArgumentError(f"+{rotation} is not for it: leave it out.")
    if suite == "mla":
        ht.KVCacheSpec.latent(form)
        if form.endswith("-e8m0"):
            raise ht.InvalidArgumentError("its scales lie behind the records, which peers read whole: use another one.")
    elif not (suite in _PLAIN and form == "plain"):
        ht.KVFormat(form)
    if at and arithmetic not in _ARITHMETICS:
        raise ht.InvalidArgumentError(
            f"arithmetic is {arithmetic!r}, but must be one of {', '.join(_ARITHMETICS)}: use fp8."
        )


def choose_device() -> str:
    """A Hopper GPU if torch sees one and halftone can use it, else the CPU; says so where the two differ."""
    try:
        import torch
    except ImportError:
        return "cpu"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "cpu"
    if ht.has_cuda:
        return "cuda:0"
    print(
        "torch sees a Hopper GPU, but this halftone was built without CUDA: measuring the CPU. "
        "`make wheel` beside nvcc builds a wheel that has it.",
        file=sys.stderr,
    )
    return "cpu"


def _given(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) for name in _SHAPE if getattr(options, name) is not None}


def _shape_of(options: argparse.Namespace) -> dict[str, int]:
    """The shape that the options name, with the suite's defaults for the others."""
    shape = dict(_SHAPE, **_given(options))
    if options.q_len is None and options.suite in _PLAIN:
        keys = shape["context"]
        shape["q_len"] = keys if options.suite == "prefill" else min(chunks.Q_LEN, keys)
    return shape


def choose_cases(options: argparse.Namespace, kind: str) -> list[Any]:
    """The suite's shapes (with --smoke: small ones), or one for each --batch if a shape option is given."""
    suite = _SUITES[options.suite]
    if not (_given(options) or options.batch or options.no_causal or options.kind or options.top_k):
        return list(suite.SMOKE[kind] if options.smoke else suite.SHAPES[kind])
    batches = options.batch or [1]
    shape = _shape_of(options)
    if options.suite == "mla":
        chosen = options.kind or "sparse_decode"
        top_k = 0 if chosen == "dense_decode" else options.top_k or 2048
        q_len, q_heads, context = (shape[name] for name in ("q_len", "q_heads", "context"))
        return [latent.Shape(chosen, batch, q_len, q_heads, context, top_k) for batch in batches]
    if options.suite in _PLAIN:
        return [prefill.Shape(cases.Case(batch, **shape), not options.no_causal) for batch in batches]
    return [cases.Case(batch, **shape) for batch in batches]


def probe(kind: str, names: tuple[str, ...] | None = None) -> tuple[list[Peer], dict[str, str]]:
    """Who takes part (of those of these names, or of all), and a word on everyone."""
    present, states = [], {}
    for peer in PEERS:
        if names is not None and peer.name not in names:
            continue
        if kind not in peer.devices:
            states[peer.name] = f"not for {kind}"
            continue
        try:
            states[peer.name] = peer.version()
            present.append(peer)
        except ImportError as error:
            states[peer.name] = "absent" if isinstance(error, ModuleNotFoundError) else f"absent ({line_of(error)})"
        except Exception as error:  # a package that is there but does not load must not stop the others
            states[peer.name] = f"does not load ({line_of(error)})"
    return present, states


def _host(out: Any) -> NDArray[Any]:
    return np.asarray(out, np.float64) if isinstance(out, np.ndarray) else out.detach().double().cpu().numpy()


def measure_entry(entry: Entry, inputs: cases.Inputs, timer: measure.Timer, rate: float) -> dict[str, Any]:
    """Correctness on the first and the last request, then the time."""
    case = inputs.case
    out = _host(entry.call()).reshape(case.batch, case.q_len, case.q_heads, case.head_dim)
    sample = sorted({0, case.batch - 1})
    truth = np.stack([truth_of(inputs, i) for i in sample])
    row = {"label": entry.label, "error": relative_error(out[sample], truth), "kernel_error": None}
    if entry.stored is not None:
        row["kernel_error"] = relative_error(
            out[sample], np.stack([truth_of(inputs, i, entry.stored(i)) for i in sample])
        )
    timed, how = timer.captured(entry.call, entry.schedule)
    times = timer.times(timed)
    seconds = float(np.median(times))
    row.update(
        us=seconds * 1e6, us_min=min(times) * 1e6, us_max=max(times) * 1e6, calls=len(times), kv_bytes=entry.kv_bytes,
        gb_per_s=entry.kv_bytes / seconds / 1e9,
        roof_us=entry.kv_bytes / rate * 1e6, roof=entry.kv_bytes / rate / seconds,
        tflop_per_s=case.flops / seconds / 1e12, **how,
    )  # fmt: skip
    if entry.schedule is not None:
        row["schedule_us"] = timer.median(entry.schedule) * 1e6
    return row


def measure_case(
    case: cases.Case, device: str, peers: list[Peer], formats: list[str], timer: Any, rate: float
) -> dict[str, Any]:
    inputs = cases.make_inputs(case, device)
    rows: list[dict[str, Any]] = []
    for peer in peers:
        wanted = [[f] for f in formats] if peer.name == "halftone" else [formats]
        for part in wanted:  # halftone's formats one by one: a refusal of one leaves the others
            label = f"halftone {part[0]}" if peer.name == "halftone" else peer.name
            try:
                for entry in peer.entries(inputs, part):
                    rows.append(measure_entry(entry, inputs, timer, rate))
            except (Refusal, ht.UnsupportedError) as error:
                rows.append({"label": label, "why": str(error)})
            except Exception as error:  # a peer's failure is a finding, not the end of the comparison
                rows.append({"label": label, "why": f"failed: {line_of(error)}"})
            gc.collect()
    return {"name": case.name, **vars(case), "rows": rows}


def _save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = options.device or choose_device()
    kind = device.partition(":")[0]
    if kind == "cuda":  # events and clocks are the current device's
        import torch

        torch.cuda.set_device(device)
    if options.gathers and options.gathers.device != measure.describe_device(device):
        sys.exit(f"--gathers: measured on {options.gathers.device}, but this is {measure.describe_device(device)}")
    timer = measure.Timer(device, options.seconds, not options.no_graph)
    rate = measure.bandwidth(device)
    meta = {
        "suite": options.suite, "device": measure.describe_device(device), "bandwidth": rate,
        "halftone": ht.__version__, "date": datetime.date.today().isoformat(),
        "timing": measure.describe_timing(timer),
    }  # fmt: skip
    result: dict[str, Any] = {"meta": meta}
    chosen = choose_cases(options, kind)
    if options.suite == "decode":
        formats = (options.formats or _FORMATS[kind]).split(",")
        peers, result["peers"] = probe(kind)
        result["cases"] = []
        for case in chosen:
            print(f"measuring {case.name}", file=sys.stderr, flush=True)
            result["cases"].append(measure_case(case, device, peers, formats, timer, rate))
        print(report.table(result))
        own = [row for case in result["cases"] for row in case["rows"] if row["label"].startswith("halftone")]
    else:
        module = _SUITES[options.suite]
        formats = (options.formats or module.FORMATS[kind]).split(",")
        peers, result["peers"] = probe(kind, module.PEERS)
        names = {peer.name for peer in peers}
        more = {"gathers": options.gathers} if options.suite == "mla" else {}
        works = module.works(chosen, device, formats, **more)
        records.run(works, names, timer, rate, result, lambda: _save(options, result))
        print(records.table(result))
        own = [row for row in result["left_out"] if row["label"].startswith("halftone")]
    _save(options, result)
    if options.plot:
        with open(options.plot, "w") as file:
            file.write(report.plot(result))
    return 1 if any(row.get("why", "").startswith("failed") for row in own) else 0


if __name__ == "__main__":
    sys.exit(main())
