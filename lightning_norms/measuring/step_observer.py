"""One optimizer step in numbers, before it is taken: the loss, the gradient by depth, what is not finite.

One small collective and one copy to the host a step: to skip is decided on the host, and that read is its price.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.sharding import grad_scaler, pending_scale, sum_over_ranks
from lightning_norms.measuring.norms_by_group import GroupNorms, leave_float32, total_norm
from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.trained_parameters import TrainedParameters


class StepObserver:
    """Keeps the losses of an accumulation window on the device, and reads everything once a step.

    Args:
        module: the module whose depths are observed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._depth = DepthMap.of(module)
        self._trained = TrainedParameters(module, self._depth)
        self._losses: list[Tensor] = []
        self._norms: GroupNorms | None = None
        self._places: tuple[list[int], ...] = ()  # places of each stack's blocks among the groups of the norms

    @property
    def has_depths(self) -> bool:
        """Whether blocks were found, so that a stall can be seen."""
        return bool(self._depth.stacks)

    @property
    def is_within_window(self) -> bool:
        """Whether the first micro-batch of an accumulation window is over, so that a loss waits for its step."""
        return bool(self._losses)

    def add_loss(self, trainer: Any, loss: Tensor, automatic: bool) -> None:
        """Take in a loss as ``on_before_backward`` gives it: divided by the window, times the AMP scale."""
        value = loss.detach().float()
        if automatic:
            value = value * trainer.accumulate_grad_batches
        scaler = grad_scaler(trainer)
        if scaler is not None and scaler._scale is not None:
            value = value / scaler._scale
        self._losses.append(value)

    @torch.no_grad()
    def observe(self, trainer: Any, optimizer: Optimizer) -> Observation:
        """Return the observation of the step that ``optimizer`` is about to take; the same on every rank."""
        before, norms = self._norms, self._norms_of(trainer, optimizer)
        squares = norms.shares(norms.gradients())
        losses, squares = _of_all_ranks(self._loss_sums(squares.device), squares, norms, trainer)
        gradients = squares.sqrt()
        scale = pending_scale(trainer, optimizer)
        if scale is not None:
            gradients = gradients / scale.to(gradients)
        # One tensor, one copy: [sum of finite losses, their number, the number of others, total, norms by group]
        sum_, count, bad, total, *by_group = torch.cat([losses, total_norm(gradients).reshape(1), gradients]).tolist()
        if leave_float32(total):  # no gradient at all, or one that is infinite, or only its square is: rare
            squares = norms.wide_shares(norms.gradients())
            _, squares = _of_all_ranks(torch.zeros_like(losses), squares, norms, trainer)
            by_group = [norm / (1.0 if scale is None else float(scale)) for norm in squares.sqrt().tolist()]
            total = math.hypot(*by_group)
        stacks = tuple(tuple(by_group[place] for place in places) for places in self._places)
        bad += sum(not math.isfinite(norm) for norm in by_group)
        has_changed = before is not None and norms is not before
        return Observation(sum_ / count if count else None, total, int(bad), stacks, parameters_changed=has_changed)

    def _loss_sums(self, device: torch.device) -> Tensor:
        losses, self._losses = self._losses, []
        if not losses:
            return torch.zeros(3, device=device)
        values = torch.stack([loss.to(device) for loss in losses])
        finite = values.isfinite().sum()
        # A NaN must not erase the others' sum, and every rank must come to the same numbers.
        return torch.stack([values.nan_to_num(0.0, 0.0, 0.0).sum(), finite, len(values) - finite])

    def _norms_of(self, trainer: Any, optimizer: Optimizer) -> GroupNorms:
        """The optimizer's trainable parameters by group."""
        norms = self._trained.norms(optimizer, trainer.strategy.model)
        if norms is not self._norms:
            self._norms = norms
            place = {group: at for at, group in enumerate(norms.groups)}
            blocks = (stack.groups for stack in self._depth.stacks)
            self._places = tuple([place[name] for name in names if name in place] for names in blocks)
        return norms


def _of_all_ranks(losses: Tensor, squares: Tensor, norms: GroupNorms, trainer: Any) -> list[Tensor]:
    """Sums of the losses, and squared norms of the whole gradient, alike on all ranks: in one collective."""
    if not norms.is_sharded and trainer.world_size == 1:
        return [losses, squares]
    losses, squares = sum_over_ranks([losses, squares], trainer.strategy)
    # Whole gradients are alike on all ranks, unless a hook or a device spoils them behind the reduction.
    return [losses, squares if norms.is_sharded else squares / trainer.world_size]
