"""What a kind of run is, the LightningModule that most kinds share, and how their data is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

TRAINS, DEAD = "trains", "dead"
TEACHER = 1234
"""Seed of what the data of every seed has in common: transition tables, teacher networks, class centres."""

Loss = Callable[[Any, Any], Tensor]
"""(outputs, batch) -> a scalar."""


ADAM = partial(Adam, lr=1e-3)


@dataclass(frozen=True)
class Kind:
    """One kind of run: how to build it, and how it ends.

    Attributes:
        name: plain words, unique in the zoo.
        module: builds the LightningModule; the seed is set by :meth:`build`.
        data: builds the training loader for a seed. Seeds differ in samples, not in the task.
        outcome: how a real run of some 600 steps ends: ``"trains"`` or ``"dead"`` (no better than a constant).
        tag: what makes the kind special.
        trainer: arguments of Trainer, made anew for every fit because they may hold callbacks and plugins.
    """

    name: str
    module: Callable[[], LightningModule]
    data: Callable[[int], DataLoader[Any]]
    outcome: str = TRAINS
    tag: str = ""
    trainer: Callable[[], dict[str, Any]] = dict

    def build(self, seed: int) -> tuple[LightningModule, DataLoader[Any]]:
        """Module and training data of a seed; the global random numbers stay where they are."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.module()
        return module, self.data(seed)


class Learner(LightningModule):
    """A network, a loss of its outputs and the batch, and an optimizer.

    Args:
        network: called with the first item of the batch.
        criterion: (outputs, batch) -> loss.
        optimizer: builds the optimizer from the trainable parameters.
        schedule: builds a scheduler from the optimizer; it is stepped at every step.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Loss,
        optimizer: Callable[..., Optimizer] = ADAM,
        schedule: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.network, self.criterion = network, criterion
        self.make_optimizer, self.make_schedule = optimizer, schedule

    def outputs(self, batch: Any) -> Any:
        """What the loss is computed from: a tensor or a tuple of tensors."""
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The training loss; kinds whose loss depends on the step override it."""
        return self.criterion(outputs, batch)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.outputs(batch), batch)
        self.log("train_loss", loss, batch_size=1)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer([weight for weight in self.parameters() if weight.requires_grad])
        if self.make_schedule is None:
            return optimizer
        schedule = {"scheduler": self.make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@dataclass(frozen=True)
class Jump:
    """Factor on the learning rate: 1, and ``factor`` from ``step`` on."""

    factor: float
    step: int = 150

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return self.factor if step >= self.step else 1.0


def adam(rate: float, **options: Any) -> Callable[..., Optimizer]:
    """Adam at a learning rate, still to be given its parameters."""
    return partial(Adam, lr=rate, **options)


def generator(seed: int) -> torch.Generator:
    """A random number generator of its own."""
    return torch.Generator().manual_seed(seed)


def loader(*tensors: Tensor, seed: int, batch: int = 16, drop_last: bool = True) -> DataLoader[Any]:
    """Shuffled batches of samples, in an order that the seed fixes."""
    return DataLoader(
        TensorDataset(*tensors), batch, shuffle=True, drop_last=drop_last, generator=generator(seed + TEACHER)
    )


def in_order(batches: Sequence[Any]) -> DataLoader[Any]:
    """Batches that are ready, as they stand."""
    return DataLoader(list(batches), batch_size=None)


def slices(*tensors: Tensor, batch: int = 16) -> list[tuple[Tensor, ...]]:
    """Samples cut into batches, for loaders that change some of them."""
    return list(zip(*(tensor.split(batch) for tensor in tensors), strict=True))
