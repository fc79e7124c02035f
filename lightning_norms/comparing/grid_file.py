"""The YAML file of a grid.

::

    base: {...} or the name of a recipe          one run's configuration; the name of a grid takes its base
    baseline: pre                                the variant that the others are compared with
    seeds: [1337, 1338, 1339]
    variants:
      pre: {title: as it was}
      post: {title: norms moved, model: {init_args: {decoder: {placement: PostNorm}}}}

or, instead of ``variants``, two axes, of which every pair is a variant ("post, blocks 8")::

    axes:
      placement: {pre: {}, post: {model: {init_args: {decoder: {placement: PostNorm}}}}}
      blocks: {4: {model: {init_args: {decoder: {n_layers: 4}}}}, 8: {...}}
    exponents: {pre: -0.5, post: 0}        published, of the top block's first gradient along the second axis
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_norms import recipes
from lightning_norms.checks import check_whole
from lightning_norms.comparing.grid import Grid, Variant
from lightning_norms.recipes.overlay import apply_patch

KEYS = {"base", "baseline", "seeds"}
OPTIONAL = {"variants", "axes", "exponents"}


def read_grid(
    path: str | Path, seeds: Sequence[int] | None = None, n_seeds: int | None = None, fast: bool = False
) -> Grid:
    """Read a grid from a file.

    Args:
        path: The YAML file.
        seeds: Seeds that replace the file's.
        n_seeds: Number of seeds: the first ones of the file, and whole numbers above them if it has fewer.
        fast: Shrink every run, see :class:`Grid`; with the first seed only, unless ``seeds`` or ``n_seeds`` is given.

    Raises:
        ValueError: If a key is missing or unknown, or its value does not fit.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    data = _check_mapping(yaml.safe_load(text), path.name, "base, baseline, seeds, variants")
    _check_keys(data, path.name)
    axes = _read_axes(data["axes"], path.name) if "axes" in data else {}
    if n_seeds is None and seeds is None and fast:
        n_seeds = 1
    return Grid(
        name=path.stem,
        base=_read_base(data["base"], path),
        baseline=str(data["baseline"]),
        variants=_cross(axes) if axes else _read_variants(data["variants"], f"{path.name}: variants"),
        seeds=_take(_read_seeds(data["seeds"], path.name) if seeds is None else seeds, n_seeds),
        fast=fast,
        axes=tuple(axes),
        exponents={str(label): float(value) for label, value in (data.get("exponents") or {}).items()},
    )


def _check_keys(data: Mapping[str, Any], name: str) -> None:
    allowed = ", ".join(sorted(KEYS | OPTIONAL))
    if unknown := set(map(str, data)) - KEYS - OPTIONAL:
        raise ValueError(f"{name}: unknown key {', '.join(sorted(unknown))}; a grid has {allowed}.")
    if missing := KEYS - set(data):
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}; a grid has {allowed}.")
    if ("variants" in data) == ("axes" in data):
        raise ValueError(f"{name}: give either variants or axes.")


def _check_mapping(value: Any, what: str, form: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r:.80}, but it must be a mapping: {form}.")
    return dict(value)


def _read_base(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, str):
        return _check_mapping(value, f"{path.name}: base", "a run's configuration, or the name of a file or recipe")
    beside = path.parent / value
    file = beside if beside.is_file() else recipes.find(value)
    data = _check_mapping(yaml.safe_load(file.read_text(encoding="utf-8")), str(file), "a run's configuration")
    if set(data) == {"fit"}:  # a file that stands before the command
        return _check_mapping(data["fit"], f"{file}: fit", "a run's configuration")
    return _read_base(data["base"], file) if set(data) >= KEYS else data


def _read_seeds(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: seeds is {value!r}, but it must be a list of whole numbers.")
    return value


def _take(seeds: Sequence[int], count: int | None) -> tuple[int, ...]:
    """The first ``count`` seeds, continued upwards if there are fewer."""
    if count is None or count <= len(seeds) or not seeds:
        return tuple(seeds[:count])
    next_seed = 1 + max(check_whole("compare", "each seed", seed, 0) for seed in seeds)
    return (*seeds, *range(next_seed, next_seed + count - len(seeds)))


def _read_variants(value: Any, what: str) -> dict[str, Variant]:
    variants = {}
    for name, overrides in _check_mapping(value, what, "name: {title: ..., key: value, ...}").items():
        patch = _check_mapping(overrides or {}, f"variant {name}", "{title: ..., key: value, ...}")
        variants[str(name)] = Variant(str(patch.pop("title", name)), patch)
    return variants


def _read_axes(value: Any, name: str) -> dict[str, dict[str, Variant]]:
    axes = _check_mapping(value, f"{name}: axes", "name: {label: {key: value, ...}, ...}")
    if len(axes) != 2:
        raise ValueError(f"{name} has {len(axes)} axes, but a map has two.")
    return {str(axis): _read_variants(labels, f"{name}: axis {axis}") for axis, labels in axes.items()}


def _cross(axes: Mapping[str, Mapping[str, Variant]]) -> dict[str, Variant]:
    """Every pair of labels, with the overrides of the second on top of the first's."""
    (first, rows), (second, columns) = axes.items()
    variants = {}
    for row, outer in rows.items():
        for column, inner in columns.items():
            name = f"{_with_axis(first, row)}, {_with_axis(second, column)}"
            variants[name] = Variant(name, apply_patch(outer.overrides, inner.overrides), (row, column))
    return variants


def _with_axis(axis: str, label: str) -> str:
    return f"{axis} {label}" if label[:1].isdigit() else label
