"""A grid: a base configuration, named variants of it, seeds; and the configuration of every run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_norms.checks import check_whole
from lightning_norms.recipes.overlay import apply_patch, class_name, to_yaml

NAME = re.compile(r"\w[\w .,+()=-]*")
FAST_STEPS = 3
CHECKPOINTS = 10
"""How many checkpoints to keep for a run that configures none, so that it can resume."""


@dataclass(frozen=True)
class Variant:
    """One row of the grid: its title, and the patch that it applies to the base."""

    title: str
    overrides: dict[str, Any]
    labels: tuple[str, ...] = ()
    """Its position on the axes of the grid."""


@dataclass(frozen=True)
class PlannedRun:
    """A variant with a seed, as a configuration that ``fit`` runs."""

    variant: str
    seed: int
    config: str
    """YAML without any folder, so that equal texts mean equal runs."""

    @property
    def folder(self) -> str:
        """Name of the run folder, with a digest: a changed configuration never meets the results of the old one."""
        return self.variant.replace(" ", "-") + self.suffix

    @property
    def suffix(self) -> str:
        """Suffix of the run folder; identical for equal configurations, whatever the variant is called."""
        return f"_{self.seed}_{hashlib.sha256(self.config.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Variants by seeds.

    Args:
        name: Name of the grid.
        base: Configuration that all variants share.
        baseline: Name of the variant that the others are compared with.
        variants: Name -> variant, in the order of the table.
        seeds: Seeds of weights and data order; every variant runs with each.
        fast: Shrink every run to a few steps of a tiny model, to see whether the grid works at all.
        axes: Names of the two axes, if the variants are pairs.
        exponents: Label on the first axis -> published exponent of the top block's first gradient along the second.

    Raises:
        ValueError: If the parts do not fit together, in one sentence.
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
                words = "must consist of letters, digits, spaces and . , + ( ) = -."
                raise ValueError(f"{self.name}: variant {name!r} {words}")
        if not self.seeds:
            raise ValueError(f"{self.name} has no seeds: give a list of whole numbers.")
        for seed in self.seeds:
            check_whole(self.name, "each seed", seed, 0)
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"{self.name}: seeds are {list(self.seeds)}, but each may be given only once.")

    def runs(self) -> tuple[PlannedRun, ...]:
        """All variants of the first seed, then of the next: a grid that is cut short still compares equal seeds."""
        return tuple(
            PlannedRun(name, seed, to_yaml(self._config(variant, seed)))
            for seed in self.seeds
            for name, variant in self.variants.items()
        )

    def _config(self, variant: Variant, seed: int) -> dict[str, Any]:
        config = {**apply_patch(self.base, variant.overrides), "seed_everything": seed}
        if _is_ours(config, "model", "DecoderModule"):
            config = apply_patch(config, {"model": {"init_args": {"decoder": {"draw_by_name": True}}}})
        if self.fast:
            config = apply_patch(config, _shrink(config))
        return apply_patch(config, {"trainer": {"callbacks": _observers(config)}})


def _observers(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The record that the table is made of, and checkpoints to resume from if the run configures none."""
    trainer = config.get("trainer") or {}
    record = {"class_path": "RunRecord"}
    callbacks = trainer.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, Mapping | str) else callbacks
    has_checkpoints = any("ModelCheckpoint" in str(callback) for callback in callbacks)
    if has_checkpoints or trainer.get("enable_checkpointing") is False:
        return [record]
    steps = trainer.get("max_steps")
    every = max(1, (steps if isinstance(steps, int) and steps > 0 else 300) // CHECKPOINTS)
    arguments = {"filename": "last", "every_n_train_steps": every, "enable_version_counter": False}
    return [record, {"class_path": "ModelCheckpoint", "init_args": arguments}]


def _shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """A patch for a few steps, and for a tiny model on bytes if model and data are ours."""
    steps = {"max_steps": FAST_STEPS, "val_check_interval": FAST_STEPS, "check_val_every_n_epoch": None}
    patch: dict[str, Any] = {"trainer": {**steps, "limit_val_batches": 1, "log_every_n_steps": 1}}
    if _is_ours(config, "model", "DecoderModule") and _is_ours(config, "data", "TextDataModule"):
        decoder = {"n_layers": 2, "d_model": 16, "context_length": 16}
        patch["model"] = {"init_args": {"decoder": decoder}}
        patch["data"] = {"init_args": {"context_length": 16, "batch_size": 2, "val_batch_size": 2, "tokens": "Bytes"}}
    return patch


def _is_ours(config: Mapping[str, Any], key: str, name: str) -> bool:
    """Whether ``config[key]`` is the class ``name``, which is the default."""
    value = config.get(key) or {}
    return (isinstance(value, Mapping) and "class_path" not in value) or class_name(value) == name
