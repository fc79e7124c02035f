"""Faults, and LightningModules to which they happen at a fixed step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.zoo.kinds import Learner

M = TypeVar("M", bound="Faulty")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong at some steps.

    Attributes:
        first: the step of the first time, counted from 0 in optimizer steps.
        times: how often; None for to the end.
        every: steps from one time to the next.
    """

    first: int
    times: int | None = 1
    every: int = 1

    def is_due(self, step: int) -> bool:
        """Whether it happens at a step."""
        number, rest = divmod(step - self.first, self.every)
        return number >= 0 and rest == 0 and (self.times is None or number < self.times)

    def before_batch(self, module: Any, optimizer: Optimizer) -> None:
        """Spoil weights, moments or the rate between two steps."""

    def spoil_batch(self, batch: Any, step: int) -> Any:
        """Return the batch that is trained on."""
        return batch

    def spoil_loss(self, loss: Tensor) -> Tensor:
        """Return the loss that is trained on."""
        return loss

    def spoil_gradients(self, module: LightningModule) -> None:
        """Spoil gradients after the backward pass."""

    def after_batch(self, module: Any, optimizer: Optimizer) -> None:
        """Take back what lasts for one step only."""


@dataclass(frozen=True, kw_only=True)
class LossTimes(Fault):
    """The loss is multiplied by a number."""

    factor: float

    @override
    def spoil_loss(self, loss: Tensor) -> Tensor:
        return self.factor * loss


@dataclass(frozen=True, kw_only=True)
class WeightsBecome(Fault):
    """One weight of the middle tensor, or every weight of the network, becomes a number."""

    value: float = math.nan
    everywhere: bool = False

    @override
    def before_batch(self, module: Any, optimizer: Optimizer) -> None:
        weights = list(module.parameters())
        with torch.no_grad():
            for weight in weights if self.everywhere else [_middle(weights)]:
                (weight if self.everywhere else weight.view(-1)[:1]).fill_(self.value)


@dataclass(frozen=True, kw_only=True)
class MomentBecomes(Fault):
    """A moment of Adam becomes NaN for the whole middle tensor."""

    moment: str

    @override
    def before_batch(self, module: Any, optimizer: Optimizer) -> None:
        state = optimizer.state[_middle(list(module.parameters()))]
        if self.moment in state:  # a restart leaves Adam without moments
            state[self.moment].fill_(math.nan)


@dataclass(frozen=True, kw_only=True)
class RateBecomes(Fault):
    """The learning rate in the optimizer becomes a number, for one step or until somebody else sets it."""

    rate: float
    stays: bool = False

    @override
    def before_batch(self, module: Any, optimizer: Optimizer) -> None:
        module.planned_rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = self.rate

    @override
    def after_batch(self, module: Any, optimizer: Optimizer) -> None:
        for group, planned in zip(optimizer.param_groups, module.planned_rates, strict=True):
            if not self.stays and group["lr"] == self.rate:  # else somebody has set it
                group["lr"] = planned


@dataclass(frozen=True, kw_only=True)
class GradientBecomes(Fault):
    """The first entry of the gradient of the last matrix becomes a number."""

    value: float

    @override
    def spoil_gradients(self, module: LightningModule) -> None:
        matrix = [weight for weight in module.parameters() if weight.dim() > 1][-1]
        if matrix.grad is not None:
            matrix.grad.view(-1)[0] = self.value


@dataclass(frozen=True, kw_only=True)
class GradientsTimes(Fault):
    """All gradients are multiplied by a number; a negative one makes the step go up."""

    factor: float

    @override
    def spoil_gradients(self, module: LightningModule) -> None:
        for weight in module.parameters():
            if weight.grad is not None:
                weight.grad.mul_(self.factor)


@dataclass(frozen=True, kw_only=True)
class RandomTokens(Fault):
    """The batch is replaced by random symbols."""

    symbols: int = 32

    @override
    def spoil_batch(self, batch: Any, step: int) -> Any:
        return torch.randint(self.symbols, batch.shape, generator=torch.Generator().manual_seed(step))


def _middle(weights: Sequence[Tensor]) -> Tensor:
    return weights[len(weights) // 2]


class Faulty(LightningModule):
    """Mixin: faults happen to the run."""

    faults: tuple[Fault, ...] = ()
    _due: tuple[Fault, ...] = ()
    planned_rates: Sequence[float] = ()

    def after(self: M, *faults: Fault) -> M:
        """The same module, to which these faults will happen."""
        self.faults = faults
        return self

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._due = tuple(fault for fault in self.faults if fault.is_due(self.global_step))
        for fault in self._due:
            fault.before_batch(self, self.trainer.optimizers[0])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for fault in self._due:
            batch = fault.spoil_batch(batch, self.global_step)
        loss: Any = super().training_step(batch, batch_idx)  # a tensor
        for fault in self._due:
            loss = fault.spoil_loss(loss)
        return loss

    @override
    def on_after_backward(self) -> None:
        for fault in self._due:
            fault.spoil_gradients(self)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for fault in self._due:
            fault.after_batch(self, self.trainer.optimizers[0])


class FaultyLearner(Faulty, Learner):
    """A learner of the zoo to which faults happen."""
