"""Healthy networks of dense layers: regressions and classifiers, with the losses that people give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.zoo.kinds import Kind, Learner, adam, generator, in_order, loader
from benchmarks.zoo.losses import (
    Affine,
    Weighted,
    bits,
    classes,
    gaussian,
    squares,
    squares_summed,
)
from benchmarks.zoo.nets import mlp
from benchmarks.zoo.tasks import labels, noisy_teacher


def table(seed: int) -> Any:
    """Batches of a noisy regression."""
    return loader(*noisy_teacher(seed), seed=seed, batch=32)


def small_batches(size: int) -> Any:
    """Batches of one or two samples."""
    return lambda seed: loader(*noisy_teacher(seed, count=2000), seed=seed, batch=size)


def heavy_tails(seed: int) -> Any:
    """Targets with Student noise of two degrees of freedom."""
    x, y = noisy_teacher(seed, noise=0.0)
    rng = generator(seed + 2)
    noise = torch.randn(y.shape, generator=rng)
    chi_square = torch.randn(*y.shape, 2, generator=rng).square().sum(-1)
    return loader(x, y + 0.5 * noise / (chi_square / 2).sqrt(), seed=seed, batch=32)


def points(seed: int) -> Any:
    """Batches of labelled points."""
    return loader(*labels(seed), seed=seed)


def many_labels(seed: int) -> Any:
    """Six independent yes-or-no labels."""
    x, y = noisy_teacher(seed, outputs=6)
    return loader(x, (y > 0.5).float(), seed=seed)


class Diffusion(nn.Module):
    """Predicts the noise in a point on a ring from the noisy point and the noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(3, 32, 32, 2, activation=nn.SiLU)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        noise: Tensor = self.network(inputs)
        return noise


def noisy_ring(seed: int) -> Any:
    """Points on a ring under noise of random level, and that noise."""
    rng = generator(seed)
    angle = 6.28 * torch.rand(8000, generator=rng)
    level = torch.rand(8000, 1, generator=rng)
    noise = torch.randn(8000, 2, generator=rng)
    mixed = (1 - level**2).sqrt() * torch.stack([angle.cos(), angle.sin()], 1) + level * noise
    return loader(torch.cat([mixed, level], 1), noise, seed=seed, batch=32)


class Physics(Learner):
    """u'' = -u on [0, 3] with u(0) = 0, u'(0) = 1: the loss is the residual of the equation, so backward is double."""

    @override
    def outputs(self, batch: Any) -> Any:
        with torch.enable_grad():
            t = batch[0].clone().requires_grad_()
            value = self.network(t)
            speed = torch.autograd.grad(value.sum(), t, create_graph=True)[0]
            force = torch.autograd.grad(speed.sum(), t, create_graph=True)[0]
            start = torch.zeros(1, 1, requires_grad=True)
            origin = self.network(start)
            initial = torch.autograd.grad(origin.sum(), start, create_graph=True)[0]
        return value, force, origin, initial

    @override
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        value, force, origin, initial = outputs
        return (value + force).square().mean() + origin.square().mean() + (initial - 1).square().mean()

    def measure(self) -> tuple[float, float]:
        """Mean squared residual and start error, and that of u = 0."""
        batch = (torch.linspace(0, 3, 50).unsqueeze(1),)
        return float(self.loss(self.outputs(batch), batch).detach()), 1.0


def times(seed: int) -> Any:
    """Random times."""
    rng = generator(seed)
    return in_order([(3 * torch.rand(32, 1, generator=rng),) for _ in range(250)])


class Smooth(Learner):
    """A classifier with a penalty on the gradient of its logits at the inputs."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        outputs = self.network(x)
        slope = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)[0]
        loss = self.loss(outputs, batch) + 1e-3 * slope.square().sum(-1).mean()
        self.log("train_loss", loss, batch_size=1)
        return loss


def robust(outputs: Tensor, batch: Any) -> Tensor:
    """Huber loss."""
    return F.smooth_l1_loss(outputs, batch[1])


def regressor() -> nn.Sequential:
    """Eight numbers to one."""
    return mlp(8, 32, 32, 1)


def classifier() -> nn.Sequential:
    """Sixteen numbers to ten classes."""
    return mlp(16, 32, 32, 10)


KINDS = (
    Kind("MLP regression", lambda: Learner(regressor(), squares, adam(3e-3)), table),
    Kind("regression, batch 1", lambda: Learner(regressor(), squares, adam(3e-3)), small_batches(1), tag="noise"),
    Kind("regression, batch 2", lambda: Learner(regressor(), squares, adam(3e-3)), small_batches(2), tag="noise"),
    Kind("regression, heavy tails", lambda: Learner(regressor(), squares, adam(3e-3)), heavy_tails, tag="noise"),
    Kind("regression, heavy tails, Huber", lambda: Learner(regressor(), robust, adam(3e-3)), heavy_tails, tag="noise"),
    Kind("regression, summed", lambda: Learner(regressor(), squares_summed, adam(3e-3)), table, tag="sum"),
    Kind(
        "regression, log-likelihood",
        lambda: Learner(mlp(8, 32, 32, 2), gaussian, adam(3e-3)),
        lambda seed: loader(*noisy_teacher(seed, noise=0.05), seed=seed, batch=32),
        tag="loss below 0",
    ),
    Kind("MLP classes", lambda: Learner(classifier(), classes, adam(2e-3)), points),
    Kind("MLP, class weights", lambda: Learner(classifier(), Weighted(10), adam(2e-3)), points, tag="weighted"),
    Kind("MLP, loss x0.1", lambda: Learner(classifier(), Affine(classes, 0.1), adam(2e-3)), points, tag="scaled"),
    Kind(
        "MLP, loss - 5",
        lambda: Learner(classifier(), Affine(classes, 1.0, -5.0), adam(2e-3)),
        points,
        tag="loss below 0",
    ),
    Kind("MLP, many labels", lambda: Learner(mlp(8, 32, 32, 6), bits, adam(3e-3)), many_labels),
    Kind(
        "MLP, gradient penalty",
        lambda: Smooth(mlp(16, 32, 32, 10, activation=nn.Tanh), classes, adam(3e-3)),
        points,
        tag="double backward",
    ),
    Kind(
        "physics-informed",
        lambda: Physics(mlp(1, 24, 24, 1, activation=nn.Tanh), squares, adam(3e-3)),
        times,
        tag="double backward",
    ),
    Kind("diffusion", lambda: Learner(Diffusion(), squares, adam(3e-3)), noisy_ring, tag="noise"),
)
