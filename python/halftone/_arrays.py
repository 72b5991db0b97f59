"""Arrays of the caller's framework: what they are, how to make more of them, how to hand them to the native library.

A framework is imported only when an array of it turns up or is asked for by name.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Sequence

import tvm_ffi

from . import _check, _native
from .errors import Error, InvalidArgumentError, UnsupportedError

FRAMEWORKS = ("numpy", "torch", "cupy", "jax")
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "uint8": "uint8", "int32": "int32", "int64": "int64"}
_NAMES = {long: short for short, long in _DTYPES.items()}
_PIP_NAMES = {"cupy": "cupy-cuda12x"}
_Tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)  # tvm_ffi imports torch where it is installed
_STRIDED: Any = getattr(sys.modules.get("torch"), "strided", None)


def framework_of(x: Any) -> str:
    """ "numpy", "torch", "cupy", "jax", or "dlpack" for any other type."""
    root = type(x).__module__.partition(".")[0]
    if root == "jaxlib":
        return "jax"
    if root in FRAMEWORKS:
        return root
    for base in type(x).__mro__[1:]:  # torch.nn.Parameter and other subclasses
        if base.__module__.partition(".")[0] in FRAMEWORKS:
            return base.__module__.partition(".")[0]
    return "dlpack"


def dtype_of(x: Any) -> str:
    """ "f32", "bf16", ...; the framework's own name where halftone has none. Raises InvalidArgumentError."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        raise InvalidArgumentError(f"{type(x).__name__} has no dtype: pass a NumPy, torch, JAX or CuPy array.")
    name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return _NAMES.get(name, name)


def device_of(x: Any) -> str:
    """ "cpu" or "cuda:<index>"."""
    if type(x).__module__ == "numpy":
        return "cpu"
    try:
        kind, index = x.__dlpack_device__()
    except AttributeError:
        raise InvalidArgumentError(
            f"a {type(x).__name__} does not support DLPack: pass a NumPy, torch, JAX or CuPy array."
        ) from None
    return f"cuda:{index}" if int(kind) in (2, 13) else "cpu"


def parse_device(device: str) -> tuple[int, int]:
    """DLPack's (type, index) of "cpu", "cuda" or "cuda:<index>". Raises InvalidArgumentError."""
    text = str(device)
    if text == "cpu":
        return 1, 0
    kind, _, index = text.partition(":")
    if kind == "cuda" and (not index or index.isascii() and index.isdigit()):
        if len(index) <= 10 and int(index or 0) < 2**31:
            return 2, int(index or 0)
        raise InvalidArgumentError(f"device is {device!r}, but an index has at most 31 bits: use cuda:0.")
    raise InvalidArgumentError(f"device is {device!r}, but must be cpu or cuda:<index>: choose one.")


def load(framework: str) -> Any:
    """The framework's module. Raises InvalidArgumentError for an unknown name, UnsupportedError for an absent one."""
    return _import(_check.choice(framework, "framework", FRAMEWORKS))


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UnsupportedError(
            f"{package} cannot be imported ({error}), but arrays of it are asked for: "
            f"pip install {_PIP_NAMES.get(package, package)}."
        ) from None


def _dtype(module: Any, framework: str, name: str) -> Any:
    if framework == "torch":
        return getattr(module, _DTYPES[name])
    if name == "bf16":
        return _import("ml_dtypes").bfloat16
    return module.dtype(_DTYPES[name])


def empty(framework: str, shape: Sequence[int], dtype: str, device: str, zero: bool = False) -> Any:
    """A new array to be written, zeroed if asked. For JAX, whose arrays are immutable, a NumPy one."""
    shape = tuple(shape)
    if framework in ("jax", "dlpack"):
        if device != "cpu":
            raise UnsupportedError(
                f"device is {device}, but halftone allocates arrays of JAX and unknown frameworks on the CPU only: "
                "pass caller-allocated torch or CuPy arrays."
            )
        framework = "numpy"
    module = load(framework)
    if framework == "torch":
        return (module.zeros if zero else module.empty)(shape, dtype=_dtype(module, framework, dtype), device=device)
    if framework == "cupy":
        with module.cuda.Device(parse_device(device)[1]):
            return (module.zeros if zero else module.empty)(shape, dtype=_dtype(module, framework, dtype))
    if device != "cpu":
        raise InvalidArgumentError(f"device is {device}, but NumPy arrays live on the CPU: use framework='torch'.")
    return (module.zeros if zero else module.empty)(shape, dtype=_dtype(module, framework, dtype))


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
    if framework in ("jax", "dlpack"):
        framework = "numpy"
    module = load(framework)
    if framework == "torch":
        return module.tensor(values, dtype=_dtype(module, framework, dtype), device=device)
    if framework == "cupy":
        with module.cuda.Device(parse_device(device)[1]):
            return module.asarray(values, dtype=_dtype(module, framework, dtype))
    return module.asarray(values, dtype=_dtype(module, framework, dtype))


def _on_device(x: Any) -> Any:
    """A context in which CuPy works on the device of ``x``; other frameworks need none."""
    return x.device if framework_of(x) == "cupy" else nullcontext()


def assign(target: Any, values: Any) -> None:
    """Overwrites the memory of ``target`` with the (nested) list ``values``."""
    framework = framework_of(target)
    source = make(framework, values, dtype_of(target), device_of(target))
    if framework == "torch":
        target.copy_(source)
    else:
        with _on_device(target):
            target[...] = source


def fill(target: Any, value: int) -> None:
    """Overwrites every element of ``target``."""
    if framework_of(target) == "torch":
        target.fill_(value)
    else:
        with _on_device(target):
            target[...] = value


def put(target: Any, entries: Sequence[tuple[int, int, int]]) -> None:
    """``target[i, j] = value`` for every (i, j, value) of a contiguous ``target``; torch's device is not waited for.

    Raises InvalidArgumentError within a graph capture, which would keep the values of now.
    """
    framework = framework_of(target)
    module = load(framework)
    if is_capturing(target):
        raise InvalidArgumentError("the capture of a graph needs new pages, but deals none: call reserve() before it.")
    if framework != "torch":
        with _on_device(target):
            rows, columns, values = module.asarray(entries).T
            target[rows, columns] = values
        return
    width = target.shape[1]
    flat = [row * width + column for row, column, _ in entries] + [value for _, _, value in entries]
    host = module.tensor(flat, dtype=module.int64, pin_memory=target.is_cuda)  # in half the time of nested tuples
    index, values = host.to(target.device, non_blocking=True).view(2, -1)
    target.view(-1)[index] = values.to(target.dtype)


class _CudaStream:
    """A cudaStream_t under CUDA's stream protocol."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


def on_stream(x: Any, stream: int | None) -> Any:
    """A context in which the framework of ``x`` queues its own work on ``stream``, unless that is None."""
    framework, device = framework_of(x), device_of(x)
    if stream is None or device == "cpu" or framework not in ("torch", "cupy"):
        return nullcontext()
    cuda = load(framework).cuda
    index = parse_device(device)[1]
    if framework == "cupy":
        if not stream:
            return cuda.Stream.null
        if not hasattr(cuda.Stream, "from_external"):  # before CuPy 14
            return cuda.ExternalStream(stream, index)
        with cuda.Device(index):  # which the stream is then said to belong to
            return cuda.Stream.from_external(_CudaStream(stream))
    return cuda.stream(cuda.ExternalStream(stream, device=index) if stream else cuda.default_stream(index))


def is_capturing(x: Any, stream: int | None = None) -> bool:
    """True where the capture of a CUDA graph records what is queued for ``x``, on ``stream`` or the current one."""
    framework = framework_of(x)
    if framework not in ("torch", "cupy") or device_of(x) == "cpu":
        return False
    cuda = load(framework).cuda
    with on_stream(x, stream):
        return bool(
            cuda.is_current_stream_capturing() if framework == "torch" else cuda.get_current_stream().is_capturing()
        )


def wait(x: Any) -> None:
    """Until ``x``, just made from values of the host, is complete for every stream; only CuPy's may not be."""
    if framework_of(x) == "cupy":
        load("cupy").cuda.get_current_stream().synchronize()


def to_list(x: Any) -> list[Any]:
    """The values on the host; synchronises with a device."""
    return list((x if hasattr(x, "tolist") else load("numpy").from_dlpack(x)).tolist())


def workspace(framework: str, size: int, device: str) -> Any:
    """uint8 [size], 256-byte aligned."""
    if device != "cpu":
        return empty("torch" if framework == "dlpack" else framework, (size,), "uint8", device)
    return _native.empty((max(size, 1),), "uint8")


@lru_cache(maxsize=1)
def _torch() -> tuple[Any, dict[str, Any]]:
    torch = load("torch")
    return torch, {short: getattr(torch, long) for short, long in _DTYPES.items()}


def empty_output(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """A new array for a result, beside the input ``like``: same framework and device."""
    if type(like).__module__ == "torch":  # the path of every decode step
        torch, dtypes = _torch()
        if shape == like.shape and like.is_contiguous():  # empty_like is the cheapest of torch's ways
            kind = dtypes[dtype]
            return torch.empty_like(like) if like.dtype is kind else torch.empty_like(like, dtype=kind)
        return like.new_empty(shape, dtype=dtypes[dtype])
    framework = framework_of(like)
    device = device_of(like)
    if framework in ("jax", "dlpack") and device == "cpu":
        return _native.empty(tuple(shape), _DTYPES[dtype])
    return empty(framework, shape, dtype, device)


def finish(result: Any, like: Any) -> Any:
    """What the caller gets for an array of empty_output(): JAX takes it over without a copy."""
    if isinstance(result, tvm_ffi.Tensor) and framework_of(like) == "jax":
        return importlib.import_module("jax").dlpack.from_dlpack(result)
    return result


def check_dense(x: Any, name: str) -> None:
    """Raises InvalidArgumentError if the torch tensor ``x`` is not dense memory: sparse, nested, of another library."""
    if x.layout is not _STRIDED and x.layout != load("torch").strided:
        raise InvalidArgumentError(f"{name} has layout {x.layout}, but must be dense: pass {name}.to_dense().")


def is_read_only(x: Any) -> bool:
    """True for a NumPy array that must not be written, of which :func:`native` makes a copy."""
    if x is None or type(x) is _Tensor or framework_of(x) != "numpy":
        return False
    return hasattr(x, "flags") and not x.flags.writeable


def native(x: Any, name: str, written: bool = False) -> Any:
    """``x`` for the native library, which reads memory as it is. Raises InvalidArgumentError naming ``name``."""
    if x is None:
        return None
    if type(x) is _Tensor or type(x).__module__.partition(".")[0] == "torch":
        if not (x.is_cpu or x.is_cuda):
            raise UnsupportedError(
                f"{name} is on {x.device}, but halftone has the CPU and CUDA: move it to one of them."
            )
        if x.layout is not _STRIDED:
            check_dense(x, name)
        if x.is_neg():  # a view, as of an imaginary part, whose memory holds -x
            if written:
                raise InvalidArgumentError(
                    f"{name} is a lazily negated view, but is written: pass a tensor of its own, as of {name}.clone()."
                )
            x = x.resolve_neg()
        return x.detach() if x.requires_grad else x
    if isinstance(x, tvm_ffi.Tensor):
        return x
    framework = framework_of(x)
    if framework == "numpy" and hasattr(x, "flags"):
        if not x.flags.writeable:
            if written:
                raise InvalidArgumentError(f"{name} is a read-only array, but is written: pass a writable one.")
            x = x.copy()  # DLPack as NumPy exports it cannot say "read-only"
        if x.dtype.name == "bfloat16":
            if not x.flags.c_contiguous:
                raise InvalidArgumentError(f"{name} is a bfloat16 view, but must be contiguous: copy it.")
            return _native.as_bf16(x.view("uint16"))
    elif framework == "jax":
        if written:
            raise InvalidArgumentError(f"{name} is a JAX array, which is immutable, but is written: pass a NumPy one.")
        if device_of(x) != "cpu":
            raise UnsupportedError(f"{name} is a JAX array on {device_of(x)}: JAX is supported on the CPU; use torch.")
    if framework in ("numpy", "jax"):
        try:
            return tvm_ffi.from_dlpack(x)
        except (BufferError, TypeError, RuntimeError, AttributeError) as error:
            dtype = getattr(x, "dtype", type(x).__name__)
            raise InvalidArgumentError(f"{name} of dtype {dtype} cannot be passed on ({error}): convert it.") from None
    if not hasattr(x, "__dlpack__"):
        raise InvalidArgumentError(
            f"{name} is a {type(x).__name__}, but must be an array that supports DLPack: "
            "pass a NumPy, torch, JAX or CuPy array."
        )
    return x


def kept(x: Any, name: str) -> Any:
    """As :func:`native`, for what is passed again and again: no framework is asked for it twice."""
    x = native(x, name)
    return x if x is None or isinstance(x, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(x)


def place_of(x: Any) -> tuple[str, int]:
    """Device and address of the first element."""
    return device_of(x), int(kept(x, "array").data_ptr())


def stream_of(x: Any, stream: int | None) -> int | None:
    """The stream to use: the caller's choice, CuPy's current one, or None, with which tvm_ffi asks torch."""
    if stream is None and type(x) is _Tensor:
        return None
    if stream is not None:
        try:
            number = -1 if isinstance(stream, bool) else operator.index(stream)
        except TypeError:
            number = -1
        if not 0 <= number < 2**63:
            raise InvalidArgumentError(
                f"stream is {stream!r}, but must be a cudaStream_t as an integer: pass torch's stream.cuda_stream."
            )
        return number
    kind = type(x).__module__
    if kind != "torch" and kind.startswith("cupy"):
        return int(importlib.import_module("cupy").cuda.get_current_stream().ptr)
    return None
