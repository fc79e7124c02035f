r"""Placements on one stream. They fill in the one equation of :mod:`lightning_norms.model.residual`.

::

    y = closing( skip * x + scale * after( branch( before(x) ) ) )

Learned scalars are in :mod:`~lightning_norms.model.placements.learned_gates`, constants of depth in
:mod:`~lightning_norms.model.placements.depth_constants`, several streams in
:mod:`~lightning_norms.model.placements.two_streams` and its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.checks import check_number
from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Branch, Inner, Placement, Residual, Site
from lightning_norms.rescale_rules import DeepNormRescale, GPT2Rescale, SubNormRescale


@dataclass(frozen=True)
class PreNorm(Placement):
    """``x + f(N(x))``, and a final norm before the head.

    Trains at almost any depth and learning rate; late blocks change a growing stream less and less.

    Source: GPT-2 (Radford et al. 2019); analysed by Xiong et al. 2020, arXiv:2002.04745.
    """

    equation = "x + f(N x)"
    trade_off = "trains at almost any depth; late blocks change a growing stream less and less"
    final_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(before=norm(site.width))


@dataclass(frozen=True)
class PostNorm(Placement):
    """``N(x + f(x))``: the original Transformer. No final norm: the last sublayer ends with one.

    The stream keeps its size at every depth. Deep stacks die in the first steps without warmup and small branches.

    Args:
        final_norm: add a norm before the head all the same (two norms in a row), as some published comparisons do.

    Source: Vaswani et al. 2017, arXiv:1706.03762; GPT (Radford et al. 2018).
    """

    equation = "N(x + f(x))"
    trade_off = "the stream keeps its size; deep stacks die without warmup and small branches"

    final_norm: bool = False

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(closing=norm(site.width))


@dataclass(frozen=True)
class DeepNorm(Placement):
    """``N(alpha x + f(x))`` with the value path's weights times beta at the start.

    For L decoder blocks::

        alpha = (2L)^(1/4)        beta = (8L)^(-1/4)

    Bounds the size of the first updates whatever the depth: post-norm that trains cold (to 1,000 layers in the paper).

    Args:
        alpha: constant on the stream; None for the paper's.
        beta: factor on value, attention output and both feed-forward matrices, meant for a Xavier base
            (``initialization: Xavier``); None for the paper's.

    Raises:
        ValueError: if ``alpha`` or ``beta`` is not a finite number above 0.

    Source: Wang et al. 2022, arXiv:2203.00555, decoder-only column of table 1 there.
    """

    equation = "N(a x + f(x)), a = (2L)^(1/4), weights (8L)^(-1/4)"
    trade_off = "post-norm whose first updates are bounded"

    alpha: float | None = None
    beta: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if value is not None:
                check_number("DeepNorm", name, value, above=0)

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        alpha = (2 * site.layers) ** 0.25 if self.alpha is None else self.alpha
        return Residual(closing=norm(site.width), skip=alpha)

    @override
    def gain(self, site: Site) -> float:
        return DeepNormRescale().gain(site.layer, site.layers) if self.beta is None else self.beta


@dataclass(frozen=True)
class GLMDeepNorm(Placement):
    """:class:`DeepNorm`'s equation with the exponents of GLM-130B.

    For L decoder blocks::

        N(alpha x + f(x))        alpha = (2L)^(1/2)        weights of the value path times (2L)^(-1/2)

    A heavier stream than DeepNorm's; it trained a 130B model. The weights are meant for a Xavier base.

    Source: Zeng et al. 2022, arXiv:2210.02414.
    """

    equation = "N(a x + f(x)), a = (2L)^(1/2), weights 1/a"
    trade_off = "a heavier stream; trained a 130B model"

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(closing=norm(site.width), skip=(2 * site.layers) ** 0.5)

    @override
    def gain(self, site: Site) -> float:
        return GPT2Rescale().gain(site.layer, site.layers)


@dataclass(frozen=True)
class SubNorm(Placement):
    """Pre-norm with a second norm just before each sublayer's last matrix: Sub-LN, Magneto.

    ::

        x + W_o N(heads(N(x)))        x + W_2 N(act(W_1 N(x)))        weights of the value path times sqrt(ln 2L)

    The second norm bounds each update whatever the weights before it; costs d + d_ff gains more a block. The weights
    are meant for a Xavier base.

    Source: Wang et al. 2022, arXiv:2210.06423, decoder-only.
    """

    equation = "x + W N(...N x), weights sqrt(ln 2L)"
    trade_off = "bounded updates; d + d_ff gains more a block"
    final_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(before=norm(site.width))

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        return Inner(writer=norm(site.inner_width))

    @override
    def gain(self, site: Site) -> float:
        return SubNormRescale().gain(site.layer, site.layers)


@dataclass(frozen=True)
class Sandwich(Placement):
    """``x + N(f(N(x)))``: a norm on both sides of each sublayer, and a final norm.

    Every branch has the size of its last norm's gain, so the stream grows like the square root of depth; two norms more
    a block. Gemma 2 and 3, GLM-4 and others are built like this.

    Args:
        output_gain: start of the gains behind the sublayers; None for 1. Pangu Ultra and Trinity start them at about
            1/sqrt(L) (Yin et al. 2025, arXiv:2504.07866).

    Source: Ding et al. 2021 (CogView), arXiv:2105.13290.
    """

    equation = "x + N(f(N x))"
    trade_off = "every branch has the size of a gain; two norms more a block"
    final_norm = True

    output_gain: float | None = None

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        before, after = norm(site.width), norm(site.width)
        return Residual(before, after if self.output_gain is None else _start_gain(after, self.output_gain))


@dataclass(frozen=True)
class PeriNorm(Placement):
    """``x + N(f(N(x)))``, a final norm, and as an option a norm on the embedding: Peri-LN.

    Without the embedding norm, which the paper leaves open, this is :class:`Sandwich` at its defaults. At the start the
    stream's variance grows by 1 a sublayer, linearly. The outer norm is on the branch, before the sum.

    Args:
        embedding_norm: normalise the embedding too.

    Source: Kim et al. 2025, arXiv:2502.02732.
    """

    equation = "x + N(f(N x)), norm on the embedding as an option"
    trade_off = "stream variance grows by 1 a sublayer; without the option the same network as Sandwich"
    final_norm = True

    embedding_norm: bool = False

    @override
    def entry(self, width: int, norm: Norm) -> nn.Module:
        return norm(width) if self.embedding_norm else nn.Identity()

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Sandwich().wrap(site, norm)


@dataclass(frozen=True)
class OutputNorm(Placement):
    """``x + N(f(x))``: the norm is on the branch's output, nothing is on its input; a final norm. "Reordered norm".

    Not post-norm: the stream itself is never normalised. Needs qk-norm (``qk_norm: QKNorm``), without which gradients
    grow 29,000 times toward the bottom of 48 blocks (measured, benchmarks/init_profiles.md); the decoder warns.

    Source: OLMo 2 (Walsh et al. 2024), arXiv:2501.00656; also EXAONE 4.
    """

    equation = "x + N(f(x))"
    trade_off = "as cheap as pre-norm; needs qk-norm"
    final_norm = True
    wants_qk_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(after=norm(site.width))


@dataclass(frozen=True)
class ResPostNorm(Placement):
    """``x + N(f(x))`` with the norm's gain and bias starting at 0: every block starts as the identity; a final norm.

    Removes the growth of the stream at the start that :class:`OutputNorm` has; blocks wait for their gains to grow.

    Args:
        start: initial value of the gains.

    Source: Liu et al. 2021 (Swin v2), arXiv:2111.09883, and its code; there with normalised queries and keys.
    """

    equation = "x + N(f(x)), gains start at 0"
    trade_off = "starts as the identity; blocks wait for their gains"
    final_norm = True
    wants_qk_norm = True

    start: float = 0.0

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(after=_start_gain(norm(site.width), self.start))


@dataclass(frozen=True)
class KEEL(Placement):
    """``N(alpha x + f(N(x)))`` with alpha the number of sublayers: post-norm with a highway, and pre-norm inside.

    For L decoder blocks::

        alpha = 2L        but alpha = 1 in block 1, whose attention has no outer norm

    The shortcut's gradient passes all norms almost undiminished; the loss falls more slowly early on (in the paper,
    where norms are RMSNorm).

    Args:
        alpha: constant on the stream; None for the paper's.

    Raises:
        ValueError: if ``alpha`` is not a finite number above 0.

    Source: Chen, Wei 2026, arXiv:2601.19895.
    """

    equation = "N(2L x + f(N x))"
    trade_off = "passes gradients through all norms; learns more slowly early on (in the paper)"

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check_number("KEEL", "alpha", self.alpha, above=0)

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        alpha = float(2 * site.layers) if self.alpha is None else self.alpha
        return Residual(
            before=norm(site.width),
            closing=nn.Identity() if site.sublayer == 1 else norm(site.width),
            skip=1.0 if site.layer == 1 else alpha,
        )


@dataclass(frozen=True)
class HybridNorm(Placement):
    """Norms of q, k and v inside attention, and a feed-forward whose skip path is normalised; a final norm.

    ::

        x + W_o attention( N(q), N(k), N(v) )        q, k, v from x itself; one norm of a head's width for all heads
        N(x) + feed_forward( N(x) )

    Meant to combine pre-norm's stability with post-norm's quality (in the paper, up to 16 blocks). The stream is
    normalised once a block, so late blocks are not drowned.

    Source: Zhuo et al. 2025, arXiv:2503.04598, and its code.
    """

    equation = "x + att(Nq, Nk, Nv); N x + ff(N x)"
    trade_off = "one pass of the stream through a norm a block; tried to 16 blocks"
    final_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual() if site.kind == "attention" else Opened(norm(site.width), Residual())

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        if site.kind != "attention":
            return Inner()
        head_width = site.inner_width // site.heads
        return Inner(query=norm(head_width), key=norm(head_width), value=norm(head_width))


@dataclass(frozen=True)
class HybridNormStar(Placement):
    """:class:`HybridNorm` whose first block is pre-norm as well: HybridNorm*.

    ::

        block 1    x + W_o attention( N(q), N(k), N(v) of N(x) )    x + feed_forward( N(x) )       later as HybridNorm

    The first attention no longer sees a raw embedding; one norm more in the whole network.

    Source: Zhuo et al. 2025, arXiv:2503.04598, and its code.
    """

    equation = "HybridNorm, block 1 also pre-norm"
    trade_off = "the first attention sees no raw embedding"
    final_norm = True

    @override
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        return Residual(before=norm(site.width)) if site.layer == 1 else HybridNorm().wrap(site, norm)

    @override
    def inner(self, site: Site, norm: Norm) -> Inner:
        return HybridNorm().inner(site, norm)


class Opened(nn.Module):
    """``residual(opening(x), branch)``: a residual whose skip path, too, starts at the normalised stream."""

    def __init__(self, opening: nn.Module, residual: nn.Module) -> None:
        super().__init__()
        self.opening, self.residual = opening, residual

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """Normalise, then call the residual."""
        result: Tensor = self.residual(self.opening(x), branch)
        return result


@torch.no_grad()
def _start_gain(norm: nn.Module, start: float) -> nn.Module:
    """Fill the gain of a new norm; its bias is 0 anyway."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise ValueError(f"{type(norm).__name__} has no gain that could start at {start:g}: choose a norm with one.")
    weight.fill_(start)
    return norm
