"""A participant's call as a CUDA graph, so that its time is that of its kernels: in some packages the Python above them
takes 90 to 160 us, more than the kernels of a short call."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

from .peers import line_of

_WARM_UPS = 3
_FAILED: list[Any] = []


class NotCaptured(Exception):
    """A call cannot be timed as a graph; the text says why, briefly."""


def capture(call: Callable[[], Any], device: str, schedule: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """What replays ``call``, on the stream that is current then, and returns the output that it writes.

    Args:
        call: returns its output, a tensor on ``device``, a new one or the same in each call.
        schedule: makes the schedule of ``call`` anew. halftone's serves one stream at a time, the last on which it was
            made: it moves to the capture's and back.

    Raises:
        NotCaptured: the capture fails, or its graph leaves out work. ``call`` can be called as before.
    """
    import torch

    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    why = ""
    try:
        side.wait_stream(current)
        with torch.cuda.stream(side):  # the capture's: what libraries set up for each stream is there then
            if schedule is not None:
                schedule()
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, pool=pool, stream=side):
            try:
                out = call()
            except Exception as error:
                why = line_of(error)  # the end of an invalid capture raises an error of its own
                raise
        current.wait_stream(side)
        _check(graph, out)
    except NotCaptured:
        raise
    except Exception as error:
        _recover(graph, pool, current, side, device)
        raise NotCaptured(why or line_of(error)) from None
    finally:
        if schedule is not None:
            schedule()

    def replay() -> Any:
        graph.replay()
        return out  # kept: its memory is the graph's, which writes it in every replay

    return replay


def _check(graph: Any, out: Any) -> None:
    """Replays once. Raises NotCaptured if that does not write all of ``out``, as where a package launches kernels on
    another stream than torch's current one: these ran during the capture and are not in the graph. That finds a last
    kernel that is missing; results of one before it are in memory from the earlier calls."""
    import torch

    if not out.is_floating_point() or out.element_size() < 2:
        raise NotCaptured(f"cannot be checked: the output is {out.dtype}, which is not filled with NaN")
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(out.device)
    if bool(torch.isnan(out).any()):
        raise NotCaptured("the capture missed work: NaN is left in the output")


def _recover(graph: Any, pool: Any, current: Any, side: Any, device: str) -> None:
    """After an error within a capture: nobody who is measured later may notice it.

    A capture that a call made invalid (it synchronised, say) raises at its end, and torch skips what is left to do: the
    capture's stream stays the current one, and before torch 2.12 the allocator takes the capture for one that goes on
    and refuses to empty its cache, with which the next capture begins. No public function tells it.
    """
    import torch

    torch.cuda.set_stream(current)
    with contextlib.suppress(RuntimeError), torch.cuda.stream(side):
        if torch.cuda.is_current_stream_capturing():
            graph.capture_end()
    with contextlib.suppress(AttributeError, RuntimeError):  # there is none such, or it has ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    _FAILED.append(graph)  # the allocator of pinned memory may still ask it which allocations are its capture's
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)  # its launch is what finds an error that a package has not taken from the runtime
    torch.cuda.synchronize(device)
