"""Checks of scalar arguments and of the ranks of arrays; the native library checks the rest of an array."""

from __future__ import annotations

import math
import operator
from typing import Any

from .errors import InvalidArgumentError, UnsupportedError

FLOATS = ("f32", "f16", "bf16")  # dtypes of Q, of outputs, and of plain K and V
_F32_UNDERFLOW = 2.0**-150  # this and what is below rounds to 0
_F32_OVERFLOW = 2.0**128 - 2.0**103  # this and what is above rounds to infinity


class Fixed:
    """A base of objects whose native half keeps what they were made of: their attributes stay, and they stay one.

    Attributes:
        _fixed: names of the attributes that are set once.
        _instead: what to do instead of assigning one, as the remedy of a sentence.
        _no_copy: what to do instead of copying or pickling the object.
    """

    _fixed: frozenset[str] = frozenset()
    _instead = ""
    _no_copy = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and name in self.__dict__:
            raise InvalidArgumentError(
                f"{name} of a {type(self).__name__} cannot be assigned, since calls would go on using the first one: "
                f"{self._instead}."
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        raise UnsupportedError(f"a {type(self).__name__} cannot be copied or pickled: {self._no_copy}.")


def integer(value: Any, name: str, bits: int = 32) -> int:
    """``value`` as an int of so many bits. Raises InvalidArgumentError."""
    most = 2 ** (bits - 1) - 1
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}, but must be an integer: pass an int.") from None
    if isinstance(value, bool) or not -most - 1 <= number <= most:
        raise InvalidArgumentError(
            f"{name} is {value!r}, but must be an integer of {bits} bits: pass an int up to {most}."
        )
    return number


def real(value: Any, name: str) -> float:
    """``value`` as a finite float. Raises InvalidArgumentError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be a number: pass a float.") from None
    except OverflowError:
        raise InvalidArgumentError(f"{name} is too large for a float: pass a smaller number.") from None
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be finite: pass a finite float.")
    return number


def positive(value: Any, name: str, otherwise: str) -> float:
    """``value`` as a float that stays positive and finite in 32 bits. Raises InvalidArgumentError.

    Args:
        value, name: the argument.
        otherwise: the remedy beside a positive float, such as "0 for none".
    """
    number = real(value, name)
    if not _F32_UNDERFLOW < number < _F32_OVERFLOW:
        raise InvalidArgumentError(
            f"{name} is {value!r}, but must be positive and finite as f32: pass a positive float, or {otherwise}."
        )
    return number


def counts(value: Any, name: str) -> list[int]:
    """``value``, a sequence of integers, as a list. Raises InvalidArgumentError."""
    try:
        items = list(value) if not isinstance(value, (str, bytes)) else None
    except TypeError:
        items = None
    if items is None:
        raise InvalidArgumentError(
            f"{name} is {value!r}, but must be a sequence of integers: give one for each request."
        )
    return [integer(item, f"{name}[{i}]") for i, item in enumerate(items)]


def flag(value: Any, name: str) -> bool:
    """``value``, which must be a bool. Raises InvalidArgumentError."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be True or False: pass a bool.")
    return value


def text(value: Any, name: str) -> str:
    """``value``, a str that files and the native library can hold. Raises InvalidArgumentError."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be a text: pass a str.")
    try:
        fits = b"\0" not in value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        fits = False
    if not fits:
        raise InvalidArgumentError(f"{name} is {value!r}, but must be valid UTF-8 without zeros: choose another one.")
    return value


def choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """``value``, which must be one of ``choices``. Raises InvalidArgumentError."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name} is {value!r}, but must be one of {', '.join(choices)}: choose one.")
    return value


def shape(value: Any, name: str, rank: int, dims: str) -> Any:
    """The shape of an array of ``rank`` dimensions; ``dims`` names them. Raises InvalidArgumentError."""
    found: Any = None
    try:
        found = value.shape
        fits = len(found) == rank
    except Exception:  # None, something that is no shape, or a nested torch tensor, which raises a RuntimeError
        fits, found = False, None
    if not fits:
        got = "None" if value is None else f"a {type(value).__name__}" if found is None else f"of shape {tuple(found)}"
        remedy = "pass one" if found is None else "reshape it"
        raise InvalidArgumentError(f"{name} is {got}, but must be an array [{dims}]: {remedy}.")
    return found
