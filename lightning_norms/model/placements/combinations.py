"""Placements made of placements: another one in the first blocks, or one that is switched on while training."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.checks import check_whole
from lightning_norms.model.norms import Norm
from lightning_norms.model.placements.single_stream import PostNorm, PreNorm
from lightning_norms.model.residual import Inner, Placement, Residual, Site


@dataclass(frozen=True)
class MixNorm(Placement):
    """One placement in the first ``floor(fraction * L)`` blocks, another in the rest: Mix-LN.

    ::

        blocks 1 ... floor(L/4)    N(x + f(x))            the others    x + f(N(x))        and a final norm

    Post-norm below for larger gradients in the late blocks, pre-norm above for stability; its highest usable learning
    rate is far below pre-norm's (measured at 64 blocks by Chen, Wei 2026, arXiv:2601.19895).

    Args:
        fraction: share of blocks that are built as ``first``, 0 to 1.
        first: placement of the lower blocks; any design with one stream. Its ``entry`` starts the stack.
        rest: placement of the upper blocks; its ``exit`` ends the stack.

    Raises:
        ValueError: if ``fraction`` is not within 0 and 1.

    Source: Li, Yin, Liu 2024, arXiv:2412.13795.
    """

    equation = "post-norm in the first L/4 blocks, pre-norm above"
    trade_off = "larger gradients for late blocks; lower learning rates"

    fraction: float = 0.25
    first: Placement = field(default_factory=PostNorm)
    rest: Placement = field(default_factory=PreNorm)

    def __post_init__(self) -> None:
        if not (isinstance(self.fraction, (int, float)) and 0 <= self.fraction <= 1):
            raise ValueError(f"MixNorm's fraction is {self.fraction!r}: give a share of the blocks, 0 to 1.")

    def at(self, site: Site) -> Placement:
        """Select the placement of a block."""
        return self.first if site.layer <= int(self.fraction * site.layers + 1e-9) else self.rest

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return self.at(site).wrap(site, norm)

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return self.first.entry(width, norm)

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return self.rest.exit(width, norm)

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        return self.at(site).inner(site, norm)

    @property
    @override
    def wants_qk_norm(self) -> bool:
        return self.first.wants_qk_norm or self.rest.wants_qk_norm

    @override
    def gain(self, site: Site) -> float:
        return self.at(site).gain(site)

    @override
    def query_key_gain(self, site: Site) -> float:
        return self.at(site).query_key_gain(site)


@dataclass(frozen=True)
class ProRes(Placement):
    """Any single-stream placement whose branches are switched on one after the other while it trains.

    ::

        a(l, t) f(x)  for  f(x)      a(l, t) = min( t / (T l), 1 )      t steps taken, l the block, T = warmup_steps

    At step 0 every block is the skip path alone; after T L steps it is the base design exactly. Shallow blocks settle
    before deep ones start to move the stream. Steps are counted by the callback ``AfterStep``, which the command line
    always adds. The count is part of the weights, so a resumed or copied model continues where it was.

    Args:
        base: the placement that it ends as.
        warmup_steps: optimizer steps until the first block is fully on.

    Raises:
        ValueError: if ``warmup_steps`` is no whole number >= 1, or ``base`` is a design with several streams.

    Source: Chen et al. 2026, arXiv:2603.05369 (T = 1000 is inferred from the released code).
    """

    equation = "a(l, t) f, a from 0 to 1"
    trade_off = "shallow blocks settle first; deep ones idle for T l steps"

    base: Placement = field(default_factory=PreNorm)
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        check_whole("ProRes", "warmup_steps", self.warmup_steps, 1)

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        residual = self.base.wrap(site, norm)
        if not isinstance(residual, Residual):
            raise ValueError(f"ProRes needs a base with one stream, such as PreNorm; got {self.base}.")
        residual.after = nn.Sequential(residual.after, _Progress(self.warmup_steps * site.layer))
        return residual

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return self.base.entry(width, norm)

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return self.base.exit(width, norm)

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        return self.base.inner(site, norm)

    @property
    @override
    def wants_qk_norm(self) -> bool:
        return self.base.wants_qk_norm

    @override
    def gain(self, site: Site) -> float:
        return self.base.gain(site)

    @override
    def query_key_gain(self, site: Site) -> float:
        return self.base.query_key_gain(site)


class _Progress(nn.Module):
    """``min(taken / steps, 1) * x``."""

    taken: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("taken", torch.zeros((), dtype=torch.long))

    def after_step(self) -> None:
        """Count an optimizer step."""
        self.taken += 1

    def forward(self, x: Tensor) -> Tensor:
        return (self.taken / self.steps).clamp(max=1.0).to(x.dtype) * x
