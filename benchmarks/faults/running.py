"""One run: a row, a column, a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.faults.columns import BY_NAME, NONE
from benchmarks.faults.goals import Ending
from benchmarks.faults.rows import Row
from benchmarks.zoo.running import quiet, run


def fit(row: Row, column: str, seed: int, *, twin: bool = False) -> Ending:
    """Run a row under a column's protection, or its twin without any."""
    guard = BY_NAME[NONE if twin else column].make()
    kind = row.twin if twin else row.kind
    options = kind.trainer
    guarded = dataclasses.replace(kind, trainer=lambda: {**options(), **guard.trainer})
    done = run(guarded, seed, row.steps, guard.callbacks)
    optimizers = done.module.trainer.optimizers
    with quiet():
        loss = row.yardstick(kind, seed, done)
    return Ending(
        loss=loss,
        first=fmean(done.losses[:3]) if done.losses else math.nan,
        before=fmean(done.losses[row.at - 10 : row.at]) if row.at else None,
        finite=all(bool(tensor.isfinite().all()) for tensor in _tensors(done.module, optimizers)),
        error=done.error,
        flagged=done.error is not None or guard.flagged(),
        lost=row.steps - max((_updates(optimizer) for optimizer in optimizers), default=0),
        counts=guard.counts(),
        seconds=round(done.seconds, 2),
    )


def _tensors(module: torch.nn.Module, optimizers: list[Optimizer]) -> Iterator[Tensor]:
    """Weights, buffers and everything that the optimizers keep; a causal mask is -inf by design."""
    yield from module.parameters()
    yield from (buffer for name, buffer in module.named_buffers() if buffer.is_floating_point() and "mask" not in name)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.is_floating_point())


def _updates(optimizer: Optimizer) -> int:
    """How many updates are in the weights, by the optimizer's own counter."""
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


def to_plain(ending: Ending) -> dict[str, Any]:
    """For JSON, where a number that is not finite is None."""
    plain = dataclasses.asdict(ending)
    return plain | {key: None for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)}


def from_plain(plain: dict[str, Any]) -> Ending:
    """The other way round; keys of the record that are no part of the ending are left out."""
    names = {field.name for field in dataclasses.fields(Ending)}
    values = {key: value for key, value in plain.items() if key in names}
    return Ending(**{**values, **{key: math.nan for key in ("loss", "first") if values[key] is None}})
