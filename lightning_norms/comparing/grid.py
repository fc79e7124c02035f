"""A grid as a file says it: a base configuration, named variants of it, seeds; and the configuration of every run.

::

    base: {...} or the name of a recipe          one run's configuration; of a grid, its base
    baseline: pre                                the variant that the others are held against
    seeds: [1337, 1338, 1339]
    variants:
      pre: {title: as it was}
      post: {title: norms moved, model: {init_args: {decoder: {placement: PostNorm}}}}

or, in place of ``variants``, two axes, of which every pair is a variant ("post, blocks 8")::

    axes:
      placement: {pre: {}, post: {model: {init_args: {decoder: {placement: PostNorm}}}}}
      blocks: {4: {model: {init_args: {decoder: {n_layers: 4}}}}, 8: {...}}
    exponents: {pre: -0.5, post: 0}        published, of the top block's first gradient against the second axis
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_norms import recipes
from lightning_norms.recipes.overlay import as_yaml, patched

KEYS = {"base", "baseline", "seeds"}
OPTIONAL = {"variants", "axes", "exponents"}
NAME = re.compile(r"\w[\w .,+()=-]*")
FAST_STEPS = 3
CHECKPOINTS = 10
"""Of a run that keeps none by itself: an interrupted one goes on from the last."""


@dataclass(frozen=True)
class Variant:
    """One row: what it is, and what it changes in the base."""

    title: str
    overrides: dict[str, Any]
    labels: tuple[str, ...] = ()
    """Where it stands on the axes of the grid."""


@dataclass(frozen=True)
class PlannedRun:
    """A variant with a seed, as a configuration that ``fit`` runs."""

    variant: str
    seed: int
    config: str
    """YAML; knows nothing of folders, so that equal text means an equal run."""

    @property
    def folder(self) -> str:
        """Name of its folder: it holds a digest, so that a changed configuration never meets the old one's results."""
        return self.variant.replace(" ", "-") + self.ending

    @property
    def ending(self) -> str:
        """Of its folder's name: that of every run with the same configuration, whatever its grid calls it."""
        return f"_{self.seed}_{hashlib.sha256(self.config.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Grid:
    """Variants by seeds.

    Args:
        name: of the grid.
        base: configuration that all share.
        baseline: name of a variant.
        variants: name -> variant, in the order of the table.
        seeds: of weights and data order; every variant runs with each.
        fast: shrink every run to a few steps of a tiny model: does the grid work at all?
        axes: names of the two axes, if the variants are pairs.
        exponents: label of the first axis -> published exponent of the top block's first gradient against the second.

    Raises:
        ValueError: one sentence on what does not fit.
    """

    name: str
    base: dict[str, Any]
    baseline: str
    variants: dict[str, Variant]
    seeds: tuple[int, ...]
    fast: bool = False
    axes: tuple[str, ...] = ()
    exponents: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError(f"{self.name} has no variants: give a mapping, name: {{title: ..., key: value, ...}}.")
        if self.baseline not in self.variants:
            names = ", ".join(self.variants)
            raise ValueError(f"{self.name}: baseline is {self.baseline!r}, but the variants are: {names}.")
        for name in self.variants:
            if not NAME.fullmatch(name):
                raise ValueError(f"{self.name}: variant {name!r} must be of letters, digits, spaces and . , + ( ) = -.")
        if not self.seeds:
            raise ValueError(f"{self.name} has no seeds: give a list of whole numbers.")
        for seed in self.seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
                raise ValueError(f"{self.name}: seed {seed!r} must be a whole number >= 0.")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"{self.name}: a seed is given twice in {list(self.seeds)}; a run is not counted twice.")

    def runs(self) -> tuple[PlannedRun, ...]:
        """All variants of the first seed, then of the next: a grid that is cut short compares like with like."""
        return tuple(
            PlannedRun(name, seed, as_yaml(self._config(variant, seed)))
            for seed in self.seeds
            for name, variant in self.variants.items()
        )

    def _config(self, variant: Variant, seed: int) -> dict[str, Any]:
        config = {**patched(self.base, variant.overrides), "seed_everything": seed}
        if _is(config, "model", "DecoderModule"):
            config = patched(config, {"model": {"init_args": {"decoder": {"draw_by_name": True}}}})
        if self.fast:
            config = patched(config, _fast(config))
        return patched(config, {"trainer": {"callbacks": _observers(config)}})


def read(path: str | Path, seeds: Sequence[int] | None = None, fast: bool = False) -> Grid:
    """The grid in a file.

    Args:
        path: of the YAML file.
        seeds: in place of the file's.
        fast: as of :class:`Grid`; without ``seeds``, the first one only.

    Raises:
        ValueError: if a key is missing or unknown, or its value does not fit.
    """
    path = Path(path)
    data = _mapping(yaml.safe_load(path.read_text(encoding="utf-8")), path.name, "base, baseline, seeds, variants")
    known = ", ".join(sorted(KEYS | OPTIONAL))
    if unknown := set(map(str, data)) - KEYS - OPTIONAL:
        raise ValueError(f"{path.name}: unknown key {', '.join(sorted(unknown))}; a grid has {known}.")
    if missing := KEYS - set(data):
        raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}; a grid has {known}.")
    if ("variants" in data) == ("axes" in data):
        raise ValueError(f"{path.name}: give either variants or axes.")
    chosen = tuple(seeds or _listed(data["seeds"], path.name))
    axes = _axes(data["axes"], path.name) if "axes" in data else {}
    return Grid(
        path.stem,
        _base(data["base"], path),
        str(data["baseline"]),
        _crossed(axes) if axes else _variants(data["variants"], f"{path.name}: variants"),
        chosen[:1] if fast and not seeds else chosen,
        fast,
        tuple(axes),
        {str(label): float(value) for label, value in (data.get("exponents") or {}).items()},
    )


def _variants(given: Any, what: str) -> dict[str, Variant]:
    named = _mapping(given, what, "name: {title: ..., key: value, ...}")
    return {str(name): _variant(str(name), value) for name, value in named.items()}


def _axes(given: Any, name: str) -> dict[str, dict[str, Variant]]:
    axes = _mapping(given, f"{name}: axes", "name: {label: {key: value, ...}, ...}")
    if len(axes) != 2:
        raise ValueError(f"{name} has {len(axes)} axes, but a map has two.")
    return {str(axis): _variants(labels, f"{name}: axis {axis}") for axis, labels in axes.items()}


def _crossed(axes: Mapping[str, Mapping[str, Variant]]) -> dict[str, Variant]:
    """Every pair: the second's overrides on top of the first's; a label that is a number is told with its axis."""
    (first, rows), (second, columns) = axes.items()
    crossed = {}
    for row, one in rows.items():
        for column, other in columns.items():
            name = f"{_told(first, row)}, {_told(second, column)}"
            crossed[name] = Variant(name, patched(one.overrides, other.overrides), (row, column))
    return crossed


def _told(axis: str, label: str) -> str:
    return f"{axis} {label}" if label[:1].isdigit() else label


def _base(given: Any, path: Path) -> dict[str, Any]:
    if not isinstance(given, str):
        return _mapping(given, f"{path.name}: base", "a run's configuration, or the name of a file or recipe")
    beside = path.parent / given
    file = beside if beside.is_file() else recipes.find(given)
    data = _mapping(yaml.safe_load(file.read_text(encoding="utf-8")), str(file), "a run's configuration")
    return _base(data["base"], file) if set(data) >= KEYS else data


def _variant(name: str, given: Any) -> Variant:
    overrides = _mapping(given or {}, f"variant {name}", "{title: ..., key: value, ...}")
    title = str(overrides.pop("title", name))
    return Variant(title, overrides)


def _mapping(value: Any, what: str, wanted: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r:.80}, but it must be a mapping: {wanted}.")
    return dict(value)


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: seeds is {value!r}, but it must be a list of whole numbers.")
    return value


def _observers(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The record that the table is made of; checkpoints to go on from, if the run keeps none."""
    trainer = config.get("trainer") or {}
    record = {"class_path": "RunRecord"}
    callbacks = trainer.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, Mapping | str) else callbacks
    kept = any("ModelCheckpoint" in str(callback) for callback in callbacks)
    if kept or trainer.get("enable_checkpointing") is False:
        return [record]
    steps = trainer.get("max_steps")
    every = max(1, (steps if isinstance(steps, int) and steps > 0 else 300) // CHECKPOINTS)
    arguments = {"filename": "last", "every_n_train_steps": every, "enable_version_counter": False}
    return [record, {"class_path": "ModelCheckpoint", "init_args": arguments}]


def _fast(config: Mapping[str, Any]) -> dict[str, Any]:
    """A few steps; and a tiny model on bytes, where model and data are ours."""
    steps = {"max_steps": FAST_STEPS, "val_check_interval": FAST_STEPS, "check_val_every_n_epoch": None}
    small: dict[str, Any] = {"trainer": {**steps, "limit_val_batches": 1, "log_every_n_steps": 1}}
    if _is(config, "model", "DecoderModule") and _is(config, "data", "TextDataModule"):
        decoder = {"n_layers": 2, "d_model": 16, "context_length": 16}
        small["model"] = {"init_args": {"decoder": decoder}}
        small["data"] = {"init_args": {"context_length": 16, "batch_size": 2, "val_batch_size": 2, "tokens": "Bytes"}}
    return small


def _is(config: Mapping[str, Any], key: str, name: str) -> bool:
    given = config.get(key) or {}
    path = given.get("class_path", name) if isinstance(given, Mapping) else str(given)
    return str(path).rpartition(".")[2] == name
