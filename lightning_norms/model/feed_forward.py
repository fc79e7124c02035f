"""The feed-forward sublayers: GELU, ReLU and SwiGLU, with equal parameter counts at one ``ff_multiplier``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.model.residual import Inner, Site


@dataclass(frozen=True)
class FeedForward(ABC):
    """A recipe that sets the width of the hidden layer and builds the module for a site."""

    def hidden_width(self, full_width: int) -> int:
        """Number of features between the two layers; ``full_width`` is ``d_model * ff_multiplier``."""
        return full_width

    @abstractmethod
    def __call__(self, site: Site, inner: Inner, bias: bool, dropout: float) -> nn.Module:
        """Build a module ``[..., width]`` to ``[..., width]`` with attributes ``writer`` and ``value_path``."""


@dataclass(frozen=True)
class GELU(FeedForward):
    """``writer(gelu(up(x)))``.

    Args:
        approximate: "none" is exact; "tanh" is what GPT and GPT-2 use.

    Source: Hendrycks, Gimpel 2016, arXiv:1606.08415.
    """

    approximate: Literal["none", "tanh"] = "none"

    @override
    def __call__(self, site: Site, inner: Inner, bias: bool, dropout: float) -> nn.Module:
        return TwoLayerFeedForward(site, inner, bias, dropout, nn.GELU(self.approximate))


@dataclass(frozen=True)
class ReLU(FeedForward):
    """``writer(max(0, up(x)))``, as in the original Transformer and OPT.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.3.
    """

    @override
    def __call__(self, site: Site, inner: Inner, bias: bool, dropout: float) -> nn.Module:
        return TwoLayerFeedForward(site, inner, bias, dropout, nn.ReLU())


@dataclass(frozen=True)
class SwiGLU(FeedForward):
    """``writer(silu(gate(x)) * up(x))``; three matrices of 2/3 the width, so that parameter counts match GELU's.

    Source: Shazeer 2020, arXiv:2002.05202; the 2/3 is from its section 2.
    """

    @override
    def hidden_width(self, full_width: int) -> int:
        """Round 2/3 of the full width to the nearest multiple of 8 (but at least 8)."""
        return max(8, 8 * round(full_width * 2 / 3 / 8))

    @override
    def __call__(self, site: Site, inner: Inner, bias: bool, dropout: float) -> nn.Module:
        return SwiGLUFeedForward(site, inner, bias, dropout)


class TwoLayerFeedForward(nn.Module):
    """``up`` - slot - activation - norm slot - ``writer`` - dropout."""

    def __init__(self, site: Site, inner: Inner, bias: bool, dropout: float, activation: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(site.width, site.inner_width, bias=bias)
        self.writer = nn.Linear(site.inner_width, site.width, bias=bias)
        self.hidden_norm, self.writer_norm = inner.hidden, inner.writer
        self.activation = activation
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    @property
    def value_path(self) -> tuple[nn.Linear, ...]:
        """DeepNorm's fc1 and fc2."""
        return (self.up, self.writer)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to ``[..., width]``."""
        hidden = self.activation(self.hidden_norm(self.up(x)))
        y: Tensor = self.drop(self.writer(self.writer_norm(hidden)))
        return y


class SwiGLUFeedForward(nn.Module):
    """``silu(gate) * up``, a slot on each - norm slot - ``writer`` - dropout."""

    def __init__(self, site: Site, inner: Inner, bias: bool, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(site.width, site.inner_width, bias=bias)
        self.up = nn.Linear(site.width, site.inner_width, bias=bias)
        self.writer = nn.Linear(site.inner_width, site.width, bias=bias)
        self.gate_norm, self.hidden_norm, self.writer_norm = inner.gate, inner.hidden, inner.writer
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    @property
    def value_path(self) -> tuple[nn.Linear, ...]:
        """All three matrices, as in GLM-130B (arXiv:2210.02414), a DeepNorm model with a gate."""
        return (self.gate, self.up, self.writer)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to ``[..., width]``."""
        hidden = F.silu(self.gate_norm(self.gate(x))) * self.hidden_norm(self.up(x))
        y: Tensor = self.drop(self.writer(self.writer_norm(hidden)))
        return y
