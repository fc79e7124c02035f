"""A change of a configuration as a fragment of it: put in, and written as a file that ``fit`` runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml


def patched(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``patch`` in it; neither is changed.

    Mappings are merged key by key, but another ``class_path`` leaves nothing of the old class: its arguments are not
    the new one's. Lists of callbacks are joined, a callback of a class that is there already takes its place.
    Everything else replaces what was there.

    Example:
        >>> config = {"model": {"lr": 1e-3, "width": 8}, "trainer": {"callbacks": [{"class_path": "a.b.Warmup"}]}}
        >>> patch = {"model": {"lr": 1e-4}, "trainer": {"callbacks": [{"class_path": "Warmup", "init_args": {"x": 1}}]}}
        >>> patched(config, patch)["trainer"]["callbacks"]
        [{'class_path': 'Warmup', 'init_args': {'x': 1}}]
        >>> post = {"class_path": "PostNorm", "init_args": {"final_norm": True}}
        >>> patched({"placement": post}, {"placement": {"class_path": "KEEL"}})
        {'placement': {'class_path': 'KEEL'}}
    """
    result = dict(copy.deepcopy(config))
    for key, value in patch.items():
        before = _spelled_out(result.get(key), value)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and not _is_another(before, value):
            result[key] = patched(before, value)
        elif isinstance(value, list) and key == "callbacks":
            given = [before] if isinstance(before, Mapping) else list(before or [])
            new = {_class_name(each) for each in value}
            result[key] = [each for each in given if _class_name(each) not in new] + copy.deepcopy(value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def as_yaml(value: Mapping[str, Any], comments: tuple[str, ...] = ()) -> str:
    """YAML in the order of the keys, with comment lines above it.

    Example:
        >>> print(as_yaml({"b": [1], "a": None}, ("why",)), end="")
        # why
        b:
        - 1
        a: null
    """
    lines = "".join(f"# {line}\n" for line in comments)
    return lines + yaml.safe_dump(dict(value), sort_keys=False, default_flow_style=False, width=100)


def _spelled_out(before: Any, patch: Any) -> Any:
    """A class that is named by one word, as a mapping, if the patch is of its arguments."""
    of_arguments = isinstance(patch, Mapping) and "init_args" in patch and "class_path" not in patch
    return {"class_path": before} if isinstance(before, str) and of_arguments else before


def _is_another(before: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    return "class_path" in before and "class_path" in patch and _class_name(before) != _class_name(patch)


def _class_name(callback: Any) -> str:
    path = callback.get("class_path", "") if isinstance(callback, Mapping) else str(callback)
    return path.rpartition(".")[2]
