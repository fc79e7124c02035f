"""Norms, update ratios and the stream of one optimizer step: measured on the device, copied to the host once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_norms.anatomy.sharding import sum_over_ranks, to_local
from lightning_norms.measuring.norms_by_group import GroupNorms, total_norm, update_ratio
from lightning_norms.measuring.stream import StreamMeter
from lightning_norms.metrics import GRAD_NORM, STREAM_RMS, UPDATE_RATIO, Key


class MeasuredStep:
    """Measurements of one optimizer step, number ``count``, before they are summed over ranks.

    ``prefix`` stands before each group in the logged keys, to tell optimizers apart; ``scale`` is the loss scale that
    the gradients still contain. ``squares`` are this rank's squared norms [quantities, groups]: gradients and, after
    the step if ``with_update``, weights and updates.
    """

    def __init__(self, norms: GroupNorms, prefix: str, count: int, scale: Tensor | None, with_update: bool) -> None:
        self.norms, self.prefix, self.count = norms, prefix, count
        self.scale = None if scale is None else scale.clone()  # the scaler changes it in place before this is read
        self.squares = norms.shares(norms.gradients()).unsqueeze(0)
        self._before = [to_local(parameter.detach()).clone() for parameter in norms.parameters if with_update]

    def finish(self, is_cancelled: bool = False) -> None:
        """After the optimizer's step: measure the weights before it and what it changed, 0 if it was cancelled."""
        if self._before:
            weights = self.norms.shares(self._before)
            after = [to_local(parameter.detach()) for parameter in self.norms.parameters]
            torch._foreach_sub_(self._before, self._before if is_cancelled else after)
            self.squares = torch.stack([*self.squares, weights, self.norms.shares(self._before)])
            self._before = []

    def results(self) -> dict[Key, Tensor]:
        """Norms and ratios by group and in total, once ``squares`` are those of all ranks."""
        gradients, *changes = [torch.cat([row, total_norm(row).reshape(1)]) for row in self.squares.sqrt()]
        rows = {GRAD_NORM: gradients if self.scale is None else gradients / self.scale.to(gradients)}
        if changes:
            weights, updates = changes
            rows[UPDATE_RATIO] = update_ratio(updates, weights)
        return rows


def read_steps(steps: Sequence[MeasuredStep], meter: StreamMeter | None, trainer: Any) -> dict[str, float]:
    """All measurements by logged key, the same on every rank: at most one collective, and one copy to the host."""
    device = steps[0].squares.device
    streams = _sum_over_ranks(steps, None if meter is None else meter.take(device), trainer)
    keys: list[str] = []
    rows: list[Tensor] = []
    for step in steps:
        for key, row in step.results().items():
            keys += [key.of(step.prefix + group) for group in (*step.norms.groups, "total")]
            rows.append(row.to(device))
    if meter is not None and streams is not None:
        keys += [STREAM_RMS.of(group) for group in meter.groups]
        rows.append(meter.rms(streams))
    numbers = torch.cat(rows).tolist()
    return {key: number for key, number in zip(keys, numbers, strict=True) if number != StreamMeter.DID_NOT_RUN}


def _sum_over_ranks(steps: Sequence[MeasuredStep], streams: Tensor | None, trainer: Any) -> Tensor | None:
    """Replace the squares of every step by those of all ranks, and return such streams."""
    device = steps[0].squares.device
    sharded = [step for step in steps if step.norms.is_sharded]
    parts = [step.squares.to(device) for step in sharded]
    if streams is not None and streams.numel() and trainer.world_size > 1:
        parts.append(streams)
    sums = iter(sum_over_ranks(parts, trainer.strategy) if parts else ())
    for step in sharded:
        step.squares = next(sums)
    return next(sums, streams)
