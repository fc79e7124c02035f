"""Values that YAML lets through to a switch or a pattern and that make no sense there, such as ``.nan`` or ``null``."""

from __future__ import annotations

import re


def check_switches(owner: str, **switches: object) -> None:
    """Refuse what is neither true nor false.

    Args:
        owner: name of the class, for the message.
        switches: values by argument.

    Raises:
        ValueError: names the argument and the value.

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
    """Refuse what is no regular expression; None is none.

    Args:
        owner: name of the class, for the message.
        name: of the argument.
        pattern: its value.

    Raises:
        ValueError: names the argument and the value.

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
