"""Fourteen faults that pass and two that stay, on an MLP and on a Transformer of twelve blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from benchmarks.faults.faulty import (
    Fault,
    FaultyLearner,
    GradientBecomes,
    GradientsTimes,
    LossTimes,
    MomentBecomes,
    RateBecomes,
    WeightsBecome,
)
from benchmarks.faults.goals import Flagged, Goal, Near
from benchmarks.faults.rows import Row
from benchmarks.faults.yardsticks import held_out
from benchmarks.zoo.dense import points
from benchmarks.zoo.kinds import Kind, adam
from benchmarks.zoo.language import few_sentences
from benchmarks.zoo.losses import classes
from benchmarks.zoo.nets import Transformer, mlp

SEEDS = 5


@dataclass(frozen=True)
class Setting:
    """A healthy run, and the step at which things happen to it."""

    name: str
    network: Callable[[], nn.Module]
    data: Callable[[int], Any]
    rate: float
    at: int
    steps: int

    def kind(self, *faults: Fault) -> Kind:
        """The run with faults."""

        def build() -> FaultyLearner:
            return FaultyLearner(self.network(), classes, adam(self.rate)).after(
                *(replace(fault, first=fault.first + self.at) for fault in faults)
            )

        return Kind(self.name, build, self.data)

    def row(self, group: str, name: str, goal: Goal, *faults: Fault) -> Row:
        """A row of the benchmark."""
        return Row(
            name=f"{name}, {self.name}", group=group, kind=self.kind(*faults), twin=self.kind(), steps=self.steps,
            seeds=SEEDS, goal=goal, yardstick=held_out, at=self.at,
        )  # fmt: skip


SETTINGS = (
    Setting("MLP", lambda: mlp(16, 256, 128, 10), points, 1e-3, 60, 150),
    Setting("Transformer 12", lambda: Transformer(12), few_sentences, 2e-3, 90, 240),
)
TRANSIENT: dict[str, Fault] = {
    "NaN loss": LossTimes(first=0, factor=math.nan),
    "Inf loss": LossTimes(first=0, factor=math.inf),
    "loss x1e10": LossTimes(first=0, factor=1e10),
    "NaN in one weight": WeightsBecome(first=0),
    "NaN in all weights": WeightsBecome(first=0, everywhere=True),
    "NaN in a first moment": MomentBecomes(first=0, moment="exp_avg"),
    "NaN in a second moment": MomentBecomes(first=0, moment="exp_avg_sq"),
    "rate 1e6 for one step": RateBecomes(first=0, rate=1e6),
    "rate 1e6, not set back": RateBecomes(first=0, rate=1e6, stays=True),
    "Inf gradient": GradientBecomes(first=0, value=math.inf),
    "NaN gradient": GradientBecomes(first=0, value=math.nan),
    "gradients x-1e4": GradientsTimes(first=0, factor=-1e4),
    "NaN loss, 5 in a row": LossTimes(first=0, factor=math.nan, times=5),
    "loss x1e10, 3 times": LossTimes(first=0, factor=1e10, times=3, every=20),
}
PERSISTENT: dict[str, tuple[Goal, Fault]] = {
    "NaN loss for ever": (Flagged(), LossTimes(first=0, factor=math.nan, times=None)),
    "loss x1e15 in every 10th step": (Near(), LossTimes(first=0, factor=1e15, times=None, every=10)),
}
ROWS = (
    *(setting.row("transient", name, Near(), fault) for setting in SETTINGS for name, fault in TRANSIENT.items()),
    *(setting.row("persistent", name, *case) for setting in SETTINGS for name, case in PERSISTENT.items()),
)
