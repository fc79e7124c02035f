"""Residual streams that learn how to feed a sublayer and how to mix: hyper-connections and their constrained form.

The stream is one tensor ``[batch, time, n, width]``. It starts as n copies of the embedding and ends as their sum,
behind a final norm. All of these start as pre-norm exactly, whatever n is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.checks import check_whole
from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Branch, Placement, Site


@dataclass(frozen=True)
class HyperConnections(Placement):
    """``H <- B^T f(N(A_m^T H)) + A_r^T H``: n streams H with learned constants, static hyper-connections.

    ::

        H [n, d] --+-- A_m [n, 1] -- N -- sublayer -- B [1, n] --(+)-- H
                   +------------------ A_r [n, n] ----------------^

    At the start B is all ones, A_r the identity, and sublayer k (from 0) reads stream k mod n. Loses against one stream
    at n = 1 and wins at n = 4 (in the paper), for n times the memory of the stream. Nothing bounds products of A_r in
    depth.

    Args:
        streams: n, the number of streams.

    Raises:
        ValueError: if ``streams`` is no whole number >= 1.

    Source: Zhu et al. 2024, arXiv:2409.19606.
    """

    equation = "H = B' f(A H) + R' H, n streams"
    trade_off = "learned mixing; nothing bounds products of R"

    streams: int = 4

    def __post_init__(self) -> None:
        check_whole(type(self).__name__, "streams", self.streams, 1)

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return _Copies(self.streams)

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _HyperResidual(self.streams, site, norm(site.width))

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return _SumExit(norm(width))


@dataclass(frozen=True)
class DynamicHyperConnections(HyperConnections):
    """:class:`HyperConnections` whose B, A_m and A_r also depend on the token.

    With the streams normalised one by one, H' = N(H)::

        B = B_0 + s_b tanh(H' W_b)      A_m = A_m0 + s_a tanh(H' W_m)      A_r = A_r0 + s_a tanh(H' W_r)

    Better than the static form for about d (n + 2) parameters more a sublayer (in the paper). W starts at 0 and s at
    0.01.

    Args:
        streams: n, the number of streams.

    Raises:
        ValueError: if ``streams`` is no whole number >= 1.

    Source: Zhu et al. 2024, arXiv:2409.19606.
    """

    equation = "HyperConnections + tanh of the token"
    trade_off = "better than static (in the paper); about 2d(n+2) more"

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _DynamicHyperResidual(self.streams, site, norm(site.width), norm(site.width))


@dataclass(frozen=True)
class MHC(Placement):
    """``H <- M H + p^T f(N(r H))``: hyper-connections on a manifold, M doubly stochastic, mHC.

    With all streams of a token in one vector h of RMS 1::

        r = sigmoid(a_1 h phi_1 + b_1)     p = 2 sigmoid(a_2 h phi_2 + b_2)     M = Sinkhorn(exp(a_3 h phi_3 + b_3))

    M's rows and columns sum to 1, so no product of them grows with depth, which is where free hyper-connections drift.
    Some more time than one stream (6.7 % at n = 4 in the paper).

    The paper does not say how b and phi start. Here phi = 0, a = 0.01, p = 1, M within 0.1 % of the identity, and r
    leans toward stream (sublayer mod n): pre-norm exactly, but no symmetry that would keep the streams equal for ever.

    Args:
        streams: n, the number of streams.
        iterations: number of Sinkhorn iterations; each divides columns, then rows, by their sums.

    Raises:
        ValueError: if either is no whole number >= 1.

    Source: Xie et al. 2025, arXiv:2512.24880.
    """

    equation = "H = M H + p' f(r H), M doubly stochastic"
    trade_off = "no drift in depth; n times the stream, Sinkhorn's time"

    streams: int = 4
    iterations: int = 20

    def __post_init__(self) -> None:
        check_whole("MHC", "streams", self.streams, 1)
        check_whole("MHC", "iterations", self.iterations, 1)

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return _Copies(self.streams)

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _ManifoldResidual(self.streams, site, norm(site.width), self.iterations)

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return _SumExit(norm(width))


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Divide columns, then rows, of ``exp(logits)`` by their sums, again and again, until nearly doubly stochastic.

    Args:
        logits: ``[..., n, n]``.
        iterations: number of rounds.

    Example:
        >>> sinkhorn(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), 20).sum(-1)
        tensor([1., 1.])
    """
    matrix = (logits - logits.amax(dim=(-2, -1), keepdim=True)).exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(dim=-2, keepdim=True)
        matrix = matrix / matrix.sum(dim=-1, keepdim=True)
    return matrix


class _Copies(nn.Module):
    """``[batch, time, width]`` to ``[batch, time, n, width]``."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, x.shape[-1])


class _SumExit(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, streams: Tensor) -> Tensor:
        result: Tensor = self.norm(streams.sum(dim=-2))
        return result


class _HyperResidual(nn.Module):
    # The constants are vectors, so that no weight decay pulls on them.
    def __init__(self, streams: int, site: Site, before: nn.Module) -> None:
        super().__init__()
        self.streams, self.before = streams, before
        self.spread = nn.Parameter(torch.ones(streams))
        self.read = nn.Parameter(torch.eye(streams)[(site.sublayer - 1) % streams].clone())
        self.mix = nn.Parameter(torch.eye(streams).flatten())

    def maps(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute A_m ``[..., n]``, B ``[..., n]`` and A_r ``[..., n, n]`` for streams ``[..., n, width]``."""
        return self.read, self.spread, self.mix.view(self.streams, self.streams)

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        read, spread, mix = (weights.to(h.dtype) for weights in self.maps(h))
        f = branch(self.before((read.unsqueeze(-1) * h).sum(dim=-2)))
        return spread.unsqueeze(-1) * f.unsqueeze(-2) + mix.transpose(-2, -1) @ h


class _DynamicHyperResidual(_HyperResidual):
    def __init__(self, streams: int, site: Site, before: nn.Module, stream_norm: nn.Module) -> None:
        super().__init__(streams, site, before)
        self.stream_norm = stream_norm
        self.map = nn.Parameter(torch.zeros(streams + 2, site.width))
        self.spread_size = nn.Parameter(torch.tensor([0.01]))
        self.mix_size = nn.Parameter(torch.tensor([0.01]))

    @override
    def maps(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read, spread, mix = super().maps(h)
        moved = F.linear(self.stream_norm(h), self.map.to(h.dtype)).tanh()
        read = read + self.mix_size * moved[..., 0]
        spread = spread + self.spread_size * moved[..., 1]
        return read, spread, mix + self.mix_size * moved[..., 2:]


class _ManifoldResidual(nn.Module):
    def __init__(self, streams: int, site: Site, before: nn.Module, iterations: int) -> None:
        super().__init__()
        self.streams, self.before, self.iterations = streams, before, iterations
        self.map = nn.Parameter(torch.zeros(streams * (streams + 2), streams * site.width))
        self.size = nn.Parameter(torch.full((3,), 0.01))
        lean = torch.full((streams,), -2.0)
        lean[(site.sublayer - 1) % streams] = 2.0
        near_identity = -8.0 * (1 - torch.eye(streams))
        self.offset = nn.Parameter(torch.cat((lean, torch.zeros(streams), near_identity.flatten())))

    def maps(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute r ``[..., n]``, p ``[..., n]`` and M ``[..., n, n]`` for streams ``[..., n, width]``, in float32."""
        n = self.streams
        wide = h if h.dtype == torch.float64 else h.float()
        unit = F.rms_norm(wide.flatten(-2), (n * h.shape[-1],), eps=1e-20)
        sizes = self.size.repeat_interleave(torch.tensor((n, n, n * n), device=h.device), output_size=n * (n + 2))
        logits = sizes * F.linear(unit, self.map.to(unit.dtype)) + self.offset
        read, spread, mix = torch.split(logits, [n, n, n * n], dim=-1)
        return read.sigmoid(), 2 * spread.sigmoid(), sinkhorn(mix.view(*mix.shape[:-1], n, n), self.iterations)

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        read, spread, mix = (weights.to(h.dtype) for weights in self.maps(h))
        f = branch(self.before((read.unsqueeze(-1) * h).sum(dim=-2)))
        return spread.unsqueeze(-1) * f.unsqueeze(-2) + mix @ h
