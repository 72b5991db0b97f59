"""How the comparison times calls on a GPU: as CUDA graphs where it can, and what it says where it cannot. The GPU is a
fake one, whose clocks tell the time of kernels from that of the host."""

import json
import sys

import numpy as np
import pytest
from fake_cuda import FLUSH_US, Gpu, Stream, tensor

import halftone as ht
from halftone.compare import __main__ as compare
from halftone.compare import cases, graph, measure, peers, records, report

HOST_US = 100.0  # of a call from Python
BY_HOST = HOST_US - FLUSH_US  # between the events of a call: after its flush the device waits for the host


class StubClock:
    def __init__(self, device):
        pass

    def mark(self):
        pass

    def mhz(self):
        return 1500.0


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "torch", gpu.torch())
    monkeypatch.setattr(measure, "Clock", StubClock)
    monkeypatch.setattr(measure, "_SETTLING", 0.0)
    return gpu


class Ours:
    """As halftone: one output, and a schedule that serves one stream, and captures on any."""

    def __init__(self, gpu, us, value=1.0):
        self.gpu, self.us, self.value, self.calls = gpu, us, value, 0
        self.out, self.on = tensor(2, 2), gpu.current

    def schedule(self):
        self.on = self.gpu.current

    def __call__(self):
        self.calls += 1
        self.gpu.host += HOST_US
        if self.gpu.current is not self.on and self.gpu.capture is None:
            raise ht.InvalidArgumentError("stream is another than that of the schedule")
        self.gpu.launch(lambda: self.out.fill_(self.value), self.us)
        return self.out


class Theirs:
    """As most peers: a new output in each call. ``within``: what else a call does."""

    def __init__(self, gpu, us, within=lambda: None, stream=None, dtype=np.float32):
        self.gpu, self.us, self.within, self.stream, self.dtype = gpu, us, within, stream, dtype
        self.calls = 0

    def __call__(self):
        self.calls += 1
        self.gpu.host += HOST_US
        self.within()
        out = tensor(2, 2, dtype=self.dtype)
        self.gpu.launch(lambda: out.fill_(1), self.us, self.stream)
        return out


def measured(timer, *contenders):
    """Rows by label: "ours" and "theirs 0", "theirs 1", ..."""
    parts = []
    for i, contender in enumerate(contenders):
        own = isinstance(contender, Ours)
        part = records.Part(contender, schedule=contender.schedule if own else None)
        name = "halftone" if own else "a peer"
        parts.append((name, "ours" if own else f"theirs {i}", lambda part=part: part))
    work = records.Work("a case", {}, 1e6, parts, lambda out: float(np.abs(np.asarray(out) - 1).max()))
    rows, left_out = records.measure(work, {"halftone", "a peer"}, timer, 4e12)
    assert not left_out
    return {row["label"]: row for row in rows}


def test_all_are_timed_by_replays_without_the_host(gpu):
    ours, theirs = Ours(gpu, 5.0), Theirs(gpu, 7.0)
    rows = measured(measure.Timer("cuda:0", 1e-3), ours, theirs)
    for row, us in zip(rows.values(), (5.0, 7.0)):
        assert row["us"] == pytest.approx(us) and row["graph"] is True and "no_graph" not in row
        assert row["error"] == 0 and row["mhz"] == 1500
    assert ours.calls == theirs.calls == 1 + 3 + 1  # for its error, to warm up, captured
    assert gpu.log.count("replay") > 2 * 7


def test_a_flush_comes_before_each_replay_that_is_timed(gpu):
    timer = measure.Timer("cuda:0", 1e-3)
    replay, _ = timer.captured(Theirs(gpu, 7.0))
    gpu.log.clear()
    assert timer.times(replay) == pytest.approx([7e-6] * 9)
    assert gpu.log == ["replay"] * 3 + ["flush", "replay"] * 10


def test_without_graphs_all_are_timed_by_calls(gpu):
    ours, theirs = Ours(gpu, 5.0), Theirs(gpu, 7.0)
    rows = measured(measure.Timer("cuda:0", 1e-3, graphs=False), ours, theirs)
    for row in rows.values():
        assert row["us"] == pytest.approx(BY_HOST)
        assert row["graph"] is False and "no_graph" not in row
    assert "replay" not in gpu.log and ours.calls > 7 and theirs.calls > 7


def test_the_output_of_a_replay_is_that_of_the_capture(gpu):
    timer = measure.Timer("cuda:0", 1e-3)
    for contender in (Ours(gpu, 5.0, value=2.0), Theirs(gpu, 7.0)):
        replay, how = timer.captured(contender, getattr(contender, "schedule", None))
        assert how == {"graph": True}
        out, calls = replay(), contender.calls
        expected = out.copy()
        out.fill_(np.nan)
        assert replay() is out and contender.calls == calls
        np.testing.assert_array_equal(out, expected)


def test_a_schedule_moves_to_the_stream_of_the_capture_and_back(gpu):
    ours = Ours(gpu, 5.0)
    _, how = measure.Timer("cuda:0", 1e-3).captured(ours, ours.schedule)
    assert how == {"graph": True} and ours.on is gpu.current is gpu.default
    ours()  # as for a row that is timed by calls
    _, how = measure.Timer("cuda:0", 1e-3).captured(ours)
    assert how == {"graph": False, "no_graph": "InvalidArgumentError: stream is another than that of the schedule"}


def test_kernels_on_another_stream_are_missed(gpu):
    escaped, ours = Theirs(gpu, 7.0, stream=Stream()), Ours(gpu, 5.0)
    rows = measured(measure.Timer("cuda:0", 1e-3), escaped, ours)
    row = rows["theirs 0"]
    assert row["graph"] is False
    assert row["no_graph"] == "the capture missed work: NaN is left in the output"
    assert row["us"] == pytest.approx(BY_HOST)
    assert rows["ours"]["graph"] is True and rows["ours"]["us"] == pytest.approx(5)


def test_a_call_that_cannot_be_captured_leaves_nothing_to_the_next(gpu):
    def fail():
        if gpu.capture is not None:
            raise ValueError("not in a graph")

    failing = [Theirs(gpu, 7.0, gpu.synchronize), Theirs(gpu, 7.0, fail)]
    rows = measured(measure.Timer("cuda:0", 1e-3), *failing, Ours(gpu, 5.0), Theirs(gpu, 7.0))
    assert gpu.current is gpu.default and gpu.capture is None and not gpu.pools
    first, second = rows["theirs 0"], rows["theirs 1"]
    assert first["no_graph"] == "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert second["no_graph"] == "ValueError: not in a graph"
    assert second["us"] == pytest.approx(BY_HOST)
    assert not first["graph"] and not second["graph"]
    assert rows["ours"]["us"] == pytest.approx(5) and rows["theirs 3"]["us"] == pytest.approx(7)
    assert rows["ours"]["graph"] is rows["theirs 3"]["graph"] is True


def test_a_capture_that_breaks_without_an_error_of_the_call(gpu):
    def unchecked():
        if gpu.capture is not None:
            gpu.is_valid = False
            gpu.has_error = True
        return tensor(2, 2)

    timer = measure.Timer("cuda:0", 1e-3)
    call, how = timer.captured(unchecked)
    assert how["no_graph"] == "RuntimeError: CUDA error: operation failed due to a previous error during capture"
    assert call is unchecked and gpu.current is gpu.default and not gpu.pools and not gpu.has_error
    assert timer.captured(Theirs(gpu, 7.0))[1] == {"graph": True}


def test_a_torch_whose_allocator_has_no_such_function(gpu):
    del sys.modules["torch"]._C._cuda_endAllocateToPool
    call, how = measure.Timer("cuda:0", 1e-3).captured(Theirs(gpu, 7.0, gpu.synchronize))
    assert how["graph"] is False and isinstance(call, Theirs) and gpu.current is gpu.default


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_an_output_without_nan_cannot_be_checked(gpu, dtype):
    with pytest.raises(graph.NotCaptured, match=f"the output is {np.dtype(dtype)}, which is not filled with NaN"):
        graph.capture(Theirs(gpu, 7.0, dtype=dtype), "cuda:0")


def test_rows_of_decode(gpu, monkeypatch):
    monkeypatch.setattr(compare, "truth_of", lambda *_: np.ones((1, 1, 4)))
    case = cases.Case(1, 1, 1, 1, 4, 8)
    inputs, timer = cases.Inputs(case, "cuda:0", None, None, None), measure.Timer("cuda:0", 1e-3)
    ours, updates = Ours(gpu, 5.0), []

    def update():
        updates.append(gpu.current)
        ours.schedule()

    row = compare.measure_entry(peers.Entry("halftone bf16", ours, 1e6, schedule=update), inputs, timer, 1e12)
    assert row["us"] == pytest.approx(5) and row["graph"] is True and row["error"] == 0
    assert "schedule_us" in row and updates[0] is not gpu.default and set(updates[1:]) == {gpu.default}
    row = compare.measure_entry(peers.Entry("a peer", Theirs(gpu, 7.0), 1e6), inputs, timer, 1e12)
    assert row["us"] == pytest.approx(7) and row["graph"] is True
    row = compare.measure_entry(peers.Entry("b", Theirs(gpu, 7.0, stream=Stream()), 1e6), inputs, timer, 1e12)
    assert row["graph"] is False and row["no_graph"].startswith("the capture missed work")
    json.dumps(row)


def test_tables_name_who_was_timed_by_calls():
    meta = {"device": "a GPU", "bandwidth": 4e12, "halftone": "1", "timing": "median of single replays"}
    row = {"label": "a peer", "us": 10.0, "error": 0.0, "graph": False, "no_graph": "it synchronises"}
    told = "a peer was timed by calls from Python, the host included: it synchronises"
    wide = dict(row, case="a case", tflops=1.0, mhz=None, difference=0.0, peer="a peer")
    text = records.table({"meta": meta, "peers": {}, "rows": [wide, wide], "left_out": []})
    assert text.count(told) == 1 and "time: median of single replays. " in text
    rows = [dict(row, gb_per_s=1.0, roof=0.5), {"label": "b", "why": "no"}]
    text = report.table({"meta": meta, "peers": {}, "cases": [{"name": "a case", "rows": rows}]})
    assert text.count(told) == 1 and "time: median of single replays. " in text


@pytest.mark.parametrize("arguments, graphs", [([], True), (["--no-graph"], False)])
def test_the_option_is_the_timers(arguments, graphs, monkeypatch):
    class Stop(Exception):
        pass

    def timer(device, seconds, graphs):
        seen.append((device, graphs))
        raise Stop

    seen = []
    monkeypatch.setattr(compare.measure, "Timer", timer)
    with pytest.raises(Stop):
        compare.main(["--device", "cpu", "--smoke", *arguments])
    assert seen == [("cpu", graphs)]


def test_what_the_report_says_of_the_timing(gpu):
    texts = [measure.describe_timing(measure.Timer("cuda:0", graphs=graphs)) for graphs in (True, False)]
    assert texts == [
        "median of single replays of a CUDA graph of the call, caches flushed before each",
        "median of single calls, caches flushed before each",
    ]


def test_on_the_cpu_there_are_calls_alone():
    timer = measure.Timer("cpu", 1e-3)
    call = list
    assert timer.captured(call) == (call, {}) and measure.describe_timing(timer).startswith("median of single calls")


@pytest.mark.gpu
def test_calls_that_torch_cannot_capture():
    import torch

    x, default = torch.ones(256, device="cuda:0", dtype=torch.bfloat16), torch.cuda.current_stream("cuda:0")
    timer = measure.Timer("cuda:0", 1e-3)

    def synchronising():
        return x * x.sum().item()

    def escaping():
        out = torch.empty_like(x)
        with torch.cuda.stream(default):
            return out.copy_(x)

    for call in (synchronising, escaping, synchronising):
        timed, how = timer.captured(call)
        assert timed is call and how["graph"] is False and how["no_graph"]
        assert torch.cuda.current_stream("cuda:0") == default and not torch.cuda.is_current_stream_capturing()
        torch.cuda.empty_cache()  # raises where the allocator takes the capture for one that goes on
        timed, how = timer.captured(lambda: x + x)
        assert how == {"graph": True}
        assert bool((timed() == 2).all()) and timer.settled(timed)[0] > 0
