"""Healthy runs whose data or loss changes on the way: domains, curricula, weights, short batches, growing gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.zoo.kinds import Kind, Learner, adam, generator, in_order, slices
from benchmarks.zoo.losses import classes, squares
from benchmarks.zoo.nets import Transformer, mlp
from benchmarks.zoo.tasks import chain, labels, teacher

MULTIPLIERS = (5, 9, 13, 17, 21, 25)


def domains(count: int, steps: int = 150) -> Any:
    """Languages with rules of their own, each for some steps, in turn."""

    def data(seed: int) -> Any:
        batches = []
        for number in range(count):
            step = (MULTIPLIERS[number], 2 * number + 3)
            batches += slices(*chain(seed + number, count=16 * steps, step=step, noise=0.05))
        return in_order(batches)

    return data


def curriculum(seed: int) -> Any:
    """Lengths of 2, 4, 8 and 16 tokens, and more noise at every stage."""
    batches: list[Any] = []
    for stage, length in enumerate((2, 4, 8, 16)):
        inputs, targets = chain(seed + stage, noise=0.1 * stage, count=16 * 125)
        batches += slices(inputs[:, :length].contiguous(), targets[:, :length].contiguous())
    return in_order(batches)


def regressions_in_turn(seed: int) -> Any:
    """Another teacher every 100 steps, as when the distribution drifts."""
    parts = [slices(*teacher(seed + n, count=3200, task=n), batch=32) for n in range(4)]
    return in_order([batch for part in parts for batch in part])


class TwoTasks(Learner):
    """Classes and the mean of the inputs; the second task weighs five times as much from step 200."""

    @override
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        weight = 5.0 if self.global_step >= 200 else 1.0
        target = batch[0][:, :2].prod(1)
        return classes(outputs[:, :-1], batch) + weight * F.mse_loss(outputs[:, -1], target)


class LouderFrom(nn.Module):
    """Identity whose gradient is larger by a factor that the owner sets."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor - (x * (self.factor - 1)).detach()


class LouderGradients(Learner):
    """From step 200 to 220 the gradient grows twelvefold and stays there; the loss does not know."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.network[-1].factor = 1 + 11 * min(1.0, max(0.0, (self.global_step - 200) / 20))


def louder() -> nn.Sequential:
    """A classifier under that identity."""
    return nn.Sequential(*mlp(16, 32, 32, 10), LouderFrom())


class ShortLast(Learner):
    """The last batch of an epoch is short and hard: its loss is half as large again."""

    @override
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self.criterion(outputs, batch) * (1.5 if len(batch[0]) < 16 else 1.0)


def epochs_of(steps: int) -> Any:
    """Epochs of so many steps, the last of them with five samples."""

    def data(seed: int) -> Any:
        x, y = labels(seed, count=16 * steps)
        return in_order(slices(x[: 16 * steps - 11], y[: 16 * steps - 11]))

    return data


def rare_classes(seed: int) -> Any:
    """One batch in twelve holds only two classes that no other batch holds."""
    x, y = labels(seed)
    rare = y >= 8
    common = slices(x[~rare][: 16 * 180], y[~rare][: 16 * 180])
    seldom = slices(x[rare][: 16 * 15], y[rare][: 16 * 15])
    return in_order([seldom[n // 12] if n % 12 == 11 else common[n % 180] for n in range(180)])


def growing_noise(seed: int) -> Any:
    """The noise of the targets grows from 0 to 1 over 500 steps."""
    x, y = teacher(seed, count=16000)
    share = torch.linspace(0, 1, len(y)).unsqueeze(1)
    return in_order(slices(x, y + share * torch.randn(y.shape, generator=generator(seed + 1)), batch=32))


def decoder() -> Transformer:
    """Two pre-norm blocks."""
    return Transformer(2)


def short(steps: int) -> Kind:
    """The kind with a short last batch in epochs of so many steps."""
    return Kind(
        f"short last batch, epochs of {steps}",
        lambda: ShortLast(mlp(16, 32, 32, 10), classes, adam(2e-3)),
        epochs_of(steps),
        tag="periodic loss x1.5",
    )


KINDS = (
    Kind("four domains in turn", lambda: Learner(decoder(), classes, adam(2e-3)), domains(4), tag="data changes"),
    Kind("six domains in turn", lambda: Learner(decoder(), classes, adam(2e-3)), domains(6, 100), tag="data changes"),
    Kind("curriculum", lambda: Learner(decoder(), classes, adam(2e-3)), curriculum, tag="data changes"),
    Kind(
        "drifting regression",
        lambda: Learner(mlp(8, 32, 32, 1), squares, adam(3e-3)),
        regressions_in_turn,
        tag="data changes",
    ),
    Kind("growing noise", lambda: Learner(mlp(8, 32, 32, 1), squares, adam(3e-3)), growing_noise, tag="loss rises"),
    Kind(
        "task weight x5 at step 200",
        lambda: TwoTasks(mlp(16, 32, 32, 11), classes, adam(2e-3)),
        lambda seed: in_order(slices(*labels(seed))),
        tag="loss changes",
    ),
    Kind(
        "gradients x12 from step 200",
        lambda: LouderGradients(louder(), classes, adam(2e-3)),
        lambda seed: in_order(slices(*labels(seed))),
        tag="gradients change",
    ),
    Kind(
        "rare classes in one batch of twelve",
        lambda: Learner(mlp(16, 32, 32, 10), classes, adam(2e-3)),
        rare_classes,
        tag="periodic loss",
    ),
    *(short(steps) for steps in (17, 20, 30, 50)),
)
