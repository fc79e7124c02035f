"""Norms, update ratios and the stream of one optimizer step: measured on the device, copied to the host once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_norms.anatomy.sharding import sum_over_ranks, to_local
from lightning_norms.measuring.norms_by_group import GroupNorms, total_norm, update_ratio
from lightning_norms.measuring.stream import StreamMeter
from lightning_norms.metrics import GRAD_NORM, STREAM_RMS, UPDATE_RATIO, Key


@dataclass(kw_only=True)
class MeasuredStep:
    """Measurements of one optimizer step before they are summed over ranks.

    Args:
        norms: what measures the optimizer's parameters.
        prefix: put before each group in the logged keys, to tell optimizers apart.
        count: optimizer steps before this one.
        scale: loss scale that the gradients still contain; None if they are unscaled.
        with_update: whether to keep a copy of the weights until :meth:`finish`.
    """

    norms: GroupNorms
    prefix: str
    count: int
    scale: Tensor | None
    with_update: bool
    shares: list[Tensor] = field(init=False)
    """This rank's squared norms by group: gradients and, after the step, weights and updates."""

    def __post_init__(self) -> None:
        parameters = self.norms.parameters if self.with_update else []
        self._before = [to_local(parameter.detach()).clone() for parameter in parameters]
        self.shares = [self.norms.shares(self.norms.gradients())]
        if self.scale is not None:
            self.scale = self.scale.clone()  # the scaler changes it in place before this is read

    def finish(self) -> None:
        """After the optimizer's step: measure what it changed, and the weights before it."""
        if self._before:
            weights = self.norms.shares(self._before)
            torch._foreach_sub_(self._before, [to_local(parameter.detach()) for parameter in self.norms.parameters])
            self.shares += [weights, self.norms.shares(self._before)]
            self._before = []

    @property
    def groups(self) -> list[str]:
        """Names of the entries of a row of :meth:`results`."""
        return [self.prefix + group for group in (*self.norms.groups, "total")]

    def results(self, squares: Sequence[Tensor]) -> dict[Key, Tensor]:
        """Norms and ratios by group and in total, from the ``shares`` of all ranks."""
        gradients, *changes = [_with_total(square.sqrt()) for square in squares]
        rows = {GRAD_NORM: gradients if self.scale is None else gradients / self.scale.to(gradients)}
        if changes:
            weights, updates = changes
            rows[UPDATE_RATIO] = update_ratio(updates, weights)
        return rows


def read_steps(steps: Sequence[MeasuredStep], meter: StreamMeter | None, trainer: Any) -> dict[str, float]:
    """All measurements by logged key, the same on every rank: at most one collective, and one copy to the host."""
    squares, streams = _sum_over_ranks(steps, meter, trainer)
    keys, rows = [], []
    for step, whole in zip(steps, squares, strict=True):
        for key, row in step.results(whole).items():
            keys += [key.of(group) for group in step.groups]
            rows.append(row)
    if meter is not None and streams is not None:
        keys += [STREAM_RMS.of(group) for group in meter.groups]
        rows.append(meter.rms(streams))
    numbers = torch.cat([row.to(rows[0].device) for row in rows]).tolist()
    return {key: number for key, number in zip(keys, numbers, strict=True) if number != StreamMeter.DID_NOT_RUN}


def _sum_over_ranks(
    steps: Sequence[MeasuredStep], meter: StreamMeter | None, trainer: Any
) -> tuple[list[list[Tensor]], Tensor | None]:
    """The squares of every step, and the stream."""
    squares = [step.shares for step in steps]
    device = squares[0][0].device
    streams = None if meter is None else meter.take(device)
    sharded = [number for number, step in enumerate(steps) if step.norms.is_sharded]
    parts = [share.to(device) for number in sharded for share in squares[number]]
    if streams is not None and streams.numel() and trainer.world_size > 1:
        parts.append(streams)
    whole = iter(sum_over_ranks(parts, trainer.strategy) if parts else ())
    for number in sharded:
        squares[number] = [next(whole) for _ in squares[number]]
    return squares, next(whole, streams)


def _with_total(norms: Tensor) -> Tensor:
    return torch.cat([norms, total_norm(norms).reshape(1)])
