#!/usr/bin/env python3
"""Decode attention on the CPU: halftone beside torch, ggml and this machine's own read bandwidth, in one run.

    bench/peers/prepare.sh && build/bench-venv/bin/python bench/peers/compare_cpu.py

Every participant is a process of its own with its caches filled from the same random q, k and v. The run goes in
rounds: in a round each participant in turn makes a few decode steps on the same number of threads while the others
sleep, so that a machine that is slower for a while is slower for all of them. Ratios are taken inside a round; the
table states their medians over the rounds. Outputs are compared with a float64 reference before any timing.

Then `halftone bench` times one format at growing context and batch. All figures go into one JSON file.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEERS = ROOT / "build/peers-cpu/bin"
TOLERANCE = {"int4-g32": 0.2, "ggml q4_0": 0.2}  # relative RMS error of the output; of all others:
DEFAULT_TOLERANCE = 0.03
READ_BYTES = 1 << 30
READERS = 2
REALTIME_PRIORITY = 10  # above that of other timing runs, below the kernel's own threads


class Participant:
    """A child process that speaks the protocol of worker.h."""

    def __init__(self, name, command, arguments, threads):
        self.name = name
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        line = [str(part) for part in command] + [f"{key}={value}" for key, value in arguments.items()]
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.info = self.answer()
        self.rounds = []  # median microseconds of each round
        self.best = []  # least microseconds of each round

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def run(self, calls):
        times = self.ask(f"run {calls}")["us"]
        self.rounds.append(statistics.median(times))
        self.best.append(min(times))

    def prefer(self):
        """Lets all threads of the process run before those of ordinary processes (root)."""
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            os.sched_setscheduler(int(task), os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def make_inputs(shape, folder):
    """Random q, k, v of one request, as files for the participants and as arrays for the reference.

    q is scaled so that the softmax prefers some tens of keys; a flat one would average every error away."""
    random = numpy.random.default_rng(1)
    sizes = {"q": (shape["q_heads"], shape["head_dim"])}
    sizes["k"] = sizes["v"] = (shape["context"], shape["kv_heads"], shape["head_dim"])
    arrays = {}
    for name, size in sizes.items():
        arrays[name] = random.standard_normal(size, dtype=numpy.float32) * (3 if name == "q" else 1)
        arrays[name].tofile(folder / f"{name}.f32")
    return arrays


def reference(arrays):
    """Attention of one request in float64: [q_heads, head_dim]."""
    q, k, v = (arrays[name].astype(numpy.float64) for name in "qkv")
    heads, dim = q.shape
    q = q.reshape(k.shape[1], -1, dim)
    logits = numpy.einsum("hgd,thd->hgt", q, k) / numpy.sqrt(dim)
    weights = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return numpy.einsum("hgt,thd->hgd", weights, v).reshape(heads, dim)


def check(participant, expected, shape, folder):
    """Relative RMS error of all requests' outputs against the reference; raises when it is too large."""
    path = folder / "out.f32"
    participant.ask(f"write {path}")
    out = numpy.fromfile(path, dtype=numpy.float32).reshape(shape["batch"], *expected.shape)
    error = float(numpy.sqrt(numpy.mean((out - expected) ** 2) / numpy.mean(expected**2)))
    if not error <= TOLERANCE.get(participant.name, DEFAULT_TOLERANCE):
        raise RuntimeError(f"{participant.name}: relative error {error:.3g} against the float64 reference")
    return error


def last_level_cache():
    sizes = [0]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        sizes.append(int(path.read_text().strip().rstrip("K")) << 10)
    return max(sizes) or 64 << 20


def layers_for(cache_bytes):
    """Caches that a participant goes through in turn: together at least four times the last-level cache."""
    return max(1, -(-4 * last_level_cache() // cache_bytes))


def start_participants(options, shape, folder):
    """The participants, first the two that only read memory. A peer that cannot start is reported and left out."""
    values = shape["batch"] * shape["context"] * shape["kv_heads"] * 2 * shape["head_dim"]
    plan = [
        ("int8-head", [PEERS / "halftone_decode"], {"format": "int8-head", "page_size": 64}, 8.0),
        ("int4-g32", [PEERS / "halftone_decode"], {"format": "int4-g32", "page_size": 64}, 5.0),
        ("ggml q8_0", [PEERS / "ggml_flash_attn"], {"type": "q8_0", "layout": "token"}, 8.5),
        ("ggml q8_0 by head", [PEERS / "ggml_flash_attn"], {"type": "q8_0", "layout": "head"}, 8.5),
        ("ggml q4_0", [PEERS / "ggml_flash_attn"], {"type": "q4_0", "layout": "token"}, 4.5),
        ("ggml f16", [PEERS / "ggml_flash_attn"], {"type": "f16", "layout": "token"}, 16.0),
    ]
    torch = [options.torch_python, ROOT / "bench/peers/torch_sdpa.py"]
    for variant in ("gqa", "expanded", "packed"):
        plan.append((f"torch bf16 {variant}", torch, {"variant": variant}, 16.0))
    participants = start_readers(options, shape)
    missing = {}
    for name, command, extra, bits in plan:
        layers = layers_for(int(values * bits / 8))
        arguments = dict(shape, layers=layers, threads=options.threads, data=folder, **extra)
        try:
            participants.append(Participant(name, command, arguments, options.threads))
        except (OSError, RuntimeError) as error:
            if command == [PEERS / "halftone_decode"]:
                raise
            missing[name] = str(error)
            print(f"left out: {error}", file=sys.stderr)
    return participants, missing


def start_readers(options, shape):
    """Two ways to read memory: one stream per thread, and as many as give the highest bandwidth."""
    readers = []
    for streams in (1, 2, 4, 8):
        arguments = dict(shape, layers=1, threads=options.threads, bytes=READ_BYTES, streams=streams)
        name = f"read, {streams} stream{'s' if streams > 1 else ''} per thread"
        readers.append(Participant(name, [PEERS / "read_bandwidth"], arguments, options.threads))
    if options.realtime:
        for reader in readers:
            reader.prefer()
    probes = {reader: statistics.median(reader.ask("run 9")["us"]) for reader in readers}
    fastest = min(readers[1:], key=probes.get)
    for reader in readers[1:]:
        if reader is not fastest:
            reader.close()
    return [readers[0], fastest]


def scaling(options, shape):
    """`halftone bench` at growing context and batch: median over repeated runs, and how time grows."""
    base = {"batch": shape["batch"], "context": shape["context"]}
    grids = {"context": [shape["context"] >> i for i in (3, 2, 1, 0)] + [shape["context"] << i for i in (1, 2)],
             "batch": [1, 2, 4, 8, 16]}
    result = {}
    for axis, points in grids.items():
        times = {}
        for _ in range(options.scaling_runs):
            for point in points:
                case = dict(base, **{axis: point})
                command = [options.halftone_build / "bin/halftone", "bench", "--json", "-"]
                command += ["--formats", "int8-head,int4-g32"]
                for key, value in case.items():
                    command += [f"--{key}", value]
                command += ["--threads", options.threads]
                if options.realtime:
                    command = ["chrt", "--rr", REALTIME_PRIORITY] + command
                out = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, check=True).stdout
                for row in json.loads(out)["rows"]:
                    times.setdefault(row["format_k"], {}).setdefault(point, []).append(
                        (row["us"], 100 * row["gbs"] / row["ceiling_gbs"]))
        for name, series in times.items():
            us = {point: statistics.median(t for t, _ in runs) for point, runs in series.items()}
            slope = numpy.polyfit(numpy.log(list(us)), numpy.log(list(us.values())), 1)[0]
            result.setdefault(axis, {})[name] = {
                "fixed": {key: value for key, value in base.items() if key != axis},
                "us": us,
                "us_per_unit": {point: t / point for point, t in us.items()},
                "percent_of_read": {p: statistics.median(f for _, f in runs) for p, runs in series.items()},
                "exponent": float(slope)}
    return result


def command_output(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(options):
    """What a reader needs to judge or repeat the figures."""
    model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    doctor = json.loads(command_output(str(options.halftone_build / "bin/halftone"), "doctor", "--json") or "{}")
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": command_output("git", "rev-parse", "--short=12", "HEAD"),
            "uncommitted_changes": bool(command_output("git", "status", "--porcelain", "--", "src", "include", "cli")),
            "cpu": model[0] if model else platform.processor(), "cpus": os.cpu_count(), "threads": options.threads,
            "last_level_cache_bytes": last_level_cache(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "compiler": command_output("c++", "--version").splitlines()[0], "kernel": platform.release(),
            "simd": doctor.get("cpu", {}).get("simd", ""), "realtime": options.realtime,
            "load_average_before": os.getloadavg()[0]}


def summarise(participants, errors):
    """One row per participant; fractions and ratios are medians of those inside each round."""
    readers, rest = participants[:READERS], participants[READERS:]
    reads = {p.name: [p.info["bytes"] / us / 1e3 for us in p.best] for p in readers}
    sequential, ceilings = reads.values()
    ceilings = [max(pair) for pair in zip(sequential, ceilings)]  # of each round: the best pass of both ways
    rows = []
    for p in rest:
        gbs = [p.info["bytes"] / us / 1e3 for us in p.rounds]
        us = statistics.median(p.rounds)
        row = {"name": p.name, "us": us, "us_best": min(p.best), "bytes": p.info["bytes"],
               "gbs": p.info["bytes"] / us / 1e3,
               "of_read": statistics.median(g / c for g, c in zip(gbs, ceilings)),
               "of_sequential_read": statistics.median(g / c for g, c in zip(gbs, sequential)),
               "relative_error": errors[p.name], "us_rounds": p.rounds}
        row.update({key: value for key, value in p.info.items() if key != "bytes"})
        for other in rest:
            if other.name in ("int8-head", "int4-g32") and other is not p:
                row[f"times_{other.name}"] = statistics.median(a / b for a, b in zip(p.rounds, other.rounds))
        rows.append(row)
    reading = {name: {"gbs_best": max(gbs), "gbs_median_of_rounds": statistics.median(gbs), "gbs_rounds": gbs}
               for name, gbs in reads.items()}
    return reading, rows


def targets(rows, growth):
    """The figures that the project promises, against what was measured."""
    by_name = {row["name"]: row for row in rows}
    fastest = lambda names: min((by_name[n] for n in names if n in by_name), key=lambda r: r["us"], default=None)
    torch = fastest(["torch bf16 gqa", "torch bf16 expanded"])
    ggml = fastest(["ggml q8_0", "ggml q8_0 by head"])
    unlimited = float("inf")
    checks = []  # what, measured, least, most
    for key, way in (("of_sequential_read", "one stream per thread"), ("of_read", "the fastest way")):
        for name, least in (("int8-head", 0.6), ("int4-g32", 0.4)):
            checks.append((f"{name}, fraction of reading memory, {way}", by_name[name][key], least, unlimited))
    for name in ("int8-head", "int4-g32"):
        for peer, least in ((torch, 1.5), (ggml, 2.0)):
            if peer is not None:
                checks.append((f"{name}, times faster than {peer['name']}", peer[f"times_{name}"], least, unlimited))
        beyond = max(by_name[name]["resident_growth_bytes"], by_name[name]["workspace_bytes"]) / (1 << 20)
        checks.append((f"{name}, MiB beyond the cache", beyond, 0, 64))
    for axis, formats in growth.items():
        for name, series in formats.items():
            checks.append((f"{name}, exponent of time against {axis}", series["exponent"], 0.9, 1.1))
    return [{"what": what, "measured": value, "least": least, "most": None if most == unlimited else most,
             "met": least <= value <= most} for what, value, least, most in checks]


def wanted(target):
    """">= 0.6", "<= 64" or "0.9 to 1.1"."""
    if target["most"] is None:
        return f">= {target['least']}"
    return f"{target['least']} to {target['most']}" if target["least"] else f"<= {target['most']}"


def show(report):
    where, reading = report["machine"], report["read"]
    print(f"{where['cpu']}, {where['threads']} threads, load {where['load_average_before']:.1f} before, "
          f"{report['rounds']} rounds of {report['calls']} calls")
    for name, read in reading.items():
        print(f"{name}: best {read['gbs_best']:.1f} GB/s, median of rounds {read['gbs_median_of_rounds']:.1f} GB/s")
    print(f"\n{'':20}{'ms':>9}{'GB/s':>8}{'of 1':>7}{'of best':>9}{'error':>9}{'x int8-head':>13}{'x int4-g32':>12}")
    for row in report["rows"]:
        ratio = lambda name: f"{row[f'times_{name}']:.2f}" if f"times_{name}" in row else ""
        print(f"{row['name']:20}{row['us'] / 1e3:9.2f}{row['gbs']:8.2f}"
              f"{100 * row['of_sequential_read']:6.0f}%{100 * row['of_read']:8.0f}%"
              f"{row['relative_error']:9.4f}{ratio('int8-head'):>13}{ratio('int4-g32'):>12}")
    print("\n" + "\n".join(f"{'met ' if t['met'] else 'MISS'}  {t['what']}: {t['measured']:.2f} (wanted {wanted(t)})"
                           for t in report["targets"]))
    for axis, formats in report["scaling"].items():
        for name, series in formats.items():
            print(f"\n{name}, time ~ {axis}^{series['exponent']:.3f}")
            for point, us in series["us"].items():
                print(f"  {axis} {point:>6}: {us / 1e3:9.3f} ms, {series['us_per_unit'][point]:9.3f} us each, "
                      f"{series['percent_of_read'][point]:.0f}% of read")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=7, help="timed decode steps of a participant in a round")
    parser.add_argument("--scaling-runs", type=int, default=3,
                        help="runs of `halftone bench` per point; 0 leaves it out")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch and numpy")
    parser.add_argument("--realtime", action="store_true",
                        help="time at real-time priority: for a machine that other processes use too (root)")
    parser.add_argument("--halftone-build", type=pathlib.Path, default=ROOT / "build/release",
                        help="the build whose `halftone bench` gives the growth figures")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "bench/results/cpu-decode-peers.json")
    return parser.parse_args()


def main():
    options = parse_options()
    shape = {key: getattr(options, key) for key in ("batch", "context", "q_heads", "kv_heads", "head_dim")}
    report = {"machine": machine(options), "shape": shape, "rounds": options.rounds, "calls": options.calls}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        expected = reference(make_inputs(shape, folder))
        participants, report["left_out"] = start_participants(options, shape, folder)
        errors = {p.name: check(p, expected, shape, folder) for p in participants[READERS:]}
    if options.realtime:
        for participant in participants:
            participant.prefer()
    for i in range(options.rounds):
        for participant in participants:
            participant.run(options.calls)
        print(f"\rround {i + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    report["read"], report["rows"] = summarise(participants, errors)
    for participant in participants:
        participant.close()
    report["scaling"] = scaling(options, shape) if options.scaling_runs else {}
    report["targets"] = targets(report["rows"], report["scaling"])
    report["machine"]["load_average_after"] = os.getloadavg()[0]
    show(report)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
