"""Designs that are a constant of depth: on the branch, on both paths of the sum, or on the weights at the start."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Placement, Residual, Site, Times


@dataclass(frozen=True)
class LNS(Placement):
    """``x + f(N(x) / sqrt(l))``: LayerNorm scaling, pre-norm that listens less the deeper it stands; a final norm.

    Bounds the growth of the stream, so that deep blocks stay useful (in the paper). Not to be combined with writers
    that start smaller by sqrt(2L) (``initialization: GPT2``, ``GPT2Rescale``): take ``Normal``.

    Source: Sun et al. 2025, arXiv:2502.05795.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Pre-norm, divided by the root of the block's number."""
        return Residual(before=nn.Sequential(norm(site.width), Times(site.layer**-0.5)))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class CompleteP(Placement):
    """``x + m^(-a) f(N(x))`` with m = L / base_layers: pre-norm whose branches shrink with depth; a final norm.

    With a = 1 the learning rate found at ``base_layers`` blocks carries over to deeper networks (in the paper); a = 1/2
    is depth-muP. Only the multiplier is here: scale learning rates, Adam's epsilon and weight decay by the paper's
    table. Take an initialization whose writers do not shrink with depth (``Normal``).

    Args:
        base_layers: blocks of the network that hyper-parameters were tuned on.
        exponent: a.

    Raises:
        ValueError: if ``base_layers`` is not above 0 or ``exponent`` is negative.

    Source: Dey et al. 2025, arXiv:2505.01618; depth-muP: Yang et al. 2023, arXiv:2310.02244.
    """

    base_layers: float = 2
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.base_layers < float("inf"):
            raise ValueError(f"CompleteP's base_layers is {self.base_layers!r}: give a number of blocks above 0.")
        if not 0 <= self.exponent < float("inf"):
            raise ValueError(f"CompleteP's exponent is {self.exponent!r}: give 1, or 0.5 for depth-muP.")

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Pre-norm with a smaller branch."""
        return Residual(before=norm(site.width), scale=float((site.layers / self.base_layers) ** -self.exponent))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class BeamNorm(Placement):
    """``x sqrt(1 - 1/n) + N(f(N(x))) / sqrt(n)``: a sandwich that keeps the stream's variance at 1; a final norm.

    For sublayer i of the stack, n = i + 1. Each sublayer takes the same share of the sum of all, so none of them
    drowns; the embedding's share shrinks with depth.

    Source: the Beam model in Hugging Face transformers 5.24, code.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Norms around the branch, and two constants of one sum of squares."""
        n = site.sublayer + 1
        return Residual(before=norm(site.width), after=norm(site.width), skip=(1 - 1 / n) ** 0.5, scale=n**-0.5)

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class TFixup(Placement):
    """``x + f(x)`` without any norm: small weights take their place.

    For L decoder blocks::

        weights of the value path times (9L)^(-1/4)

    Trains without norms and without warmup (in the paper); nothing bounds the stream afterwards. The paper has encoders
    and decoders with cross-attention; for a decoder alone we keep its decoder's constant, which is on the safe side as
    there are fewer sublayers here. Meant for a Xavier base.

    Source: Huang et al. 2020 (ICML), "Improving Transformer Optimization Through Better Initialization", and its code.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Nothing but the sum."""
        return Residual()

    def gain(self, site: Site) -> float:
        """``(9L)^(-1/4)``."""
        return float((9 * site.layers) ** -0.25)


@dataclass(frozen=True)
class DSInit(Placement):
    """Post-norm ``N(x + f(x))`` with weights that start smaller the deeper they stand.

    ::

        all weights of block l times a / sqrt(l)

    Less variance in the sum, so the norm shrinks the gradient less; queries and keys shrink too. Meant for a Xavier
    base: the paper draws uniformly, here the same variance is normal.

    Args:
        a: between 0 and 1.

    Raises:
        ValueError: if it is not.

    Source: Zhang, Titov, Sennrich 2019, arXiv:1908.11365.
    """

    a: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.a <= 1:
            raise ValueError(f"DSInit's a is {self.a!r}: give a number above 0 and at most 1.")

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Post-norm."""
        return Residual(closing=norm(site.width))

    def gain(self, site: Site) -> float:
        """``a / sqrt(l)``."""
        return float(self.a * site.layer**-0.5)

    def query_key_gain(self, site: Site) -> float:
        """The same."""
        return self.gain(site)
