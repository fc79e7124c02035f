r"""Where norms sit: every placement side by side, each one word of a configuration (``placement: DeepNorm``).

All of them fill in the one equation of :mod:`lightning_norms.model.residual`::

    y = closing( skip * x + scale * after( branch( before(x) ) ) )

====================  ==================  ===========  =====================  =================
placement             sublayer            norms        last norm              constants
====================  ==================  ===========  =====================  =================
:class:`PreNorm`      x + f(N(x))         2 a block    final norm             1, 1
:class:`PostNorm`     N(x + f(x))         2 a block    the last sublayer's    1, 1
:class:`DeepNorm`     N(a x + f(x))       2 a block    the last sublayer's    a = (2L)^(1/4)
====================  ==================  ===========  =====================  =================

A new placement is one class here, or anywhere: the class is the registry entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from lightning_norms.model.norms import Norm
from lightning_norms.model.residual import Inner, Residual, Site


@dataclass(frozen=True)
class Placement(ABC):
    """A recipe that says where norms sit; the decoder asks it and knows no names.

    The stream between ``entry`` and ``exit`` is opaque to the decoder: a design with several streams may make it a
    tuple or a stacked tensor.
    """

    @abstractmethod
    def wrap(self, site: Site, norm: Norm) -> nn.Module:
        """The residual around one sublayer, called as ``residual(x, branch)``."""

    def entry(self, width: int, norm: Norm) -> nn.Module:
        """From the embedding to the stream."""
        return nn.Identity()

    def exit(self, width: int, norm: Norm) -> nn.Module:
        """From the stream to what the head reads."""
        return nn.Identity()

    def inner(self, site: Site, norm: Norm) -> Inner:
        """Norms inside the sublayer: on queries, keys, values, before the writer."""
        return Inner()

    def gain(self, site: Site) -> float:
        """Factor on the value path's weights at initialization."""
        return 1.0


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
