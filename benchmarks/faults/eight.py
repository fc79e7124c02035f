"""Eight faults of the project in examples/existing_project_before.py.

It learns x -> (5x + 3) mod 32 with four post-norm layers at 1e-3. The loss is 0.5 at step 60, where the fault comes,
and 0.1 at step 160, the last one. The silent stall is the example as it is: 18 layers at 3e-3, a learning rate at which
it never learns; 250 steps. A run has survived if it reached its last step by itself, finite, with a loss below 1.0
(guessing is 3.47).
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.faults.faulty import Fault, Faulty, GradientBecomes, LossTimes, RandomTokens
from benchmarks.faults.goals import Below
from benchmarks.faults.rows import Row
from benchmarks.faults.yardsticks import last_training_losses
from benchmarks.zoo.kinds import Kind

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "existing_project_before.py"))
AT, STEPS, STALL_STEPS = 60, 160, 250


class Encoder(Faulty, EXAMPLE["Encoder"]):  # type: ignore[misc, valid-type]
    """Somebody's encoder, to which one thing happens.

    Args:
        layers: how many.
        rate: of Adam.
        factors: of the schedule, by step; 1 elsewhere, and the last one for ever.
    """

    def __init__(self, layers: int = 4, rate: float = 1e-3, factors: Any = None) -> None:
        super().__init__(layers=layers)
        self.rate, self.factors = rate, factors

    @override
    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = Adam(self.parameters(), lr=self.rate)
        if self.factors is None:
            return optimizer
        schedule = {"scheduler": LambdaLR(optimizer, self.factors), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def sequences(seed: int, *, layers: int, steps: int) -> DataLoader[Any]:
    """The example's data, drawn after its weights as in a plain script."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Encoder(layers)
        return DataLoader(EXAMPLE["sequences"](count=8 * steps), batch_size=8)


def ten_times_once(step: int) -> float:
    """A schedule that is wrong for one step."""
    return 10.0 if step == AT else 1.0


def thirty_times(step: int) -> float:
    """A schedule that is wrong from one step on."""
    return 30.0 if step >= AT else 1.0


def _kind(
    name: str, *faults: Fault, layers: int = 4, rate: float = 1e-3, steps: int = STEPS, factors: Any = None
) -> Kind:
    def build() -> Encoder:
        return Encoder(layers, rate, factors).after(*faults)

    return Kind(name, build, lambda seed: sequences(seed, layers=layers, steps=steps))


def _row(kind: Kind, steps: int = STEPS) -> Row:
    return Row(
        name=kind.name, group="eight", kind=kind, twin=_kind("none"), steps=steps, seeds=3, goal=Below(1.0),
        yardstick=last_training_losses, at=AT,
    )  # fmt: skip


ROWS = (
    _row(_kind("none")),
    _row(_kind("3x loss, one batch", LossTimes(first=AT, factor=3.0))),
    _row(_kind("NaN loss once", LossTimes(first=AT, factor=math.nan))),
    _row(_kind("Inf gradient once", GradientBecomes(first=AT, value=math.inf))),
    _row(_kind("5 poisoned batches", RandomTokens(first=AT, times=5))),
    _row(_kind("10x learning rate, one step", factors=ten_times_once)),
    _row(_kind("30x learning rate from then on", factors=thirty_times)),
    _row(_kind("silent stall", layers=18, rate=3e-3, steps=STALL_STEPS), STALL_STEPS),
)
