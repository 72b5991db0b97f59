"""The clock that a GPU's SMs really ran at. Power limits lower it under load: without it, times of matrix products on
two occasions say little."""

from __future__ import annotations

import ctypes
from typing import Any

_SMS = 256
# Every SM writes its cycle counter and the time in nanoseconds to its place; blocks of one SM write the same place.
_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry mark(.param .u64 marks)
{
  .reg .pred %p;
  .reg .b32 %r;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd0, [marks];
  cvta.to.global.u64 %rd0, %rd0;
  mov.u32 %r, %smid;
  setp.ge.u32 %p, %r, 256;
  @%p ret;
  mul.wide.u32 %rd1, %r, 16;
  add.s64 %rd2, %rd0, %rd1;
  mov.u64 %rd3, %clock64;
  mov.u64 %rd4, %globaltimer;
  st.global.v2.u64 [%rd2], {%rd3, %rd4};
  ret;
}
"""


class Clock:
    """``mark()`` twice on torch's current stream, then ``mhz()``."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        torch.cuda.synchronize(device)  # the driver's calls below need torch's context
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(_PTX)))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, b"mark"))
        self._marks: list[Any] = []

    @staticmethod
    def _check(result: int) -> None:
        if result:
            raise RuntimeError(f"the CUDA driver returned {result}")

    def mark(self) -> None:
        """Queues a kernel that writes the counters."""
        marks = self._torch.zeros(_SMS, 2, dtype=self._torch.int64, device=self._device)
        pointer = ctypes.c_uint64(marks.data_ptr())
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))
        stream = ctypes.c_void_p(self._torch.cuda.current_stream(self._device).cuda_stream)
        self._check(self._driver.cuLaunchKernel(self._function, _SMS, 1, 1, 32, 1, 1, 0, stream, arguments, None))
        self._marks = [*self._marks[-1:], marks]

    def mhz(self) -> float | None:
        """Between the last two marks; None where no SM counted."""
        first, last = (m.cpu().numpy() for m in self._marks)
        return clock_of(first, last)


def clock_of(first: Any, last: Any) -> float | None:
    """The median over the SMs, whose (cycles, nanoseconds) are the rows of both arrays; rows of zeros do not count."""
    import numpy as np

    ran = (first[:, 1] > 0) & (last[:, 1] > first[:, 1])
    cycles, nanoseconds = (last[ran] - first[ran]).T
    return float(np.median(cycles / nanoseconds) * 1e3) if ran.any() else None
