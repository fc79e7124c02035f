"""Attention over depth: a sublayer reads a learned mean of what all earlier sublayers wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.checks import check_whole
from lightning_norms.model.norms import Norm, RMSNorm
from lightning_norms.model.residual import Branch, Placement, Site

Written = tuple[Tensor, ...]
"""What each sublayer (or block of sublayers) wrote, newest first, the embedding last."""


@dataclass(frozen=True)
class AttentionResiduals(Placement):
    """A softmax over depth in place of the sum: ``h = sum_i softmax_i( w . RMSNorm(v_i) ) v_i``; a final norm.

    ::

        v_0 (embedding)  v_1  v_2 ... v_(l-1)      one query w a sublayer, 0 at the start: their mean
           +----+----+-------+-- mean -- N -- sublayer -- v_l

    At the start it is pre-norm exactly: to the norm in front of a sublayer, a mean is as good as a sum. Reported to
    match 1.25 times the compute (in the paper). Memory grows with depth, so blocks of sublayers may be summed first.
    The paper's readout at the end is not stated in what we read: here it is one more query, then the final norm.

    Args:
        block_size: number of sublayers whose outputs are summed before they are attended to: 1 attends to all (the full
            form); larger ones are the block form, about 2L / 8 in the paper.

    Raises:
        ValueError: if ``block_size`` is no whole number >= 1.

    Source: Kimi Team 2026, arXiv:2603.15031.
    """

    equation = "softmax over depth of what was written"
    trade_off = "chooses its inputs; memory grows with depth"

    block_size: int = 1

    def __post_init__(self) -> None:
        check_whole("AttentionResiduals", "block_size", self.block_size, 1)

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return _Start()

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        mean = _DepthMean(site.width) if site.sublayer > 1 else _Only()  # sublayer 1 has nothing to choose from
        return _DepthResidual(mean, norm(site.width), starts_block=(site.sublayer - 1) % self.block_size == 0)

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return nn.Sequential(_DepthMean(width), norm(width))


class _Start(nn.Module):
    def forward(self, x: Tensor) -> Written:
        return (x,)


class _Only(nn.Module):
    def forward(self, written: Written) -> Tensor:
        return written[0]


class _DepthMean(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))
        self.key_norm = RMSNorm()(width)

    def forward(self, written: Written) -> Tensor:
        """Average any number of tensors ``[batch, time, width]``."""
        query = self.query.to(written[0].dtype)
        share = torch.stack([self.key_norm(v) @ query for v in written]).softmax(dim=0)
        total = share[0].unsqueeze(-1) * written[0]
        for i, v in enumerate(written[1:], start=1):
            total = total + share[i].unsqueeze(-1) * v
        return total


class _DepthResidual(nn.Module):
    def __init__(self, mean: nn.Module, before: nn.Module, starts_block: bool) -> None:
        super().__init__()
        self.mean, self.before, self.starts_block = mean, before, starts_block

    def forward(self, written: Written, branch: Branch) -> Written:
        f = branch(self.before(self.mean(written)))
        return (f, *written) if self.starts_block else (written[0] + f, *written[1:])
