"""Healthy runs with other optimizers, schedules, precision and callbacks around the same few networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR
from typing_extensions import override

from benchmarks.zoo.dense import classifier, points
from benchmarks.zoo.kinds import Kind, Learner, adam
from benchmarks.zoo.language import sentences
from benchmarks.zoo.losses import classes
from benchmarks.zoo.nets import Transformer, mlp
from benchmarks.zoo.vision import album, resnet


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warmup, then half a cosine down to 0."""

    warmup: int = 50
    steps: int = 700

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup) / (self.steps - self.warmup))))


@dataclass(frozen=True)
class Stages:
    """A tenth from step 200, a hundredth from step 400."""

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return 0.1 ** (step // 200)


def decoder() -> Transformer:
    """Two pre-norm blocks."""
    return Transformer(2)


def dropout() -> nn.Sequential:
    """A classifier that drops half of its features."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))


def scaled() -> dict[str, Any]:
    """Trainer arguments: float16 autocast under a GradScaler, which also works on a CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}


def averaged() -> dict[str, Any]:
    """Trainer arguments: a moving average of the weights."""
    return {"callbacks": [EMAWeightAveraging(decay=0.99, update_starting_at_step=20)]}


class Mixed(Learner):
    """Mixes pairs of samples (mixup): inputs and labels by the same random share."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share = torch.distributions.Beta(0.4, 0.4).sample()
        outputs = self.network(share * x + (1 - share) * x.flip(0))
        loss = share * classes(outputs, batch) + (1 - share) * classes(outputs, (x, y.flip(0)))
        self.log("train_loss", loss, batch_size=1)
        return loss


class RandomWeight(Learner):
    """Multiplies the loss by a random weight, as when samples carry importance weights of wide spread."""

    @override
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return self.criterion(outputs, batch) * (0.7 * torch.randn(())).exp()


def on_points(name: str, optimizer: Callable[..., Any], schedule: Any = None, tag: str = "", **more: Any) -> Kind:
    """The dense classifier with another optimizer or schedule."""
    return Kind(name, lambda: Learner(classifier(), classes, optimizer, schedule), points, tag=tag, **more)


MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)
CYCLE = partial(CyclicLR, base_lr=1e-4, max_lr=5e-3, step_size_up=50, cycle_momentum=False)
RESTARTS = partial(CosineAnnealingWarmRestarts, T_0=100)
ONE_CYCLE = partial(OneCycleLR, max_lr=5e-3, total_steps=2000)

KINDS = (
    on_points("SGD with momentum", MOMENTUM),
    on_points(
        "SGD with momentum, cyclic rate",
        MOMENTUM,
        partial(CyclicLR, base_lr=1e-3, max_lr=0.1, step_size_up=40),
        "periodic rate",
    ),
    on_points("Adam, cyclic rate", adam(5e-3), CYCLE, "periodic rate"),
    on_points("Adam, warm restarts", adam(5e-3), RESTARTS, "periodic rate"),
    on_points("one cycle", adam(5e-3), ONE_CYCLE),
    on_points("rate in stages", adam(5e-3), partial(LambdaLR, lr_lambda=Stages())),
    on_points("RMSprop", partial(RMSprop, lr=1e-3)),
    on_points("Adagrad", partial(Adagrad, lr=0.03)),
    on_points("AdamW, beta2 0.95", partial(AdamW, lr=3e-3, betas=(0.9, 0.95))),
    on_points("gradient clipping", adam(2e-3), trainer=lambda: {"gradient_clip_val": 0.5}),
    Kind(
        "decoder, warmup and cosine",
        lambda: Learner(decoder(), classes, adam(5e-3), partial(LambdaLR, lr_lambda=WarmupCosine())),
        sentences,
    ),
    Kind(
        "decoder, GradScaler", lambda: Learner(decoder(), classes, adam(2e-3)), sentences, tag="float16", trainer=scaled
    ),
    Kind(
        "decoder, bf16",
        lambda: Learner(decoder(), classes, adam(2e-3)),
        sentences,
        tag="bfloat16",
        trainer=lambda: {"precision": "bf16-mixed"},
    ),
    on_points(
        "accumulation of two batches", adam(3e-3), tag="accumulation", trainer=lambda: {"accumulate_grad_batches": 2}
    ),
    Kind(
        "decoder, weight average",
        lambda: Learner(decoder(), classes, adam(2e-3)),
        sentences,
        tag="weight average",
        trainer=averaged,
    ),
    Kind("residual CNN, SGD", lambda: Learner(resnet(), classes, MOMENTUM), album, tag="buffers"),
    Kind("dropout 0.5", lambda: Learner(dropout(), classes, adam(2e-3)), points, tag="noise"),
    Kind("mixup", lambda: Mixed(classifier(), classes, adam(2e-3)), points, tag="noise"),
    Kind("random loss weights", lambda: RandomWeight(classifier(), classes, adam(2e-3)), points, tag="noise"),
    Kind(
        "deep MLP with norms",
        lambda: Learner(
            mlp(16, *[32] * 6, 10, activation=lambda: nn.Sequential(nn.LayerNorm(32), nn.GELU())), classes, adam(2e-3)
        ),
        points,
    ),
)
