"""Healthy recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.zoo.kinds import TEACHER, Kind, Learner, adam, generator, loader
from benchmarks.zoo.losses import connectionist, squares
from benchmarks.zoo.tasks import waves


def series(seed: int) -> Any:
    """Batches of waves."""
    return loader(*waves(seed), seed=seed)


class Recurrent(nn.Module):
    """An LSTM, GRU or plain RNN with a linear head at every step."""

    def __init__(self, cell: type[nn.RNNBase], inputs: int = 1, outputs: int = 1, layers: int = 1) -> None:
        super().__init__()
        self.cell = cell(inputs, 24, layers, batch_first=True)
        self.head = nn.Linear(24, outputs)

    @override
    def forward(self, x: Tensor) -> Tensor:
        predictions: Tensor = self.head(self.cell(x)[0])
        return predictions


def spoken(seed: int) -> Any:
    """Twelve frames that spell four of five symbols, three frames each; symbol 0 is CTC's blank."""
    rng = generator(seed)
    sounds = torch.randn(6, 8, generator=generator(TEACHER))
    word = torch.randint(1, 6, (2000, 4), generator=rng)
    frames = sounds[word.repeat_interleave(3, 1)]
    return loader(frames + 0.5 * torch.randn(frames.shape, generator=rng), word, seed=seed)


KINDS = (
    Kind("LSTM", lambda: Learner(Recurrent(nn.LSTM), squares, adam(5e-3)), series),
    Kind("GRU, two layers", lambda: Learner(Recurrent(nn.GRU, layers=2), squares, adam(5e-3)), series),
    Kind("CTC", lambda: Learner(Recurrent(nn.GRU, 8, 6), connectionist, adam(5e-3)), spoken),
)
