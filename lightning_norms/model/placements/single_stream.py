r"""Where norms sit on one stream: every such design side by side, each one word of a configuration.

All of them fill in the one equation of :mod:`lightning_norms.model.residual`::

    y = closing( skip * x + scale * after( branch( before(x) ) ) )

Designs with learned scalars are in :mod:`~lightning_norms.model.placements.learned_gates`, with several streams in
:mod:`~lightning_norms.model.placements.two_streams` and its neighbours, constants of depth in
:mod:`~lightning_norms.model.placements.depth_constants`; :mod:`~lightning_norms.model.placements.catalogue` has them
all in one table. A new placement is one class here, or anywhere: the class is the registry entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Branch, Inner, Placement, Residual, Site


@dataclass(frozen=True)
class PreNorm(Placement):
    """``x + f(N(x))``, and a final norm before the head.

    Trains at almost any depth and learning rate; late blocks change a growing stream less and less.

    Source: GPT-2 (Radford et al. 2019); analysed by Xiong et al. 2020, arXiv:2002.04745.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """The norm is on the branch's input."""
        return Residual(before=norm(site.width))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """The stream itself was never normalised, so a final norm is."""
        return norm(width)


@dataclass(frozen=True)
class PostNorm(Placement):
    """``N(x + f(x))``: the original Transformer. No final norm: the last sublayer ends with one.

    The stream keeps its size at every depth. Deep stacks die in the first steps without warmup and small branches.

    Args:
        final_norm: add one before the head all the same (two norms in a row), as some published comparisons do.

    Source: Vaswani et al. 2017, arXiv:1706.03762; GPT (Radford et al. 2018).
    """

    final_norm: bool = False

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """The norm is on the sum."""
        return Residual(closing=norm(site.width))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """Nothing, unless asked for."""
        return norm(width) if self.final_norm else nn.Identity()


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

    Source: Wang et al. 2022, arXiv:2203.00555, decoder-only column of table 1 there.
    """

    alpha: float | None = None
    beta: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"DeepNorm's {name} is {value!r}: give a finite number > 0, or null for the paper's.")

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Post-norm with a heavier stream."""
        alpha = (2 * site.layers) ** 0.25 if self.alpha is None else self.alpha
        return Residual(closing=norm(site.width), skip=alpha)

    def gain(self, site: Site) -> float:
        """Beta."""
        return (8 * site.layers) ** -0.25 if self.beta is None else self.beta


@dataclass(frozen=True)
class GLMDeepNorm(Placement):
    """:class:`DeepNorm`'s equation with the exponents of GLM-130B.

    For L decoder blocks::

        N(alpha x + f(x))        alpha = (2L)^(1/2)        weights of the value path times (2L)^(-1/2)

    A heavier stream than DeepNorm's, on the record as the one that trained a 130B model; not the constants of DeepNet.

    Source: Zeng et al. 2022, arXiv:2210.02414.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Post-norm with a heavier stream."""
        return Residual(closing=norm(site.width), skip=(2 * site.layers) ** 0.5)

    def gain(self, site: Site) -> float:
        """``(2L)^(-1/2)``, meant for a Xavier base."""
        return float((2 * site.layers) ** -0.5)


@dataclass(frozen=True)
class SubNorm(Placement):
    """Pre-norm with a second norm just before each sublayer's last matrix: Sub-LN, Magneto.

    ::

        x + W_o N(heads(N(x)))        x + W_2 N(act(W_1 N(x)))        weights of the value path times sqrt(ln 2L)

    The second norm bounds each update whatever the weights before it; costs d + d_ff gains more a block.

    Source: Wang et al. 2022, arXiv:2210.06423, decoder-only.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Pre-norm."""
        return Residual(before=norm(site.width))

    def inner(self, site: Site, norm: Norm) -> Inner:
        """A norm of what the writer reads."""
        return Inner(writer=norm(site.inner_width))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)

    def gain(self, site: Site) -> float:
        """``sqrt(ln 2L)``, meant for a Xavier base."""
        return math.sqrt(math.log(2 * site.layers))


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

    output_gain: float | None = None

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Norms around the branch."""
        after = norm(site.width)
        return Residual(
            before=norm(site.width), after=after if self.output_gain is None else _gain(after, self.output_gain)
        )

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class PeriNorm(Placement):
    """``x + N(f(N(x)))``, a final norm, and if wanted a norm of the embedding: Peri-LN.

    The sandwich, studied for language models: at the start the stream's variance grows by 1 a sublayer, linearly.
    The outer norm is on the branch, before the sum. Two norms more a block than pre-norm.

    Args:
        embedding_norm: normalise the embedding too.

    Source: Kim et al. 2025, arXiv:2502.02732.
    """

    embedding_norm: bool = False

    def entry(self, width: int, norm: Norm) -> nn.Module:
        """A norm, if wanted."""
        return norm(width) if self.embedding_norm else nn.Identity()

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Norms around the branch."""
        return Residual(before=norm(site.width), after=norm(site.width))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class OutputNorm(Placement):
    """``x + N(f(x))``: the norm is on the branch's output, nothing is on its input; a final norm. "Reordered norm".

    Not post-norm: the stream itself is never normalised. Needs qk-norm (``qk_norm: QKNorm``), without which gradients
    grow 29,000 times toward the bottom of 48 blocks (measured, benchmarks/init_profiles.md); the decoder warns.

    Source: OLMo 2 (Walsh et al. 2024), arXiv:2501.00656; also EXAONE 4.
    """

    @property
    def wants_qk_norm(self) -> bool:
        """Attention reads the stream as it is."""
        return True

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """A norm behind the branch."""
        return Residual(after=norm(site.width))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class ResPostNorm(Placement):
    """``x + N(f(x))`` with the norm's gain and bias starting at 0: every block starts as the identity; a final norm.

    Removes the growth of the stream at the start that :class:`OutputNorm` has; blocks wait for their gains to grow.

    Args:
        start: of the gains.

    Source: Liu et al. 2021 (Swin v2), arXiv:2111.09883, and its code; there with normalised queries and keys.
    """

    start: float = 0.0

    @property
    def wants_qk_norm(self) -> bool:
        """Attention reads the stream as it is."""
        return True

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """A norm behind the branch, silent at first."""
        return Residual(after=_gain(norm(site.width), self.start))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class KEEL(Placement):
    """``N(alpha x + f(N(x)))`` with alpha the number of sublayers: post-norm with a highway, and pre-norm inside.

    For L decoder blocks::

        alpha = 2L        but alpha = 1 in block 1, whose attention has no outer norm

    The shortcut's gradient passes all norms almost undiminished; the loss falls more slowly early on (in the paper,
    where norms are RMSNorm).

    Args:
        alpha: constant on the stream; None for the paper's.

    Source: Chen, Wei 2026, arXiv:2601.19895.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise ValueError(f"KEEL's alpha is {self.alpha!r}: give a finite number > 0, or null for the paper's.")

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """An inner and an outer norm, and the exceptions of block 1."""
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

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Nothing around attention; a norm in front of the whole feed-forward residual."""
        return Residual() if site.kind == "attention" else Opened(norm(site.width), Residual())

    def inner(self, site: Site, norm: Norm) -> Inner:
        """Norms of queries, keys and values."""
        if site.kind != "attention":
            return Inner()
        head_width = site.inner_width // site.heads
        return Inner(query=norm(head_width), key=norm(head_width), value=norm(head_width))

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


@dataclass(frozen=True)
class HybridNormStar(Placement):
    """:class:`HybridNorm` whose first block is pre-norm as well: HybridNorm*.

    ::

        block 1    x + W_o attention( N(q), N(k), N(v) of N(x) )    x + feed_forward( N(x) )       later as HybridNorm

    The first attention no longer sees a raw embedding; one norm more in the whole network.

    Source: Zhuo et al. 2025, arXiv:2503.04598, and its code.
    """

    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """Pre-norm in block 1."""
        return Residual(before=norm(site.width)) if site.layer == 1 else HybridNorm().wrap(site, norm)

    def inner(self, site: Site, norm: Norm) -> Inner:
        """As :class:`HybridNorm`."""
        return HybridNorm().inner(site, norm)

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """A final norm."""
        return norm(width)


class Opened(nn.Module):
    """A residual behind a norm: its skip path too sees the normalised stream.

    Args:
        opening: the norm.
        residual: called as ``residual(opening(x), branch)``.
    """

    def __init__(self, opening: nn.Module, residual: nn.Module) -> None:
        super().__init__()
        self.opening, self.residual = opening, residual

    def forward(self, x: Tensor, branch: Branch) -> Tensor:
        """The norm, then the residual."""
        result: Tensor = self.residual(self.opening(x), branch)
        return result


@torch.no_grad()
def _gain(norm: nn.Module, start: float) -> nn.Module:
    """The same norm with another start of its gain; a bias is 0 anyway."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise ValueError(f"{type(norm).__name__} has no gain that could start at {start:g}: choose a norm with one.")
    weight.fill_(start)
    return norm
