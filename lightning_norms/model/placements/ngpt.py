"""nGPT: the stream lives on the unit sphere, and each sublayer turns it a little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.checks import check_number
from lightning_norms.model.norms import L2Norm, Norm, RMSNorm
from lightning_norms.model.residual import Branch, Inner, Placement, Site, Times


@dataclass(frozen=True)
class NGPT(Placement):
    """``l2(h + a (l2(f(h)) - h))``: a step on the unit sphere toward where the sublayer points; no learned norm at all.

    ::

        q, k       l2 a head after rotation, times s_qk; attention logits times sqrt(head_width)
        up, gate   times s_uv sqrt(d), so that the activation sees numbers of size 1
        a          |learned|, one a feature, 0.05 at the start, stored so that Adam moves it as it moves a weight

    4 to 20 times fewer steps are claimed (in the paper). The matrices belong on the sphere too: add the callback
    ``UnitMatrices``, which puts them back after each step, and set weight decay and warmup to 0. ``norm`` is not used.
    The paper scales each logit by a learned s_z; here each feature in front of the head is scaled.

    Args:
        rate: initial value of a.

    Raises:
        ValueError: if ``rate`` is not above 0.

    Source: Loshchilov et al. 2024, arXiv:2410.01131, and its code.
    """

    equation = "l2(h + a (l2 f(h) - h))"
    trade_off = "no growth by construction; matrices must be renormalised each step"

    rate: float = 0.05

    def __post_init__(self) -> None:
        check_number("NGPT", "rate", self.rate, above=0)

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return L2Norm()(width)

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _SphereResidual(site.width, self.rate)

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        if site.kind == "attention":
            # l2 * sqrt(head_width) for both makes torch's 1/sqrt(head_width) the paper's sqrt(head_width).
            width = site.inner_width // site.heads
            unit = RMSNorm(eps=1e-12, gain=False)
            return Inner(
                turned_query=nn.Sequential(unit(width), _StoredGain((site.heads, width), 1.0, site.width**-0.5)),
                turned_key=nn.Sequential(unit(width), _StoredGain((site.kv_heads, width), 1.0, site.width**-0.5)),
            )
        return Inner(hidden=self._wide(site), gate=self._wide(site))

    def _wide(self, site: Site) -> nn.Module:
        return nn.Sequential(_StoredGain((site.inner_width,), 1.0, 1.0), Times(math.sqrt(site.width)))

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return _StoredGain((width,), 1.0, width**-0.5)  # logits of two unit vectors are at most 1


class _StoredGain(nn.Module):
    """``start / stored * weight * x`` with a weight that starts at ``stored``, which sets its learning rate."""

    def __init__(self, shape: tuple[int, ...], start: float, stored: float) -> None:
        super().__init__()
        self.shape, self.factor = shape, start / stored
        self.weight = nn.Parameter(torch.full((math.prod(shape),), stored))

    def forward(self, x: Tensor) -> Tensor:
        return (self.factor * self.weight).view(self.shape).to(x.dtype) * x


class _SphereResidual(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.unit = L2Norm()(width)
        self.rate = _StoredGain((width,), rate, width**-0.5)

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        target = self.unit(branch(h))
        step = self.rate(target - h)
        # |a| d is a d with a's sign taken out.
        result: Tensor = self.unit(h + self.rate.weight.sign().to(h.dtype) * step)
        return result
