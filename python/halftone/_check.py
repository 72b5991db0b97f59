"""Checks of scalar arguments; arrays are checked by the native library."""

from __future__ import annotations

import math
import operator
from typing import Any

from .errors import InvalidArgumentError

_INT32_MAX = 2**31 - 1


def integer(value: Any, name: str) -> int:
    """``value`` as an int of 32 bits. Raises InvalidArgumentError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}, but must be an integer: pass an int.") from None
    if isinstance(value, bool) or not -_INT32_MAX - 1 <= number <= _INT32_MAX:
        raise InvalidArgumentError(
            f"{name} is {value!r}, but must be an integer of 32 bits: pass an int up to {_INT32_MAX}."
        )
    return number


def real(value: Any, name: str) -> float:
    """``value`` as a finite float. Raises InvalidArgumentError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be a number: pass a float.") from None
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be finite: pass a finite float.")
    return number


def flag(value: Any, name: str) -> bool:
    """``value``, which must be a bool. Raises InvalidArgumentError."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}, but must be True or False: pass a bool.")
    return value


def choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """``value``, which must be one of ``choices``. Raises InvalidArgumentError."""
    if value not in choices:
        raise InvalidArgumentError(f"{name} is {value!r}, but must be one of {', '.join(choices)}: choose one.")
    return value


def rank3_shape(value: Any, name: str, dims: str) -> Any:
    """The shape of an array of three dimensions; ``dims`` names them. Raises InvalidArgumentError."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) != 3:
        got = "None" if value is None else f"a {type(value).__name__}" if shape is None else f"of shape {tuple(shape)}"
        raise InvalidArgumentError(f"{name} is {got}, but must be an array [{dims}]: reshape it.")
    return shape
