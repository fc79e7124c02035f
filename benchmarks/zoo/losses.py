"""Losses of outputs and a batch, all of them picklable: the batch is (inputs, targets, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.zoo.kinds import Loss


def classes(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy of logits [..., classes] and whole numbers [...]; -100 is left out."""
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def masked_classes(outputs: Tensor, batch: Any) -> Tensor:
    """The same, and 0 for a batch that has no label at all."""
    total = F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), reduction="sum")
    return total / (batch[1] != -100).sum().clamp(min=1)


@dataclass(frozen=True)
class Weighted:
    """Cross-entropy with a weight a class, from 0.2 to 3."""

    count: int

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """The loss."""
        weight = torch.linspace(0.2, 3.0, self.count)
        return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), weight=weight)


@dataclass(frozen=True)
class Affine:
    """Another loss, scaled and shifted."""

    loss: Loss
    factor: float = 1.0
    shift: float = 0.0

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        """The loss."""
        return self.factor * self.loss(outputs, batch) + self.shift


def classes_summed(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy, summed over the batch."""
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), reduction="sum")


def smoothed(outputs: Tensor, batch: Any) -> Tensor:
    """Cross-entropy with label smoothing 0.1."""
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), label_smoothing=0.1)


def focal(outputs: Tensor, batch: Any) -> Tensor:
    """Focal loss with gamma 2."""
    surprise = F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), reduction="none")
    return ((1 - torch.exp(-surprise)) ** 2 * surprise).mean()


def one_hot_bits(outputs: Tensor, batch: Any) -> Tensor:
    """Binary cross-entropy of every class against all others."""
    return F.binary_cross_entropy_with_logits(outputs, F.one_hot(batch[1], outputs.shape[-1]).float())


def bits(outputs: Tensor, batch: Any) -> Tensor:
    """Binary cross-entropy of independent labels."""
    return F.binary_cross_entropy_with_logits(outputs, batch[1])


def squares(outputs: Tensor, batch: Any) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(outputs, batch[1])


def squares_summed(outputs: Tensor, batch: Any) -> Tensor:
    """Squared error, summed over the batch."""
    return F.mse_loss(outputs, batch[1], reduction="sum")


def gaussian(outputs: Tensor, batch: Any) -> Tensor:
    """Negative log-likelihood under a mean and a log standard deviation; below zero once the fit is narrow."""
    mean, log_std = outputs.chunk(2, -1)
    return (0.5 * ((batch[1] - mean) * torch.exp(-log_std)) ** 2 + log_std).mean()


def triplets(outputs: Tensor, _: Any) -> Tensor:
    """Anchor, positive, negative; margin 1."""
    return F.triplet_margin_loss(*outputs)


def connectionist(outputs: Tensor, batch: Any) -> Tensor:
    """CTC of log-probabilities [batch, time, symbols] against labels of equal length."""
    frames = torch.full((outputs.shape[0],), outputs.shape[1])
    lengths = torch.full((outputs.shape[0],), batch[1].shape[1])
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), batch[1], frames, lengths)


def matching(outputs: Sequence[Tensor] | Tensor, _: Any) -> Tensor:
    """Contrastive loss of two views, both ways; temperature 0.1."""
    one, two = (F.normalize(view, dim=-1) for view in outputs)
    logits = one @ two.T / 0.1
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
