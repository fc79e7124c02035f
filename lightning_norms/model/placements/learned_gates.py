"""Learned factors on a branch or on the stream: ReZero, SkipInit, Admin, NormFormer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Branch, Inner, Placement, Residual, Site


class Gain(nn.Module):
    """``weight * x``: one learned number (``width`` 1), or one for each feature; all start at ``start``."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``[..., width]``."""
        return self.weight.to(x.dtype) * x


@dataclass(frozen=True)
class ReZero(Placement):
    """``x + w f(x)``, no norm at all, w one learned number that both sublayers of a block share.

    ::

        x --+-- attention -- * w --(+)--+-- feed-forward -- * w --(+)-- y         w = 0 at the start
            +-----------------------^   +---------------------------^

    The network starts as the identity, so nothing can explode or vanish; nothing bounds the stream later. At step 0
    only the w (and embedding and head) get a gradient.

    Args:
        start: initial value of w.

    Source: Bachlechner et al. 2020, arXiv:2003.04887.
    """

    equation = "x + w f(x), w = 0"
    trade_off = "starts as the identity, no norm; nothing bounds the stream later"

    start: float = 0.0

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _SharedGateFirst(self.start) if site.kind == "attention" else _SharedGateSecond()


class _SharedGateFirst(nn.Module):
    """Holds w, and sends it on beside the stream."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.gate = Gain(1, start)

    def forward(self, x: Tensor, branch: Branch) -> tuple[Tensor, nn.Module]:
        return x + self.gate(branch(x)), self.gate


class _SharedGateSecond(nn.Module):
    def forward(self, stream: tuple[Tensor, nn.Module], branch: Branch) -> Tensor:
        x, gate = stream
        result: Tensor = x + gate(branch(x))
        return result


@dataclass(frozen=True)
class SkipInit(Placement):
    """``x + w f(x)``, no norm, w one learned number a branch.

    Starts as the identity, and at any ``start`` up to about 1/sqrt(number of branches) as something close to it;
    nothing bounds the stream later. It was proposed for residual networks without batch norm.

    Args:
        start: initial value of every w.

    Source: De, Smith 2020, arXiv:2002.10444.
    """

    equation = "x + w f(x), one w a branch"
    trade_off = "as ReZero"

    start: float = 0.0

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(after=Gain(1, self.start))


@dataclass(frozen=True)
class NormFormer(Placement):
    """Pre-norm with a norm after attention, one gain a head, and a norm inside the feed-forward.

    ::

        x + N( W_o (c_h head_h) )     heads of N(x), c = 1 at the start, before W_o as in the paper
        x + W_2 N( act( W_1 N(x) ) )

    Evens out pre-norm's gradients, larger at the bottom, for 0.4 % more parameters (in the paper); fairseq's code
    applies c after W_o instead.

    Args:
        residual_scale: learn a gain for each feature of the stream in the feed-forward's sum, ``w * x + f``.

    Source: Shleifer, Weston, Ott 2021, arXiv:2110.09456.
    """

    equation = "x + N(W c_h head_h(N x)); x + W N(act(N x))"
    trade_off = "evens out pre-norm's gradients; d + d_ff gains more"
    final_norm = True

    residual_scale: bool = False

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        if site.kind == "attention":
            return Residual(before=norm(site.width), after=norm(site.width))
        return Residual(before=norm(site.width), skip=Gain(site.width, 1.0) if self.residual_scale else 1.0)

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        return Inner(writer=_HeadGain(site.heads) if site.kind == "attention" else norm(site.inner_width))


class _HeadGain(nn.Module):
    """One learned number for each head of ``[..., heads * head_width]``."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], len(self.weight), -1)
        return (heads * self.weight.to(x.dtype)[:, None]).flatten(-2)


@dataclass(frozen=True)
class Admin(Placement):
    """``N(omega * x + f(x))``, omega one learned number a feature, profiled before training.

    ::

        omega_1 = 1      omega_(i+1)^2 = omega_i^2 + Var(f_i) / Var(x_i)      i over sublayers

    Post-norm in which each branch starts as a small share of the sum, so updates are not amplified with depth. The
    callback ``AdminProfile`` sets omega; without it omega stays 1, which is post-norm with a learned skip.

    Source: Liu et al. 2020, arXiv:2004.08249.
    """

    equation = "N(w x + f(x)), w profiled"
    trade_off = "a branch starts as a small share of its sum; needs a batch before training"

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return AdminResidual(closing=norm(site.width), skip=Gain(site.width, 1.0))


class AdminResidual(Residual):
    """A :class:`Residual` that measures itself between :meth:`begin_profile` and :meth:`end_profile`."""

    measured: list[tuple[float, float]] | None = None
    skip: Gain

    @torch.no_grad()
    def begin_profile(self) -> None:
        """Set omega to 1, and measure every forward from here on."""
        self.skip.weight.fill_(1.0)
        self.measured = []

    @torch.no_grad()
    def end_profile(self, omega: float) -> float:
        """Set ``omega``, and return the next residual's.

        Raises:
            ValueError: if no forward was measured.
        """
        rows, self.measured = self.measured, None
        if not rows:
            raise ValueError("no omega was measured: run the network's forward between begin_profile and end_profile.")
        self.skip.weight.fill_(omega)
        stream, branch = (sum(column) / len(column) for column in zip(*rows, strict=True))
        return next_omega(omega, stream, branch)

    @override
    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        if self.measured is None:
            return super().forward(x, branch)
        f = branch(x)
        self.measured.append((float(x.detach().float().var()), float(f.detach().float().var())))
        return super().forward(x, lambda _: f)


def next_omega(omega: float, stream: float, branch: float) -> float:
    """Compute the next omega from the variances of stream and branch: ``sqrt(omega^2 + branch / stream)``.

    The paper's recursion, ``sqrt(omega^2 stream + branch)``, is the same behind a norm, where ``stream`` is 1. The
    division keeps a small embedding from making the second omega small: the norm of the sum does not notice its size.

    Example:
        >>> round(next_omega(1.0, stream=1.0, branch=0.5), 4)
        1.2247
    """
    return float((omega**2 + branch / stream) ** 0.5)
