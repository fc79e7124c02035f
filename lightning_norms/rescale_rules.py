"""How much smaller a residual branch starts: factor on its matrices as a pure function of depth.

Every rule is a frozen dataclass with one method, ``gain(layer, layers)``. Adding a rule is adding a class here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RescaleRule(ABC):
    """A factor for the matrices of one block."""

    whole_value_path: ClassVar[bool] = False
    """False: only the two matrices that write into the stream. True: also value and MLP up (DeepNorm)."""

    @abstractmethod
    def gain(self, layer: int, layers: int) -> float:
        """The factor for block ``layer`` (1-based) of ``layers``."""


@dataclass(frozen=True)
class GPT2Rescale(RescaleRule):
    r"""Keeps the stream's variance at init independent of depth: each of the 2L branches adds 1/(2L) of it.

    .. math:: W_\text{writer} \leftarrow W_\text{writer} / \sqrt{2L}

    Example:
        >>> round(GPT2Rescale().gain(layer=1, layers=48), 5)
        0.10206

    Source:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """

    def gain(self, layer: int, layers: int) -> float:
        """1 / sqrt(2 layers), the same in every block."""
        return 1 / math.sqrt(2 * layers)


@dataclass(frozen=True)
class DepthRescale(RescaleRule):
    r"""Starts deeper blocks smaller: the depth form of DS-Init.

    .. math:: W_\text{writer} \leftarrow W_\text{writer} / \sqrt{l}

    Example:
        >>> DepthRescale().gain(layer=1, layers=48), DepthRescale().gain(layer=4, layers=48)
        (1.0, 0.5)

    Source:
        Zhang, Titov, Sennrich 2019, "Improving Deep Transformer with Depth-Scaled Initialization", arXiv:1908.11365.
    """

    def gain(self, layer: int, layers: int) -> float:
        """1 / sqrt(layer)."""
        return float(layer**-0.5)


@dataclass(frozen=True)
class DeepNormRescale(RescaleRule):
    r"""DeepNorm's init for a single stack; its other half, alpha on the skip path, is a placement.

    .. math:: W \leftarrow \beta W, \quad \beta = (8L)^{-1/4}, \quad W \in \{\text{value, output, fc1, fc2}\}

    Query and key are left alone; of a fused qkv matrix only the value third changes.

    Example:
        >>> round(DeepNormRescale().gain(layer=1, layers=24), 5)
        0.26864

    Source:
        Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers", arXiv:2203.00555.
    """

    whole_value_path: ClassVar[bool] = True

    def gain(self, layer: int, layers: int) -> float:
        """(8 layers) ** -1/4, the same in every block."""
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

    Source:
        Huang et al. 2020 (ICML), "Improving Transformer Optimization Through Better Initialization", and its code.
    """

    whole_value_path: ClassVar[bool] = True

    def gain(self, layer: int, layers: int) -> float:
        """(9 layers) ** -1/4, the same in every block."""
        return math.pow(9 * layers, -0.25)


@dataclass(frozen=True)
class SubNormRescale(RescaleRule):
    r"""Magneto's gain for its inner norms; above 1 from two blocks on.

    .. math:: W \leftarrow \sqrt{\ln 2L}\, W, \quad W \in \{\text{value, output, fc1, fc2}\}

    Meant for a Xavier base and the placement ``SubNorm``, which has it already.

    Example:
        >>> round(SubNormRescale().gain(layer=1, layers=48), 4)
        2.1364

    Source:
        Wang et al. 2022, "Foundation Transformers", arXiv:2210.06423, decoder-only.
    """

    whole_value_path: ClassVar[bool] = True

    def gain(self, layer: int, layers: int) -> float:
        """sqrt(ln(2 layers)), the same in every block."""
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

    Source:
        Liu et al. 2020, "Understanding the Difficulty of Training Transformers", arXiv:2004.08249.
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.variance, int | float) or not 0 < self.variance < math.inf:
            raise ValueError(f"AdminRescale: variance must be a finite number above 0, got {self.variance!r}")

    def gain(self, layer: int, layers: int) -> float:
        """1 / omega of the block."""
        return 1 / math.sqrt(1 + self.variance * (2 * layer - 1.5))


@dataclass(frozen=True)
class ConstantRescale(RescaleRule):
    """A factor of your own on every writer.

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
        number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        if not number or not math.isfinite(self.factor) or self.factor <= 0:
            raise ValueError(f"ConstantRescale: factor must be a finite number above 0, got {self.factor!r}")

    def gain(self, layer: int, layers: int) -> float:
        """The given factor."""
        return float(self.factor)
