"""Patches for configurations: merge a fragment into a configuration, and write the result as YAML."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml


def apply_patch(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``patch`` into a copy of ``config``.

    Mappings are merged key by key, but a patch with another ``class_path`` drops the arguments of the old class. Lists
    of callbacks are joined; a callback replaces one of the same class. Anything else replaces the old value.

    Example:
        >>> config = {"model": {"lr": 1e-3, "width": 8}, "trainer": {"callbacks": [{"class_path": "a.b.Warmup"}]}}
        >>> patch = {"model": {"lr": 1e-4}, "trainer": {"callbacks": [{"class_path": "Warmup", "init_args": {"x": 1}}]}}
        >>> apply_patch(config, patch)["trainer"]["callbacks"]
        [{'class_path': 'Warmup', 'init_args': {'x': 1}}]
        >>> post = {"class_path": "PostNorm", "init_args": {"final_norm": True}}
        >>> apply_patch({"placement": post}, {"placement": {"class_path": "KEEL"}})
        {'placement': {'class_path': 'KEEL'}}
    """
    result = dict(copy.deepcopy(config))
    for key, value in patch.items():
        before = _expand(result.get(key), value)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and not _changes_class(before, value):
            result[key] = apply_patch(before, value)
        elif isinstance(value, list) and key == "callbacks":
            callbacks = [before] if isinstance(before, Mapping) else list(before or [])
            new = {class_name(callback) for callback in value}
            result[key] = [callback for callback in callbacks if class_name(callback) not in new] + copy.deepcopy(value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def to_yaml(value: Mapping[str, Any], comments: tuple[str, ...] = ()) -> str:
    """Write a configuration as YAML in the order of its keys, below comment lines.

    Example:
        >>> print(to_yaml({"b": [1], "a": None}, ("why",)), end="")
        # why
        b:
        - 1
        a: null
    """
    lines = "".join(f"# {line}\n" for line in comments)
    return lines + yaml.safe_dump(dict(value), sort_keys=False, default_flow_style=False, width=100)


def class_name(value: Any) -> str:
    """The last word of a ``class_path``, or of a class that is given by its path alone."""
    path = value.get("class_path", "") if isinstance(value, Mapping) else str(value)
    return path.rpartition(".")[2]


def _expand(before: Any, patch: Any) -> Any:
    """Write a class that is given by one word as a mapping, if the patch holds only arguments for it."""
    has_arguments_only = isinstance(patch, Mapping) and "init_args" in patch and "class_path" not in patch
    return {"class_path": before} if isinstance(before, str) and has_arguments_only else before


def _changes_class(before: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    return "class_path" in before and "class_path" in patch and class_name(before) != class_name(patch)
