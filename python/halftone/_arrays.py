"""Arrays of the caller's framework: what they are, how to make more of them, how to hand them to the native library."""

from __future__ import annotations

import operator
import os
from contextlib import nullcontext
from typing import Any, Sequence

import tvm_ffi

from . import _frameworks, _native
from ._frameworks import ADAPTERS, parse_device
from .errors import Error, InvalidArgumentError

_NAMES = {long: short for short, long in _frameworks.DTYPES.items()}


def framework_of(x: Any) -> str:
    """ "numpy", "torch", "cupy", "jax", or "dlpack" for any other type."""
    return ADAPTERS[type(x)].name


def dtype_of(x: Any) -> str:
    """ "f32", "bf16", ...; the framework's own name where halftone has none. Raises InvalidArgumentError."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        raise InvalidArgumentError(f"{type(x).__name__} has no dtype: pass a NumPy, torch, JAX or CuPy array.")
    name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return _NAMES.get(name, name)


def device_of(x: Any) -> str:
    """ "cpu" or "cuda:<index>"."""
    return ADAPTERS[type(x)].device_of(x)


def empty(framework: str, shape: Sequence[int], dtype: str, device: str, zero: bool = False) -> Any:
    """A new array to be written, zeroed if asked. For JAX, whose arrays are immutable, a NumPy one."""
    return _frameworks.named(framework).empty(tuple(shape), dtype, device, zero)


def host_memory() -> int:
    """Bytes of this machine's memory, 0 if it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def is_out_of_memory(error: Exception) -> bool:
    """True for what NumPy, torch and CuPy raise when an array is too large."""
    if isinstance(error, (Error, MemoryError)) or type(error).__name__ == "OutOfMemoryError":
        return not isinstance(error, Error)
    texts = ("array is too big", "Maximum allowed", "out of memory", "allocate memory", "overflow")
    return isinstance(error, (ValueError, RuntimeError, OverflowError)) and any(text in str(error) for text in texts)


def make(framework: str, values: Any, dtype: str, device: str) -> Any:
    """An array of the (nested) list ``values``."""
    return _frameworks.named(framework).make(values, dtype, device)


def assign(target: Any, values: Any) -> None:
    """Overwrites the memory of ``target`` with the (nested) list ``values``."""
    framework = ADAPTERS[type(target)]
    framework.assign(target, framework.make(values, dtype_of(target), framework.device_of(target)))


def overwrite(target: Any, source: Any) -> None:
    """Copies ``source`` of the same framework, shape and dtype into ``target``; on a device in order, not waiting."""
    ADAPTERS[type(target)].assign(target, source)


def copied(x: Any) -> Any:
    """An array of its own with the values of ``x``, which may be None."""
    return None if x is None else ADAPTERS[type(x)].copied(x)


def replaced(x: Any, old: float, new: float) -> Any:
    """A new array: ``x`` of dtype f32 with ``new`` wherever it holds ``old``."""
    return ADAPTERS[type(x)].replaced(x, old, new)


def copy_rows(targets: Sequence[Any], copies: Sequence[tuple[int, int]]) -> None:
    """``x[to] = x[from]`` for every (from, to) and every x of ``targets``; torch's device is not waited for."""
    ADAPTERS[type(targets[0])].copy_rows(targets, copies)


def fill(target: Any, value: int) -> None:
    """Overwrites every element of ``target``."""
    ADAPTERS[type(target)].fill(target, value)


def put(target: Any, entries: Sequence[tuple[int, int, int]]) -> None:
    """``target[i, j] = value`` for every (i, j, value) of a contiguous ``target``; torch's device is not waited for."""
    ADAPTERS[type(target)].put(target, entries)


def on_stream(x: Any, stream: int | None) -> Any:
    """A context in which the framework of ``x`` queues its own work on ``stream``, unless that is None."""
    framework = ADAPTERS[type(x)]
    device = framework.device_of(x)
    if stream is None or device == "cpu":
        return nullcontext()
    return framework.on_stream(stream, parse_device(device)[1])


def is_capturing(x: Any, stream: int | None = None) -> bool:
    """True where the capture of a CUDA graph records what is queued for ``x``, on ``stream`` or the current one."""
    framework = ADAPTERS[type(x)]
    if not framework.has_streams or framework.device_of(x) == "cpu":
        return False
    with on_stream(x, stream):
        return framework.is_capturing()


def wait(x: Any) -> None:
    """Until ``x``, just made from values of the host, is complete for every stream; only CuPy's may not be."""
    ADAPTERS[type(x)].wait()


def to_list(x: Any) -> list[Any]:
    """The values on the host; synchronises with a device."""
    return list((x if hasattr(x, "tolist") else _frameworks.load("numpy").from_dlpack(x)).tolist())


def to_numpy(x: Any) -> Any:
    """``x`` as a NumPy array on the host, which may share its memory; synchronises with a device."""
    return ADAPTERS[type(x)].to_numpy(x)


def workspace(like: Any, size: int, device: str) -> Any:
    """uint8 [size], 256-byte aligned, on a GPU of the framework of ``like``."""
    if device != "cpu":
        return ADAPTERS[type(like)].workspace(size, device)
    return _native.empty((max(size, 1),), "uint8")


def empty_output(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """A new array for a result, beside the input ``like``: same framework and device."""
    return ADAPTERS[type(like)].empty_output(like, shape, dtype)


def finish(result: Any, like: Any) -> Any:
    """What the caller gets for an array of empty_output(): JAX takes it over without a copy."""
    return ADAPTERS[type(like)].finish(result) if isinstance(result, tvm_ffi.Tensor) else result


def is_read_only(x: Any) -> bool:
    """True for a NumPy array that must not be written, of which :func:`native` makes a copy."""
    return x is not None and ADAPTERS[type(x)].is_read_only(x)


def native(x: Any, name: str, written: bool = False) -> Any:
    """``x`` for the native library, which reads memory as it is. Raises InvalidArgumentError naming ``name``."""
    return None if x is None else ADAPTERS[type(x)].native(x, name, written)


def kept(x: Any, name: str) -> Any:
    """As :func:`native`, for what is passed again and again: no framework is asked for it twice."""
    x = native(x, name)
    return x if x is None or isinstance(x, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(x)


def place_of(x: Any) -> tuple[str, int]:
    """Device and address of the first element."""
    return device_of(x), int(kept(x, "array").data_ptr())


def stream_of(x: Any, stream: int | None) -> int | None:
    """The stream to use: the caller's choice, CuPy's current one, or None, with which tvm_ffi asks torch."""
    if stream is None:
        return ADAPTERS[type(x)].current_stream()
    try:
        number = -1 if isinstance(stream, bool) else operator.index(stream)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise InvalidArgumentError(
            f"stream is {stream!r}, but must be a cudaStream_t as an integer: pass torch's stream.cuda_stream."
        )
    return number
