"""Healthy runs without a fixed loss to minimize: adversaries, bootstrapped targets, policies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.zoo.kinds import Kind, Learner, adam, generator, in_order
from benchmarks.zoo.losses import squares
from benchmarks.zoo.nets import mlp


def ring_batches(seed: int) -> Any:
    """Points around (2, -1)."""
    rng = generator(seed)
    centre = torch.tensor([2.0, -1.0])
    return in_order([(centre + 0.5 * torch.randn(32, 2, generator=rng),) for _ in range(500)])


class Adversaries(LightningModule):
    """A GAN in manual optimization: discriminator and generator step one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(4, 32, 2), mlp(2, 32, 1)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real = batch[0]
        fake = self.generator(torch.randn(len(real), 4))
        for_generator, for_discriminator = self.optimizers()
        judge = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        self._step(for_discriminator, judge)
        self._step(for_generator, F.softplus(-self.discriminator(fake)).mean())
        return judge.detach()

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    @override
    def configure_optimizers(self) -> Any:
        options = {"lr": 3e-3, "betas": (0.5, 0.9)}
        return [torch.optim.Adam(part.parameters(), **options) for part in (self.generator, self.discriminator)]

    def measure(self) -> tuple[float, float]:
        """Distance of the mean sample to the data's, and that of zero."""
        centre = torch.tensor([2.0, -1.0])
        with torch.no_grad():
            mean = self.generator(torch.randn(500, 4, generator=generator(0))).mean(0)
        return float((mean - centre).norm()), float(centre.norm())


class Discriminator(Learner):
    """Only the discriminator, in automatic optimization; the generator moves by a step of its own between batches."""

    def __init__(self) -> None:
        super().__init__(mlp(2, 32, 1), squares, adam(3e-3))
        self.register_buffer("centre", torch.tensor([-2.0, 1.0]))

    @override
    def outputs(self, batch: Any) -> Any:
        fake = self.centre + 0.5 * torch.randn_like(batch[0])
        return self.network(batch[0]), self.network(fake)

    @override
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.softplus(-outputs[0]).mean() + F.softplus(outputs[1]).mean()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The generator goes uphill: towards where the discriminator says real."""
        with torch.enable_grad():
            here = self.centre.clone().requires_grad_()
            slope = torch.autograd.grad(self.network(here).sum(), here)[0]
        self.centre += 0.02 * slope

    def measure(self) -> tuple[float, float]:
        """Distance of the generator to the data, and at the start."""
        return float((self.centre - torch.tensor([2.0, -1.0])).norm()), 4.47


class QLearner(Learner):
    """DQN on a walk along ten places: bootstrapped targets from a network that is copied every 25 steps."""

    def __init__(self) -> None:
        super().__init__(mlp(10, 32, 2), squares, adam(3e-3))
        self.target = copy.deepcopy(self.network).requires_grad_(False)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        place, action, reward, following, ends = batch
        if self.global_step % 25 == 0:
            self.target.load_state_dict(self.network.state_dict())
        future = self.target(F.one_hot(following, 10).float()).max(-1).values
        value = self.network(F.one_hot(place, 10).float()).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(value, reward + 0.9 * future * (~ends))
        self.log("train_loss", loss, batch_size=1)
        return loss

    def measure(self) -> tuple[float, float]:
        """Mean squared error of the values, and that of their mean."""
        truth = 5 * 0.9 ** torch.arange(8, -1, -1).float()
        with torch.no_grad():
            values = self.network(torch.eye(10)).max(-1).values[:9]
        return float((values - truth).square().mean()), float(truth.var(correction=0))


def walks(seed: int) -> Any:
    """Random steps left and right; the right end pays 5 and ends the walk."""
    rng = generator(seed)
    batches = []
    for _ in range(500):
        place = torch.randint(0, 9, (32,), generator=rng)
        action = torch.randint(0, 2, (32,), generator=rng)
        following = (place + 2 * action - 1).clamp(min=0)
        batches.append((place, action, 5.0 * (following == 9), following, following == 9))
    return in_order(batches)


class Policy(Learner):
    """Policy gradient on a contextual bandit: log-probabilities weighted by advantages of either sign."""

    def __init__(self, *, clipped: bool = False) -> None:
        super().__init__(mlp(8, 32, 4), squares, adam(3e-3))
        self.clipped = clipped
        self.register_buffer("best", torch.randn(8, 4, generator=generator(99)))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch[0])
        self.log("train_loss", loss, batch_size=1)
        return loss

    def _loss(self, x: Tensor) -> Tensor:
        logits = self.network(x).log_softmax(-1)
        action = torch.multinomial(logits.detach().exp(), 1)
        reward = (x @ self.best).gather(1, action) + torch.randn(len(x), 1)
        advantage = reward - reward.mean()
        log_share = logits.gather(1, action)
        if self.clipped:  # PPO's ratio, which is 1 here
            return -((log_share - log_share.detach()).exp() * advantage / advantage.std()).mean()
        return -(log_share * advantage).mean()

    def measure(self) -> tuple[float, float]:
        """Reward that is missed, and what is missed at random."""
        x = torch.randn(500, 8, generator=generator(1))
        with torch.no_grad():
            rewards = x @ self.best
            reached = (self.network(x).softmax(-1) * rewards).sum(-1)
        most = rewards.max(-1).values
        return float((most - reached).mean()), float((most - rewards.mean(-1)).mean())


def contexts(seed: int) -> Any:
    """Random contexts."""
    rng = generator(seed)
    return in_order([(torch.randn(32, 8, generator=rng),) for _ in range(500)])


class SelfDistilled(Learner):
    """Follows a slow average of itself on one view of the data, and the labels on the other."""

    def __init__(self) -> None:
        super().__init__(mlp(8, 32, 4), squares, adam(3e-3))
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        outputs = self.network(x)
        target = self.teacher(x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(outputs, x[:, :4].argmax(1)) + F.mse_loss(outputs, target)
        self.log("train_loss", loss, batch_size=1)
        return loss

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.02)

    def measure(self) -> tuple[float, float]:
        """Share of wrong labels, and at random."""
        x = torch.randn(500, 8, generator=generator(1))
        with torch.no_grad():
            wrong = self.network(x).argmax(1) != x[:, :4].argmax(1)
        return float(wrong.float().mean()), 0.75


KINDS = (
    Kind("GAN", Adversaries, ring_batches, tag="two optimizers, manual"),
    Kind("discriminator alone", Discriminator, ring_batches, tag="moving target"),
    Kind("DQN", QLearner, walks, tag="moving target"),
    Kind("policy gradient", Policy, contexts, tag="loss of either sign"),
    Kind("policy gradient, ratio", lambda: Policy(clipped=True), contexts, tag="loss around 0"),
    Kind("teacher that follows", SelfDistilled, contexts, tag="moving target"),
)
