"""The loss at the end of a run, by which it is compared with its twin."""

from __future__ import annotations

import math
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch

from benchmarks.zoo.kinds import Kind
from benchmarks.zoo.running import Run

FRESH = 1000
"""Added to the seed for data that the run has not seen."""
BATCHES, LAST = 40, 10


def held_out(kind: Kind, seed: int, run: Run) -> float:
    """Mean loss in evaluation mode on batches of another seed, from where the run ended; or the kind's own measure."""
    module: Any = run.module.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if hasattr(module, "measure"):
            return float(module.measure()[0])
        loader = kind.data(seed + FRESH)
        start = max(0, len(run.losses) - BATCHES) % len(loader)
        batches = islice(cycle(loader), start, start + BATCHES)
        losses = [float(module.loss(module.outputs(batch), batch)) for batch in batches]
    return fmean(losses)


def last_training_losses(kind: Kind, seed: int, run: Run) -> float:  # noqa: ARG001 - as every yardstick
    """Mean training loss of the last ten steps; NaN where weights are not finite."""
    return fmean(run.losses[-LAST:]) if run.finite and run.losses else math.nan
