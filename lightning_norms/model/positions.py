"""Positions of tokens: learned, sinusoidal or rotary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

Rotation = Callable[[Tensor], Tensor]
"""Turns queries or keys ``[batch, time, heads, head_width]`` by their position; the identity where nothing turns."""


class PositionModule(nn.Module):
    """No positions at all: adds nothing and turns nothing. Subclasses override one of the two methods."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        """Add positions ``start, start + 1, ...`` to embeddings ``[batch, time, width]``."""
        return x

    def rotation(self, start: int, length: int) -> Rotation:
        """Build the rotation of queries and keys at positions ``start, ..., start + length - 1``."""
        return lambda x: x


@dataclass(frozen=True)
class Positions(ABC):
    """A recipe: ``positions(context_length, width, head_width)`` builds the module."""

    @abstractmethod
    def __call__(self, context_length: int, width: int, head_width: int) -> PositionModule:
        """Build a module for up to ``context_length`` tokens."""


@dataclass(frozen=True)
class Learned(Positions):
    """One learned vector a position, added to the embedding (GPT-2)."""

    @override
    def __call__(self, context_length: int, width: int, head_width: int) -> PositionModule:
        return LearnedPositions(context_length, width)


@dataclass(frozen=True)
class Sinusoidal(Positions):
    """Fixed waves added to the embedding: sin and cos of ``position / scale / 10000^(2i / width)``.

    Args:
        scale: position interpolation; 2 fits twice the context into the range of positions seen in training.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @override
    def __call__(self, context_length: int, width: int, head_width: int) -> PositionModule:
        return SinusoidalPositions(_angles(context_length, width, 10000.0, self.scale), width)


@dataclass(frozen=True)
class Rotary(Positions):
    """Queries and keys turned by an angle that grows with the position; nothing is added to the embedding.

    Args:
        base: sets the slowest wavelength, about ``2 pi base`` tokens.
        scale: position interpolation, ``position / scale``: 2 stretches the context seen in training to twice its
            length (Chen et al. 2023, arXiv:2306.15595).

    Source: Su et al. 2021, arXiv:2104.09864; halves side by side, as in Llama.
    """

    base: float = 10000.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if not 1 < self.base < float("inf"):
            raise ValueError(f"base is {self.base!r}, but rotary positions need a finite number > 1, usually 10000.")

    @override
    def __call__(self, context_length: int, width: int, head_width: int) -> PositionModule:
        if head_width % 2:
            raise ValueError(
                f"Rotary positions turn pairs of features, but a head has {head_width} (d_model / n_heads)."
            )
        return RotaryPositions(_angles(context_length, head_width, self.base, self.scale))


class LearnedPositions(PositionModule):
    """``x + weight[position]``; the model's initialization fills ``weight [context_length, width]``."""

    def __init__(self, context_length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(context_length, width))

    @override
    def forward(self, x: Tensor, start: int) -> Tensor:
        return x + self.weight[start : start + x.shape[1]]


class SinusoidalPositions(PositionModule):
    """``x + wave[position]``, even features sine and odd ones cosine."""

    wave: Tensor

    def __init__(self, angles: Tensor, width: int) -> None:
        super().__init__()
        wave = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]
        self.register_buffer("wave", wave, persistent=False)

    @override
    def forward(self, x: Tensor, start: int) -> Tensor:
        return x + self.wave[start : start + x.shape[1]]


class RotaryPositions(PositionModule):
    """``(a, b) -> (a cos - b sin, b cos + a sin)``, a and b the two halves of a head."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, angles: Tensor) -> None:
        super().__init__()
        self.register_buffer("cosine", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sine", torch.cat((-angles.sin(), angles.sin()), dim=1), persistent=False)

    @override
    def rotation(self, start: int, length: int) -> Rotation:
        # The tables are sliced once for all blocks.
        cosine = self.cosine[start : start + length, None]
        sine = self.sine[start : start + length, None]

        def rotate(x: Tensor) -> Tensor:
            other = x.roll(x.shape[-1] // 2, dims=-1)  # the half that each feature is turned with
            return x * cosine.to(x.dtype) + other * sine.to(x.dtype)

        return rotate


def _angles(context_length: int, width: int, base: float, scale: float) -> Tensor:
    """Compute ``position / scale / base^(2i / width)``, ``[context_length, ceil(width / 2)]``, in float32."""
    frequency = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    return torch.arange(context_length, dtype=torch.float32)[:, None] * (frequency / scale)


def _check_scale(scale: float) -> None:
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale!r}, but positions are divided by it: give a finite number > 0, usually 1.")
