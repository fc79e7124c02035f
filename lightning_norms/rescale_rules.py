"""Rescale rules: the factor on a residual branch's initial weights as a pure function of depth.

A new rule is one frozen dataclass with one method, ``gain(layer, layers)``. Placements with the same constants take
them from here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from lightning_norms.checks import check_number


@dataclass(frozen=True)
class RescaleRule(ABC):
    """A recipe for the factor on one block's matrices."""

    whole_value_path: ClassVar[bool] = False
    """Whether the factor applies to value and MLP up as well (DeepNorm), not only to the two writers."""

    @abstractmethod
    def gain(self, layer: int, layers: int) -> float:
        """Compute the factor for block ``layer`` (1-based) of ``layers``."""


@dataclass(frozen=True)
class GPT2Rescale(RescaleRule):
    r"""Keeps the stream's variance at init independent of depth: each of the 2L branches adds 1/(2L) of it.

    .. math:: W_\text{writer} \leftarrow W_\text{writer} / \sqrt{2L}

    Example:
        >>> round(GPT2Rescale().gain(layer=1, layers=48), 5)
        0.10206

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """

    @override
    def gain(self, layer: int, layers: int) -> float:
        return 1 / math.sqrt(2 * layers)


@dataclass(frozen=True)
class DepthRescale(RescaleRule):
    r"""Starts deeper blocks smaller: the depth form of DS-Init.

    .. math:: W_\text{writer} \leftarrow W_\text{writer} / \sqrt{l}

    Example:
        >>> DepthRescale().gain(layer=1, layers=48), DepthRescale().gain(layer=4, layers=48)
        (1.0, 0.5)

    Source: Zhang, Titov, Sennrich 2019, "Improving Deep Transformer with Depth-Scaled Initialization",
    arXiv:1908.11365.
    """

    @override
    def gain(self, layer: int, layers: int) -> float:
        return float(layer**-0.5)


@dataclass(frozen=True)
class DeepNormRescale(RescaleRule):
    r"""DeepNorm's init for a single stack; its other half, alpha on the skip path, is a placement.

    .. math:: W \leftarrow \beta W, \quad \beta = (8L)^{-1/4}, \quad W \in \{\text{value, output, fc1, fc2}\}

    Query and key are left alone; of a fused qkv matrix only the value third changes.

    Example:
        >>> round(DeepNormRescale().gain(layer=1, layers=24), 5)
        0.26864

    Source: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers", arXiv:2203.00555.
    """

    whole_value_path: ClassVar[bool] = True

    @override
    def gain(self, layer: int, layers: int) -> float:
        return math.pow(8 * layers, -0.25)


@dataclass(frozen=True)
class TFixupRescale(RescaleRule):
    r"""T-Fixup's init: small enough to train without norms.

    .. math:: W \leftarrow (9L)^{-1/4} W, \quad W \in \{\text{value, output, fc1, fc2}\}

    The constant is that of a decoder with cross-attention; for a decoder alone it is a cautious choice of ours. Meant
    for a Xavier base.

    Example:
        >>> round(TFixupRescale().gain(layer=1, layers=48), 4)
        0.2193

    Source: Huang et al. 2020 (ICML), "Improving Transformer Optimization Through Better Initialization", and its code.
    """

    whole_value_path: ClassVar[bool] = True

    @override
    def gain(self, layer: int, layers: int) -> float:
        return math.pow(9 * layers, -0.25)


@dataclass(frozen=True)
class SubNormRescale(RescaleRule):
    r"""Magneto's gain for its inner norms; above 1 from two blocks on.

    .. math:: W \leftarrow \sqrt{\ln 2L}\, W, \quad W \in \{\text{value, output, fc1, fc2}\}

    Meant for a Xavier base and the placement ``SubNorm``, which has it already.

    Example:
        >>> round(SubNormRescale().gain(layer=1, layers=48), 4)
        2.1364

    Source: Wang et al. 2022, "Foundation Transformers", arXiv:2210.06423, decoder-only.
    """

    whole_value_path: ClassVar[bool] = True

    @override
    def gain(self, layer: int, layers: int) -> float:
        return math.sqrt(math.log(2 * layers))


@dataclass(frozen=True)
class AdminRescale(RescaleRule):
    r"""Admin without its profile: branches as small as its omega makes them, if every branch adds variance v to a 1.

    .. math:: W_\text{writer} \leftarrow W_\text{writer} / \omega_l, \quad \omega_l^2 = 1 + v \, (2l - 3/2)

    Behind a norm, ``omega x + f`` and ``x + f / omega`` are the same. Sublayers i = 2l - 1 and 2l have
    :math:`\omega^2 = 1 + v (i - 1)`; a block takes their mean. For post-norm; the placement ``Admin`` measures instead.

    Args:
        variance: v, of a branch's output at init on a stream of variance 1.

    Raises:
        ValueError: the variance is not a finite number above 0.

    Example:
        >>> round(AdminRescale().gain(layer=1, layers=48), 4), round(AdminRescale().gain(layer=48, layers=48), 4)
        (0.8165, 0.1023)

    Source: Liu et al. 2020, "Understanding the Difficulty of Training Transformers", arXiv:2004.08249.
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        check_number("AdminRescale", "variance", self.variance, above=0)

    @override
    def gain(self, layer: int, layers: int) -> float:
        return 1 / math.sqrt(1 + self.variance * (2 * layer - 1.5))


@dataclass(frozen=True)
class ConstantRescale(RescaleRule):
    """A constant factor on every writer.

    Args:
        factor: finite and above 0.

    Raises:
        ValueError: the factor is not a finite number above 0.

    Example:
        >>> ConstantRescale(0.5).gain(layer=3, layers=12)
        0.5
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("ConstantRescale", "factor", self.factor, above=0)

    @override
    def gain(self, layer: int, layers: int) -> float:
        return float(self.factor)
