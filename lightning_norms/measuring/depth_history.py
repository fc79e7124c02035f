"""Measurements of a run at every depth over time: a small table that goes into checkpoints and into pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Profile:
    """One quantity over depth and time, as plain numbers."""

    groups: tuple[str, ...]
    """Lowest depth first."""
    steps: tuple[int, ...]
    """Optimizer steps, rising."""
    values: tuple[tuple[float, ...], ...]
    """[groups][steps]; NaN where a group was not measured at a step."""

    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Rows of the blocks of each stack, lowest first; the key is what stands before ``block_``: ``encoder.``."""
        rows: dict[str, tuple[int, ...]] = {}
        for row, group in enumerate(self.groups):
            label, block, number = group.rpartition("block_")
            if block and number.isdigit():
                rows[label] = (*rows.get(label, ()), row)
        return rows


@dataclass
class DepthHistory:
    """Rows of recorded steps, every second one dropped at ``limit``; columns are keys such as ``grad_norm/head``."""

    limit: int = 1000
    columns: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logged_steps: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    measured: set[str] = field(default_factory=set)
    """Columns that got a value at least once: a NaN there is a finding, elsewhere an absence."""

    def declare(self, keys: Sequence[str]) -> None:
        """Fix the order of columns before there is a value for each, so that a late group stands at its depth."""
        new = [key for key in dict.fromkeys(keys) if key not in self.columns]
        self.columns += new
        for row in self.rows:
            row += [math.nan] * len(new)

    def add(self, step: int, logged_step: int, values: dict[str, float]) -> None:
        """Append one recorded step: ``step`` counts optimizer steps, ``logged_step`` is the loggers' axis."""
        self.declare(list(values))
        self.measured |= values.keys()
        if len(self.rows) >= self.limit:
            self.steps, self.logged_steps, self.rows = self.steps[::2], self.logged_steps[::2], self.rows[::2]
        self.steps.append(step)
        self.logged_steps.append(logged_step)
        self.rows.append([values.get(column, math.nan) for column in self.columns])

    def profile(self, prefix: str) -> Profile:
        """The columns that start with ``prefix``, without ``total`` and without groups that were never measured."""
        columns = {
            key.removeprefix(prefix): i
            for i, key in enumerate(self.columns)
            if key in self.measured and key.startswith(prefix) and not key.endswith("total")
        }
        values = tuple(tuple(row[i] for row in self.rows) for i in columns.values())
        return Profile(tuple(columns), tuple(self.steps), values)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and one tensor [rows, columns]."""
        lists = {name: list(getattr(self, name)) for name in ("columns", "steps", "logged_steps")}
        values = torch.tensor(self.rows, dtype=torch.float64).reshape(len(self.rows), len(self.columns))
        return {**lists, "values": values, "measured": sorted(self.measured)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the history of a :meth:`state_dict`."""
        self.columns, self.steps = list(state["columns"]), list(state["steps"])
        self.logged_steps, self.rows = list(state["logged_steps"]), state["values"].tolist()
        self.measured = set(state["measured"])
