"""Timing, and the memory bandwidth that the roofline is drawn with."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import numpy as np

from . import graph
from .clock import Clock

_FLUSH_BYTES = 256 << 20  # several times any cache
_SETTLING = 0.04  # seconds of calls
_SHORT = 5e-4  # seconds
_HEAD_START = 12_000_000  # clocks of a GPU


class Timer:
    """Times calls on a device, each with cold caches: something larger than the last-level cache is written before it.

    Args:
        device: "cpu" or "cuda:<index>".
        seconds: spent on one participant, about.
        graphs: whether :meth:`captured` makes CUDA graphs.
    """

    def __init__(self, device: str, seconds: float = 0.3, graphs: bool = True) -> None:
        self.device = device
        self.seconds = seconds
        self.graphs = graphs and device != "cpu"
        self._flush: Any
        self._clock: Clock | None = None
        if device != "cpu":
            import torch

            self._torch: Any = torch
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        else:
            self._flush = np.empty(_FLUSH_BYTES // 4, np.uint8)

    def captured(
        self, call: Callable[[], Any], schedule: Callable[[], Any] | None = None
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """What to time for ``call``, and what its row says about that: a CUDA graph of the call (``graph``), or the
        call as it is, with the reason if the graph could not be made (``no_graph``). Nothing is said on the CPU.

        Args:
            call, schedule: as of :func:`graph.capture`.
        """
        if not self.graphs:
            return call, {} if self.device == "cpu" else {"graph": False}
        try:
            return graph.capture(call, self.device, schedule), {"graph": True}
        except graph.NotCaptured as reason:
            return call, {"graph": False, "no_graph": str(reason)}

    def times(self, call: Callable[[], object]) -> list[float]:
        """Seconds of single calls, after warming up."""
        one = self._once if self.device == "cpu" else self._once_cuda
        for _ in range(3):
            call()
        first = max(one(call, 1)[0], 1e-7)
        count = int(min(200, max(7, self.seconds / (first + 1e-4))))
        return one(call, count)

    def median(self, call: Callable[[], object]) -> float:
        return statistics.median(self.times(call))

    def settled(self, call: Callable[[], object]) -> tuple[float, float | None]:
        """The median, and the SMs' clock in MHz (None on the CPU), after calls in which a GPU's clock settles."""
        if self.device == "cpu":
            return self.median(call), None
        for _ in range(2):
            call()
        self._torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        while time.perf_counter() - begin < _SETTLING:
            for _ in range(4):
                self._flush.zero_()
                call()
            self._torch.cuda.synchronize(self.device)
        first = max(statistics.median(self._once_cuda(call, 3)), 1e-7)
        count = int(min(200, max(7, self.seconds / (first + 1e-4))))
        if self._clock is None:
            self._clock = Clock(self.device)
        if first < _SHORT:  # a device that starts late never waits for the host between an event and the call's kernels
            self._torch.cuda._sleep(_HEAD_START)
        self._clock.mark()
        times = self._once_cuda(call, count, self._clock.mark)
        return statistics.median(times), self._clock.mhz()

    def _once(self, call: Callable[[], object], count: int) -> list[float]:
        result = []
        for _ in range(count):
            self._flush.fill(0)
            begin = time.perf_counter()
            call()
            result.append(time.perf_counter() - begin)
        return result

    def _once_cuda(
        self, call: Callable[[], object], count: int, after: Callable[[], object] | None = None
    ) -> list[float]:
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for begin, end in pairs:
            self._flush.zero_()  # also keeps the device busy while the host queues the call
            begin.record()
            call()
            end.record()
        if after is not None:
            after()
        self._torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def bandwidth(device: str) -> float:
    """Bytes per second of a large copy, bytes read and written counted."""
    if device != "cpu":
        import torch

        read = torch.empty(2 << 30, dtype=torch.uint8, device=device)
        written = torch.empty_like(read)
        seconds = Timer(device, 0.1).median(lambda: written.copy_(read))
        return 2 * read.numel() / seconds
    threads = len(os.sched_getaffinity(0))
    source = np.ones(threads << 25, np.uint8)
    target = np.empty_like(source)
    parts = list(zip(np.split(target, threads), np.split(source, threads)))
    with ThreadPoolExecutor(threads) as pool:
        seconds = Timer("cpu", 0.3).median(lambda: list(pool.map(lambda p: np.copyto(*p), parts)))
    return 2 * source.size / seconds


def describe_timing(timer: Timer) -> str:
    """A line for the report."""
    what = "replays of a CUDA graph of the call" if timer.graphs else "calls"
    return f"median of single {what}, caches flushed before each"


def describe_device(device: str) -> str:
    """A line for the report."""
    if device != "cpu":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else 'CPU'}, {len(os.sched_getaffinity(0))} threads"
