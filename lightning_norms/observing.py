"""One optimizer step in numbers, before it is taken: the loss, the gradient by depth, what is not finite.

One small collective and one copy to the host a step: to skip is decided on the host, and that read is its price.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.depth import DepthMap
from lightning_norms.detection import Observation
from lightning_norms.measure import GroupNorms, sharding_group, total_norm


class StepObserver:
    """Keeps the losses of an accumulation window on the device, and reads everything once a step.

    Args:
        module: whose depths are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._depth = DepthMap.of(module)
        self._losses: list[Tensor] = []
        self._norms: GroupNorms | None = None
        self._known: tuple[int, ...] = ()

    def add_loss(self, trainer: Any, loss: Tensor, automatic: bool) -> None:
        """Take in a loss as ``on_before_backward`` gives it: divided by the window, times the AMP scale."""
        value = loss.detach().float()
        if automatic:
            value = value * trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler._scale is not None:
            value = value / scaler._scale
        self._losses.append(value)

    @torch.no_grad()
    def observe(self, trainer: Any, optimizer: Optimizer) -> Observation:
        """The observation of the step that ``optimizer`` is about to take; the same on every rank."""
        norms = self._norms_of(trainer, optimizer)
        gradients = norms.gradients()
        scale = pending_scale(trainer, optimizer)
        if scale is not None:
            gradients = gradients / scale.to(gradients)
        # One tensor, one copy: [sum of finite losses, their number, the number of others, total, norms by group]
        losses = self._loss_sums(trainer, gradients.device)
        sum_, count, bad, total, *by_group = torch.cat([losses, total_norm(gradients).reshape(1), gradients]).tolist()
        by_name = dict(zip(norms.groups, by_group, strict=True))
        stacks = (tuple(by_name[g] for i, _ in s.blocks if (g := s.group(i)) in by_name) for s in self._depth.stacks)
        bad += sum(1 for norm in by_group if norm != norm or norm in (float("inf"), float("-inf")))
        return Observation(sum_ / count if count else None, total, int(bad), tuple(stacks))

    def _loss_sums(self, trainer: Any, device: torch.device) -> Tensor:
        losses, self._losses = self._losses, []
        sums = torch.zeros(3, device=device)
        if losses:
            values = torch.stack([loss.to(device) for loss in losses])
            finite = values.isfinite()
            # A NaN must not erase the others' sum, and every rank must come to the same numbers.
            sums = torch.stack([values.where(finite, values.new_zeros(())).sum(), finite.sum(), (~finite).sum()])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        return sums

    def _norms_of(self, trainer: Any, optimizer: Optimizer) -> GroupNorms:
        """The optimizer's trainable parameters by group; looked up again when something was frozen or unfrozen."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad and id(p) in owned]
        known = tuple(id(parameter) for _, parameter in named)
        if self._norms is None or known != self._known:
            groups = [self._depth.group_of(name) for name, _ in named]
            self._norms = GroupNorms([p for _, p in named], groups, sharding_group(trainer.strategy.model))
            self._known = known
        return self._norms


def pending_scale(trainer: Any, optimizer: Optimizer) -> Tensor | None:
    """The loss scale that a fused optimizer takes out only inside its step; None when gradients are unscaled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return None
    scale: Tensor | None = scaler._scale
    return scale
