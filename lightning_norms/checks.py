"""Values that YAML lets through to a switch or a pattern and that make no sense there, such as ``.nan`` or ``null``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping


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


def check_whole(owner: str, name: str, value: object, lowest: int) -> int:
    """Refuse what is no whole number of at least ``lowest``; gives the value back.

    Args:
        owner: name of the class or function, for the message.
        name: name of the argument.
        value: what was passed.
        lowest: the smallest value that makes sense.

    Raises:
        ValueError: names the argument and the value.

    Example:
        >>> check_whole("DepthMonitor", "every_n_steps", 0, 1)
        Traceback (most recent call last):
            ...
        ValueError: DepthMonitor: every_n_steps must be a whole number of at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"{owner}: {name} must be a whole number of at least {lowest}, got {value!r}")
    return value


def check_number(owner: str, name: str, value: object, above: float, below: float = math.inf) -> float:
    """Refuse what is no number strictly between ``above`` and ``below``; gives the value back. NaN is refused.

    Raises:
        ValueError: names the argument and the value.

    Example:
        >>> check_number("LRFallback", "cut", 1.5, above=0, below=1)
        Traceback (most recent call last):
            ...
        ValueError: LRFallback: cut must be a number above 0 and below 1, got 1.5
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{owner}: {name} must be a number above {above:g}{limit}, got {value!r}")
    return value


def whole(name: str, value: object, lowest: int) -> int:
    """A whole number of at least ``lowest``.

    Example:
        >>> whole("batch_size", 0, 1)
        Traceback (most recent call last):
        ValueError: data.batch_size must be a whole number of at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"data.{name} must be a whole number of at least {lowest}, got {value!r}")
    return value


def fraction(name: str, value: object) -> float:
    """A number in [0, 1); NaN is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"data.{name} must be a number in [0, 1), got {value!r}")
    return float(value)


def patterns(name: str, value: object) -> str | list[str]:
    """A file, folder or glob, or a list of them."""
    listed = [value] if isinstance(value, str) else value
    if (
        not isinstance(listed, (list, tuple))
        or not listed
        or not all(isinstance(item, str) and item for item in listed)
    ):
        raise ValueError(f"data.{name} must be a file, folder or glob, or a list of them, got {value!r}")
    return list(listed)


def named_patterns(name: str, value: object) -> dict[str, str | list[str]]:
    """Names of validation sets, each with its files, folders or globs."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise ValueError(
            f"data.{name} must give each validation set a name, such as {{books: books/*.txt}}, got {value!r}"
        )
    return {key: patterns(f"{name}[{key!r}]", given) for key, given in value.items()}
