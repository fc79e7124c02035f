"""Checks of the data module's arguments: each gives the value back, or says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_norms.data.tokens import Tokens


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


def recipe(value: object) -> Tokens:
    """A recipe for tokens."""
    if not isinstance(value, Tokens):
        names = sorted(kind.__name__ for kind in Tokens.__subclasses__())
        raise ValueError(f"data.tokens must be one of {', '.join(names)}, got {value!r}")
    return value


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
