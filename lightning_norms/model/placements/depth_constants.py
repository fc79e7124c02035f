"""Constants of depth: on the branch, on both paths of the sum, or on the weights at the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from lightning_norms.checks import check_number
from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Placement, Residual, Site, Times
from lightning_norms.rescale_rules import DepthRescale, TFixupRescale


@dataclass(frozen=True)
class LNS(Placement):
    """``x + f(N(x) / sqrt(l))``: LayerNorm scaling, pre-norm with a smaller input the deeper it stands; a final norm.

    Bounds the growth of the stream, so that deep blocks stay useful (in the paper). Not to be combined with writers
    that start smaller by sqrt(2L) (``initialization: GPT2``, ``GPT2Rescale``): take ``Normal``.

    Source: Sun et al. 2025, arXiv:2502.05795.
    """

    equation = "x + f(N x / sqrt(l))"
    trade_off = "bounds the stream; not with writers that shrink with depth"
    final_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(before=nn.Sequential(norm(site.width), Times(DepthRescale().gain(site.layer, site.layers))))


@dataclass(frozen=True)
class CompleteP(Placement):
    """``x + m^(-a) f(N(x))`` with m = L / base_layers: pre-norm whose branches shrink with depth; a final norm.

    With a = 1 the learning rate found at ``base_layers`` blocks carries over to deeper networks (in the paper); a = 1/2
    is depth-muP. Only the multiplier is here: scale learning rates, Adam's epsilon and weight decay by the paper's
    table. Take an initialization whose writers do not shrink with depth (``Normal``).

    Args:
        base_layers: number of blocks in the network whose hyper-parameters were tuned.
        exponent: a.

    Raises:
        ValueError: if ``base_layers`` is not above 0 or ``exponent`` is negative.

    Source: Dey et al. 2025, arXiv:2505.01618; depth-muP: Yang et al. 2023, arXiv:2310.02244.
    """

    equation = "x + (L/L0)^(-1) f(N x)"
    trade_off = "learning rates carry over to deeper networks; small branches"
    final_norm = True

    base_layers: float = 2
    exponent: float = 1.0

    def __post_init__(self) -> None:
        check_number("CompleteP", "base_layers", self.base_layers, above=0)
        if not 0 <= self.exponent < math.inf:
            raise ValueError(f"CompleteP's exponent is {self.exponent!r}: give 1, or 0.5 for depth-muP.")

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(before=norm(site.width), scale=float((site.layers / self.base_layers) ** -self.exponent))


@dataclass(frozen=True)
class BeamNorm(Placement):
    """``x sqrt(1 - 1/n) + N(f(N(x))) / sqrt(n)``: a sandwich that keeps the stream's variance at 1; a final norm.

    For sublayer i of the stack, n = i + 1. Each sublayer takes the same share of the sum of all, so none of them
    drowns; the embedding's share shrinks with depth.

    Source: the Beam model in Hugging Face transformers 5.24, code.
    """

    equation = "x sqrt(1 - 1/n) + N(f(N x)) / sqrt(n)"
    trade_off = "variance stays 1; the embedding's share shrinks"
    final_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        n = site.sublayer + 1
        return Residual(before=norm(site.width), after=norm(site.width), skip=(1 - 1 / n) ** 0.5, scale=n**-0.5)


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

    equation = "x + f(x), weights (9L)^(-1/4)"
    trade_off = "no norm, no warmup; nothing bounds the stream later"

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual()

    @override
    def gain(self, site: Site) -> float:
        return TFixupRescale().gain(site.layer, site.layers)


@dataclass(frozen=True)
class DSInit(Placement):
    """Post-norm ``N(x + f(x))`` with weights that start smaller the deeper they stand.

    ::

        all weights of block l times a / sqrt(l)

    Less variance in the sum, so the norm shrinks the gradient less; queries and keys shrink too. Meant for a Xavier
    base: the paper draws uniformly, here the same variance is normal.

    Args:
        a: above 0, at most 1.

    Raises:
        ValueError: if ``a`` is not.

    Source: Zhang, Titov, Sennrich 2019, arXiv:1908.11365.
    """

    equation = "N(x + f(x)), weights a/sqrt(l)"
    trade_off = "post-norm with less variance in the sum; deep blocks start small"

    a: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.a <= 1:
            raise ValueError(f"DSInit's a is {self.a!r}: give a number above 0 and at most 1.")

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(closing=norm(site.width))

    @override
    def gain(self, site: Site) -> float:
        return self.a * DepthRescale().gain(site.layer, site.layers)

    @override
    def query_key_gain(self, site: Site) -> float:
        return self.gain(site)
