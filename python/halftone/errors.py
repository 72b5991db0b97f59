"""The exceptions of halftone.

Each carries the sentence of the C++ library: it names the argument, its value, the limit and a remedy. Every class
derives from :class:`Error` and from one of Python's own exceptions, so that both ``except halftone.Error`` and
``except ValueError`` work.
"""

from __future__ import annotations

from tvm_ffi.error import register_error


class Error(Exception):
    """Base class of every error that halftone raises."""


class InvalidArgumentError(Error, ValueError):
    """A value that no configuration could accept."""


class UnsupportedError(Error, NotImplementedError):
    """Well formed, but no backend here has it."""


class OutOfRangeError(Error, ValueError):
    """An index, length or slot beyond its limit."""


class CorruptFileError(Error, ValueError):
    """A file that breaks its format."""


class ResourceExhaustedError(Error, RuntimeError):
    """Memory, workspace or cache space is missing."""


class DeviceError(Error, RuntimeError):
    """The device or its driver reported a failure."""


class InternalError(Error, RuntimeError):
    """A defect in halftone: please report it."""


# The names under which the native library throws: halftone::error_code_name().
for _name, _class in {
    "InvalidArgument": InvalidArgumentError,
    "Unsupported": UnsupportedError,
    "OutOfRange": OutOfRangeError,
    "CorruptFile": CorruptFileError,
    "ResourceExhausted": ResourceExhaustedError,
    "DeviceError": DeviceError,
    "Internal": InternalError,
}.items():
    register_error(f"halftone.{_name}", _class)
