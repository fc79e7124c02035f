"""How a run ended: its last losses against those of the best constant prediction under the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

DIVERGED = "diverged"
LAST = 50
"""Steps whose mean loss counts as the end."""


@dataclass(frozen=True)
class Constant:
    """Losses of outputs that do not depend on the input.

    Attributes:
        loss: of the best constant outputs.
        scale: by how much random outputs of unit variance are worse, which is a yardstick under any scaling, shift
            and reduction of the loss.
    """

    loss: float
    scale: float


def best_constant(learner: Any, batches: Sequence[Any], steps: int = 200) -> Constant:
    """Optimize constant outputs with the learner's own loss on some batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.no_grad():
            shapes = [learner.outputs(batch) for batch in batches]
        constants = tree_map(_start, shapes[0])
        leaves = tree_leaves(constants)
        optimizer = torch.optim.Adam(leaves, lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            _mean_loss(learner, constants, shapes, batches).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            loss = float(_mean_loss(learner, constants, shapes, batches))
            noisy = float(_mean_loss(learner, constants, shapes, batches, noise=1.0))
    return Constant(loss, noisy - loss)


def _start(output: Tensor) -> Tensor:
    """Zeros for one sample: pictures keep their shape, sequences only their last dimension."""
    shape = output.shape[1:] if output.dim() == 4 else output.shape[-1:]
    return (0.01 * torch.randn(shape)).requires_grad_()


def _mean_loss(
    learner: Any, constants: Any, shapes: Sequence[Any], batches: Sequence[Any], noise: float = 0.0
) -> Tensor:
    def like(constant: Tensor, output: Tensor) -> Tensor:
        expanded = constant.expand(output.shape)
        return expanded + noise * torch.randn(output.shape) if noise else expanded

    losses = [
        learner.loss(tree_map(like, constants, outputs), batch) for outputs, batch in zip(shapes, batches, strict=True)
    ]
    return torch.stack([loss for loss in losses if loss.isfinite()]).mean()


def judge(losses: Sequence[float], constant: Constant) -> str:
    """``"trains"``, ``"dead"`` or ``"diverged"`` from the training losses of a run.

    A run trains if its last losses are below the constant's by more than a tenth of the yardstick and by more than
    three standard errors. It has diverged if they are above it by more than the yardstick, or are not finite.
    """
    last = [loss for loss in losses[-LAST:] if math.isfinite(loss)]
    if len(last) < min(len(losses), LAST) / 2:
        return DIVERGED
    gain = constant.loss - mean(last)
    error = stdev(last) / len(last) ** 0.5 if len(last) > 1 else 0.0
    if gain > max(0.1 * constant.scale, 3 * error, 1e-4):
        return "trains"
    return DIVERGED if -gain > max(constant.scale, 1e-4) else "dead"


def judge_measure(own: float, naive: float) -> str:
    """The same from a kind's own measure, where lower is better and ``naive`` is what knowing nothing gives."""
    if not math.isfinite(own):
        return DIVERGED
    return "trains" if own < 0.7 * naive else "dead"
