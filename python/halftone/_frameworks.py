"""One adapter for each array framework: what an array of it is, how to make more, how to hand it to the native library.

A framework is imported only when an array of it turns up or is asked for by name.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Sequence

import tvm_ffi

from . import _check, _native
from .errors import InvalidArgumentError, UnsupportedError

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "uint8": "uint8", "int32": "int32", "int64": "int64"}
_PIP_NAMES = {"cupy": "cupy-cuda12x"}
_STRIDED: Any = getattr(sys.modules.get("torch"), "strided", None)  # tvm_ffi imports torch where it is installed


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


class Framework:
    """Any type with DLPack, and what the others share. Arrays are indexed and assigned to as NumPy's are."""

    name = "dlpack"
    has_streams = False  # of its own, on which it queues work

    @property
    def module(self) -> Any:
        """Raises as :func:`load`."""
        return load(self.name)

    def dtype(self, name: str) -> Any:
        """The framework's own of "f32", "bf16", ..."""
        return _import("ml_dtypes").bfloat16 if name == "bf16" else self.module.dtype(DTYPES[name])

    def device_of(self, x: Any) -> str:
        """ "cpu" or "cuda:<index>"."""
        try:
            kind, index = x.__dlpack_device__()
        except AttributeError:
            raise InvalidArgumentError(
                f"a {type(x).__name__} does not support DLPack: pass a NumPy, torch, JAX or CuPy array."
            ) from None
        return f"cuda:{index}" if int(kind) in (2, 13) else "cpu"

    def empty(self, shape: tuple[int, ...], dtype: str, device: str, zero: bool) -> Any:
        """A new array to be written, zeroed if asked; of frameworks that cannot be written a NumPy one."""
        if device != "cpu":
            raise UnsupportedError(
                f"device is {device}, but halftone allocates arrays of JAX and unknown frameworks on the CPU only: "
                "pass caller-allocated torch or CuPy arrays."
            )
        return _NUMPY.empty(shape, dtype, device, zero)

    def make(self, values: Any, dtype: str, device: str) -> Any:
        """An array of the (nested) list ``values``."""
        return _NUMPY.make(values, dtype, device)

    def workspace(self, size: int, device: str) -> Any:
        """uint8 [size] on a GPU."""
        return _TORCH.empty((size,), "uint8", device, False)

    def empty_output(self, like: Any, shape: Sequence[int], dtype: str) -> Any:
        """A new array for a result, on the device of ``like``."""
        device = self.device_of(like)
        if device == "cpu":
            return _native.empty(tuple(shape), DTYPES[dtype])
        return self.empty(tuple(shape), dtype, device, False)

    def finish(self, result: Any) -> Any:
        """What the caller gets for a tvm_ffi.Tensor of :meth:`empty_output`."""
        return result

    def on_device(self, x: Any) -> Any:
        """A context in which the framework works on the device of ``x``."""
        return nullcontext()

    def on_stream(self, stream: int, index: int) -> Any:
        """A context in which the framework queues its own work on ``stream`` of device ``index``."""
        return nullcontext()

    def current_stream(self) -> int | None:
        """The stream that the native library is to use, or None, with which tvm_ffi asks torch."""
        return None

    def is_capturing(self) -> bool:
        """True where the capture of a CUDA graph records the current stream."""
        return False

    def wait(self) -> None:
        """Until arrays just made from values of the host are complete for every stream."""

    def assign(self, target: Any, source: Any) -> None:
        """Overwrites ``target`` with an array of :meth:`make`."""
        with self.on_device(target):
            target[...] = source

    def fill(self, target: Any, value: int) -> None:
        """Overwrites every element of ``target``."""
        self.assign(target, value)

    def put(self, target: Any, entries: Sequence[tuple[int, int, int]]) -> None:
        """``target[i, j] = value`` for every (i, j, value)."""
        module = self.module
        with self.on_device(target):
            rows, columns, values = module.asarray(entries).T
            target[rows, columns] = values

    def copy_rows(self, targets: Sequence[Any], copies: Sequence[tuple[int, int]]) -> None:
        """``x[to] = x[from]`` for every (from, to) and every x of ``targets``; no row is both."""
        module = self.module
        for target in targets:
            with self.on_device(target):
                source, to = module.asarray(copies).T
                target[to] = target[source]

    def replaced(self, x: Any, old: float, new: float) -> Any:
        """A new array: ``x`` of dtype f32 with ``new`` wherever it holds ``old``."""
        with self.on_device(x):
            return self.module.where(x == old, new, x)

    def copied(self, x: Any) -> Any:
        """A contiguous array of its own with the values of ``x``."""
        return x.copy() if hasattr(x, "copy") else _NUMPY.module.array(self.to_numpy(x))

    def to_numpy(self, x: Any) -> Any:
        """``x`` on the host."""
        return load("numpy").from_dlpack(x)

    def is_read_only(self, x: Any) -> bool:
        """True for what must not be written, of which :meth:`native` makes a copy."""
        return False

    def native(self, x: Any, name: str, written: bool) -> Any:
        """``x`` for the native library. Raises InvalidArgumentError naming ``name``."""
        if not hasattr(x, "__dlpack__"):
            raise InvalidArgumentError(
                f"{name} is a {type(x).__name__}, but must be an array that supports DLPack: "
                "pass a NumPy, torch, JAX or CuPy array."
            )
        return x


def _exported(x: Any, name: str) -> Any:
    try:
        return tvm_ffi.from_dlpack(x)
    except (BufferError, TypeError, RuntimeError, AttributeError) as error:
        dtype = getattr(x, "dtype", type(x).__name__)
        raise InvalidArgumentError(f"{name} of dtype {dtype} cannot be passed on ({error}): convert it.") from None


class _Numpy(Framework):
    name = "numpy"

    def device_of(self, x: Any) -> str:
        return "cpu"

    def empty(self, shape: tuple[int, ...], dtype: str, device: str, zero: bool) -> Any:
        module = self.module
        if device != "cpu":
            raise InvalidArgumentError(f"device is {device}, but NumPy arrays live on the CPU: use framework='torch'.")
        return (module.zeros if zero else module.empty)(shape, dtype=self.dtype(dtype))

    def make(self, values: Any, dtype: str, device: str) -> Any:
        return self.module.asarray(values, dtype=self.dtype(dtype))

    def workspace(self, size: int, device: str) -> Any:
        return self.empty((size,), "uint8", device, False)

    def empty_output(self, like: Any, shape: Sequence[int], dtype: str) -> Any:
        return self.empty(tuple(shape), dtype, "cpu", False)

    def to_numpy(self, x: Any) -> Any:
        return self.module.asarray(x)

    def is_read_only(self, x: Any) -> bool:
        return hasattr(x, "flags") and not x.flags.writeable

    def native(self, x: Any, name: str, written: bool) -> Any:
        if hasattr(x, "flags"):
            if not x.flags.writeable:
                if written:
                    raise InvalidArgumentError(f"{name} is a read-only array, but is written: pass a writable one.")
                x = x.copy()  # DLPack as NumPy exports it cannot say "read-only"
            if x.dtype.name == "bfloat16":
                if not x.flags.c_contiguous:
                    raise InvalidArgumentError(f"{name} is a bfloat16 view, but must be contiguous: copy it.")
                return _native.as_bf16(x.view("uint16"))
        return _exported(x, name)


class _Jax(Framework):
    """Its arrays are immutable: what is to be written is NumPy's, and results are taken over without a copy."""

    name = "jax"

    def workspace(self, size: int, device: str) -> Any:
        return self.empty((size,), "uint8", device, False)

    def finish(self, result: Any) -> Any:
        return self.module.dlpack.from_dlpack(result)

    def replaced(self, x: Any, old: float, new: float) -> Any:
        return self.module.numpy.where(x == old, new, x)

    def to_numpy(self, x: Any) -> Any:
        return load("numpy").asarray(x)

    def native(self, x: Any, name: str, written: bool) -> Any:
        if written:
            raise InvalidArgumentError(f"{name} is a JAX array, which is immutable, but is written: pass a NumPy one.")
        device = self.device_of(x)
        if device != "cpu":
            raise UnsupportedError(f"{name} is a JAX array on {device}: JAX is supported on the CPU; use torch.")
        return _exported(x, name)


class _CudaStream:
    """A cudaStream_t under CUDA's stream protocol."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


class _Cupy(Framework):
    name = "cupy"
    has_streams = True

    def empty(self, shape: tuple[int, ...], dtype: str, device: str, zero: bool) -> Any:
        module = self.module
        with module.cuda.Device(parse_device(device)[1]):
            return (module.zeros if zero else module.empty)(shape, dtype=self.dtype(dtype))

    def make(self, values: Any, dtype: str, device: str) -> Any:
        module = self.module
        with module.cuda.Device(parse_device(device)[1]):
            return module.asarray(values, dtype=self.dtype(dtype))

    def workspace(self, size: int, device: str) -> Any:
        return self.empty((size,), "uint8", device, False)

    def empty_output(self, like: Any, shape: Sequence[int], dtype: str) -> Any:
        return self.empty(tuple(shape), dtype, self.device_of(like), False)

    def on_device(self, x: Any) -> Any:
        return x.device

    def on_stream(self, stream: int, index: int) -> Any:
        cuda = self.module.cuda
        if not stream:
            return cuda.Stream.null
        if not hasattr(cuda.Stream, "from_external"):  # before CuPy 14
            return cuda.ExternalStream(stream, index)
        with cuda.Device(index):  # which the stream is then said to belong to
            return cuda.Stream.from_external(_CudaStream(stream))

    def current_stream(self) -> int | None:
        return int(self.module.cuda.get_current_stream().ptr)

    def is_capturing(self) -> bool:
        return bool(self.module.cuda.get_current_stream().is_capturing())

    def wait(self) -> None:
        self.module.cuda.get_current_stream().synchronize()

    def to_numpy(self, x: Any) -> Any:
        return x.get()


class _Torch(Framework):
    name = "torch"
    has_streams = True

    @cached_property
    def _fast(self) -> tuple[Any, dict[str, Any]]:
        """The module and its dtypes, for the path of every decode step."""
        torch = self.module
        return torch, {short: getattr(torch, long) for short, long in DTYPES.items()}

    def dtype(self, name: str) -> Any:
        return getattr(self.module, DTYPES[name])

    def device_of(self, x: Any) -> str:
        device = x.device  # which torch.compile can trace, unlike the enumeration that DLPack gives
        if device.type == "cpu":
            return "cpu"
        return f"cuda:{device.index}" if device.type == "cuda" else super().device_of(x)

    def empty(self, shape: tuple[int, ...], dtype: str, device: str, zero: bool) -> Any:
        module = self.module
        return (module.zeros if zero else module.empty)(shape, dtype=self.dtype(dtype), device=device)

    def make(self, values: Any, dtype: str, device: str) -> Any:
        return self.module.tensor(values, dtype=self.dtype(dtype), device=device)

    def empty_output(self, like: Any, shape: Sequence[int], dtype: str) -> Any:
        if type(like).__module__ != "torch":  # a subclass, whose empty_like() would give another of it
            return self.empty(tuple(shape), dtype, self.device_of(like), False)
        torch, dtypes = self._fast
        if shape == like.shape and like.is_contiguous():  # empty_like is the cheapest of torch's ways
            kind = dtypes[dtype]
            return torch.empty_like(like) if like.dtype is kind else torch.empty_like(like, dtype=kind)
        return like.new_empty(shape, dtype=dtypes[dtype])

    def on_stream(self, stream: int, index: int) -> Any:
        cuda = self.module.cuda
        return cuda.stream(cuda.ExternalStream(stream, device=index) if stream else cuda.default_stream(index))

    def is_capturing(self) -> bool:
        return bool(self.module.cuda.is_current_stream_capturing())

    def assign(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def fill(self, target: Any, value: int) -> None:
        target.fill_(value)

    def put(self, target: Any, entries: Sequence[tuple[int, int, int]]) -> None:
        module, width = self.module, target.shape[1]
        flat = [row * width + column for row, column, _ in entries] + [value for _, _, value in entries]
        # One flat list takes half the time of nested tuples; pinned, the device is not waited for.
        host = module.tensor(flat, dtype=module.int64, pin_memory=target.is_cuda)
        index, values = host.to(target.device, non_blocking=True).view(2, -1)
        target.view(-1)[index] = values.to(target.dtype)

    def copy_rows(self, targets: Sequence[Any], copies: Sequence[tuple[int, int]]) -> None:
        module, first = self.module, targets[0]
        flat = [row for row, _ in copies] + [row for _, row in copies]
        host = module.tensor(flat, dtype=module.int64, pin_memory=first.is_cuda)
        source, to = host.to(first.device, non_blocking=True).view(2, -1)
        for target in targets:
            target[to] = target[source]

    def copied(self, x: Any) -> Any:
        return x.detach().resolve_neg().clone(memory_format=self.module.contiguous_format)

    def to_numpy(self, x: Any) -> Any:
        return x.detach().resolve_neg().cpu().numpy()

    def native(self, x: Any, name: str, written: bool) -> Any:
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


def check_dense(x: Any, name: str) -> None:
    """Raises InvalidArgumentError if the torch tensor ``x`` is not dense memory: sparse, nested, of another library."""
    if x.layout is not _STRIDED and x.layout != load("torch").strided:
        raise InvalidArgumentError(f"{name} has layout {x.layout}, but must be dense: pass {name}.to_dense().")


_ANY, _NUMPY, _TORCH = Framework(), _Numpy(), _Torch()
_BY_NAME: dict[str, Framework] = {f.name: f for f in (_NUMPY, _TORCH, _Cupy(), _Jax())}
FRAMEWORKS = tuple(_BY_NAME)
_BY_PACKAGE = {**_BY_NAME, "jaxlib": _BY_NAME["jax"]}  # in which an array's class is defined


def named(framework: Any) -> Framework:
    """The adapter of that name. Raises InvalidArgumentError for an unknown one."""
    return _ANY if framework == _ANY.name else _BY_NAME[_check.choice(framework, "framework", FRAMEWORKS)]


class _Adapters(dict[type, Framework]):
    """The adapter of a class of arrays: of its own package, or of that of a base, as of torch.nn.Parameter."""

    def __missing__(self, cls: type) -> Framework:
        packages = (base.__module__.partition(".")[0] for base in cls.__mro__)
        found = next((_BY_PACKAGE[package] for package in packages if package in _BY_PACKAGE), _ANY)
        if len(self) >= 256:  # classes made at run time must not stay for ever
            self.clear()
        self[cls] = found
        return found


ADAPTERS = _Adapters()  # asked several times in every call: a dict takes half the time of a function
