"""Checks of arguments, all with one form of message: ``Owner: name must be ..., got ...``.

They refuse what YAML lets through but makes no sense there, such as ``.nan`` for a number or ``null`` for a switch.
``owner`` is the class or function that the message names.
"""

from __future__ import annotations

import math
import re


def check_whole(owner: str, name: str, value: object, lowest: int) -> int:
    """Return ``value`` if it is a whole number of at least ``lowest``.

    Args:
        owner: Name of the class or function, for the message.
        name: Name of the argument.
        value: What was passed.
        lowest: The smallest value that makes sense.

    Raises:
        ValueError: Names the argument and the value.

    Example:
        >>> check_whole("DepthMonitor", "every_n_steps", 0, 1)
        Traceback (most recent call last):
            ...
        ValueError: DepthMonitor: every_n_steps must be a whole number of at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {lowest}, got {value!r}")
    return value


def check_number(
    owner: str,
    name: str,
    value: object,
    above: float = -math.inf,
    below: float = math.inf,
    lowest: float = -math.inf,
) -> float:
    """Return ``value`` if it is a finite number within the limits; NaN is refused.

    Args:
        owner: Name of the class or function, for the message.
        name: Name of the argument.
        value: What was passed.
        above: The value must be greater.
        below: The value must be less.
        lowest: The value must be greater or equal.

    Raises:
        ValueError: Names the argument, its limits and the value.

    Example:
        >>> check_number("LRFallback", "cut", 1.5, above=0, below=1)
        Traceback (most recent call last):
            ...
        ValueError: LRFallback: cut must be a number above 0 and below 1, got 1.5
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (above < value < below and lowest <= value):  # type: ignore[operator]
        limits = {"above": above, "of at least": lowest, "below": below}
        words = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
        raise ValueError(f"{owner}: {name} must be a number {words or 'that is finite'}, got {value!r}")
    return value  # type: ignore[return-value]


def check_switches(owner: str, **switches: object) -> None:
    """Refuse any switch that is neither true nor false.

    Raises:
        ValueError: Names the argument and the value.

    Example:
        >>> check_switches("DepthMonitor", table=None)
        Traceback (most recent call last):
            ...
        ValueError: DepthMonitor: table must be true or false, got None
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{owner}: {name} must be true or false, got {value!r}")


def check_pattern(owner: str, name: str, pattern: object) -> None:
    """Refuse a pattern that is neither None nor a regular expression.

    Raises:
        ValueError: Names the argument and the value.

    Example:
        >>> check_pattern("UnitMatrices", "pattern", "(")
        Traceback (most recent call last):
            ...
        ValueError: UnitMatrices: pattern '(' is not a regular expression: missing ), unterminated subpattern ...
    """
    if pattern is None:
        return
    if not isinstance(pattern, str):
        raise ValueError(f"{owner}: {name} must be a regular expression, got {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{owner}: {name} {pattern!r} is not a regular expression: {error}") from None
