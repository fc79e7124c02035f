"""Nested frozen dataclasses as strict JSON data, and back by their type hints."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


def as_plain(value: Any) -> Any:
    """Frozen dataclasses as JSON data; a number that is not finite becomes text.

    Example:
        >>> as_plain((1.5, float("nan"), None))
        [1.5, 'nan', None]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: as_plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def as_typed(data: Any, kind: type[T]) -> T:
    """Rebuild a value of type ``kind`` from JSON data; what is typed Any stays as it is."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    result: Any = data
    if origin in (typing.Union, types.UnionType):
        result = None if data is None else as_typed(data, next(a for a in arguments if a is not type(None)))
    elif origin is tuple:
        result = tuple(as_typed(item, arguments[0]) for item in data)
    elif origin is dict:
        result = {key: as_typed(item, arguments[1]) for key, item in data.items()}
    elif is_dataclass(kind):
        # Python 3.10 refuses dataclasses.KW_ONLY, which is no type.
        hints = typing.get_type_hints(kind, localns={"KW_ONLY": None})
        result = kind(**{name: as_typed(item, hints[name]) for name, item in data.items()})
    elif kind is float or (isinstance(kind, type) and issubclass(kind, Enum)):
        result = kind(data)  # type: ignore[call-arg]
    return typing.cast(T, result)
