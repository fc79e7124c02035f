"""Recipes as plain data and back: the form in which a checkpoint or a YAML file holds a frozen dataclass.

A dataclass becomes ``{"class_path": ..., "init_args": {...}}``, the form that LightningCLI writes, so that a third
party's placement comes back under its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_plain(value: Any) -> Any:
    """Turn dataclasses, at any depth, into mappings of plain Python.

    Example:
        >>> from lightning_norms.model.norms import RMSNorm
        >>> to_plain(RMSNorm(eps=1e-5))
        {'class_path': 'lightning_norms.model.norms.RMSNorm', 'init_args': {'eps': 1e-05, 'gain': True}}
    """
    if is_dataclass(value) and not isinstance(value, type):
        arguments = {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": arguments}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(data: Any) -> Any:
    """Build the dataclasses that :func:`to_plain` described.

    Raises:
        ValueError: if a class is not imported, or is no dataclass; the message names it.

    Example:
        >>> from_plain({"class_path": "lightning_norms.model.norms.RMSNorm", "init_args": {"eps": 1e-5}})
        RMSNorm(eps=1e-05, gain=True)
    """
    if isinstance(data, Mapping) and "class_path" in data:
        arguments = {name: from_plain(value) for name, value in data.get("init_args", {}).items()}
        return _find(data["class_path"])(**arguments)
    if isinstance(data, list):
        return [from_plain(item) for item in data]
    return data


def _find(class_path: str) -> type:
    # Only modules that are imported already, so that reading a checkpoint never imports (and so runs) new code.
    module, _, name = class_path.rpartition(".")
    recipe = getattr(sys.modules.get(module), name, None)
    if not (isinstance(recipe, type) and is_dataclass(recipe)):
        raise ValueError(f"no recipe {class_path!r} is known here: import the module that defines it first.")
    return recipe
