"""Designs that carry two tensors, through a block or the stack: parallel, B2T, ResiDual, SiameseNorm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Branch, Placement, Site

Two = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ParallelBlock(Placement):
    """``x + attention(N(x)) + feed_forward(N(x))``: both sublayers read the block's input; a final norm.

    ::

            +-- N -- attention ----+
        x --+-- N -- feed-forward -(+)-- y        one norm for both, or one each
            +-----------------------^

    Both input matrices can run as one; the feed-forward does not see what attention has just written.

    Args:
        norms: number of norms a block: 1 (GPT-J, Phi, Cohere) or 2 (GPT-NeoX).

    Raises:
        ValueError: for any other number of norms.

    Source: Wang, Komatsuzaki 2021 (GPT-J), code; Black et al. 2022 (GPT-NeoX), arXiv:2204.06745.
    """

    equation = "x + att(N x) + ff(N x)"
    trade_off = "both sublayers at once; the feed-forward does not see attention"
    final_norm = True

    norms: int = 1

    def __post_init__(self) -> None:
        if self.norms not in (1, 2):
            raise ValueError(f"ParallelBlock's norms is {self.norms!r}: a parallel block has 1 norm or 2.")

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        if site.kind == "attention":
            return _ParallelFirst(norm(site.width), shared=self.norms == 1)
        return _ParallelSecond(norm(site.width) if self.norms == 2 else nn.Identity())


class _ParallelFirst(nn.Module):
    """Returns the sum so far, and the feed-forward's input."""

    def __init__(self, before: nn.Module, shared: bool) -> None:
        super().__init__()
        self.before, self.shared = before, shared

    def forward(self, x: Tensor, branch: Branch) -> Two:
        normed = self.before(x)
        return x + branch(normed), normed if self.shared else x


class _ParallelSecond(nn.Module):
    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before = before

    def forward(self, stream: Two, branch: Branch) -> Tensor:
        total, x = stream
        return total + branch(self.before(x))


@dataclass(frozen=True)
class B2T(Placement):
    """Post-norm with a bottom-to-top path: the block's input b passes by every norm of the block but the last.

    ::

        x = N(b + attention(b))        y = N(x + feed_forward(x) + b)

    Gradients reach the bottom through one norm a block instead of two; still post-norm, so still in need of care.

    Args:
        rescale: start the blocks' weights smaller by sqrt(L), the released code's option.

    Source: Takase et al. 2022, arXiv:2206.00330.
    """

    equation = "y = N(b + att(b)); N(y + ff(y) + b)"
    trade_off = "one norm a block on the way down, still post-norm"

    rescale: bool = False

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _KeepsBottom(norm(site.width)) if site.kind == "attention" else _AddsBottom(norm(site.width))

    @override
    def gain(self, site: Site) -> float:
        return float(site.layers**-0.5) if self.rescale else 1.0

    @override
    def query_key_gain(self, site: Site) -> float:
        return self.gain(site)


class _KeepsBottom(nn.Module):
    def __init__(self, closing: nn.Module) -> None:
        super().__init__()
        self.closing = closing

    def forward(self, b: Tensor, branch: Branch) -> Two:
        return self.closing(b + branch(b)), b


class _AddsBottom(nn.Module):
    def __init__(self, closing: nn.Module) -> None:
        super().__init__()
        self.closing = closing

    def forward(self, stream: Two, branch: Branch) -> Tensor:
        x, b = stream
        result: Tensor = self.closing(x + branch(x) + b)
        return result


@dataclass(frozen=True)
class ResiDual(Placement):
    """Two streams from one set of sublayers: x as in post-norm, r the plain sum as in pre-norm.

    ::

        f = F(x)      x = N(x + f)      r = r + f            at the end  x + N(r)

    r gives gradients a path without norms, x keeps late layers from doing nothing (both in the paper); costs one more
    tensor of activations.

    Source: Xie et al. 2023, arXiv:2304.14802.
    """

    equation = "x = N(x + f), r = r + f; x + N(r)"
    trade_off = "a path without norms beside post-norm; one tensor more"

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return _Twice()

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return _DualResidual(norm(site.width))

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return _DualExit(norm(width))


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Two:
        return x, x


class _DualResidual(nn.Module):
    def __init__(self, closing: nn.Module) -> None:
        super().__init__()
        self.closing = closing

    def forward(self, stream: Two, branch: Branch) -> Two:
        x, total = stream
        f = branch(x)
        return self.closing(x + f), total + f


class _DualExit(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: Two) -> Tensor:
        x, total = stream
        result: Tensor = x + self.norm(total)
        return result


@dataclass(frozen=True)
class SiameseNorm(Placement):
    """Two streams that share every sublayer: x is normalised like post-norm's, y never, like pre-norm's.

    ::

        x = N(x)     f = F( N(x + N(y)) )     x = x + f / c     y = y + f    c = sqrt(2l)    at the end  N(N(x) + N(y))

    Meant to keep pre-norm's stability and post-norm's use of depth; three norms a sublayer. The form of the authors'
    vision models: the one in their language models learns c in part and shares norms.

    Source: Li et al. 2026, arXiv:2602.08064, and its code.
    """

    equation = "x = N x; f = F(N(x + N y)); x + f/sqrt(2l), y + f"
    trade_off = "pre- and post-norm at once; three norms a sublayer"

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return _Twice()

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        post, pre, joint = (norm(site.width) for _ in range(3))
        return _SiameseResidual(post, pre, joint, share=(2 * site.layer) ** -0.5)

    @override
    def exit(self, width: int, norm: Norm) -> nn.Module:
        return _SiameseExit(norm(width), norm(width), norm(width))


class _SiameseResidual(nn.Module):
    def __init__(self, post: nn.Module, pre: nn.Module, joint: nn.Module, share: float) -> None:
        super().__init__()
        self.post, self.pre, self.joint, self.share = post, pre, joint, share

    def forward(self, stream: Two, branch: Branch) -> Two:
        x, y = self.post(stream[0]), stream[1]
        f = branch(self.joint(x + self.pre(y)))
        return x + self.share * f, y + f


class _SiameseExit(nn.Module):
    def __init__(self, post: nn.Module, pre: nn.Module, joint: nn.Module) -> None:
        super().__init__()
        self.post, self.pre, self.joint = post, pre, joint

    def forward(self, stream: Two) -> Tensor:
        result: Tensor = self.joint(self.post(stream[0]) + self.pre(stream[1]))
        return result
