"""What a norm computes. A recipe (``RMSNorm(eps=1e-6)``) is called with a width and builds the module.

Where a norm sits is decided by :mod:`lightning_norms.model.placements`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Norm(ABC):
    """A recipe for norm modules: ``norm(width)`` builds a module over the last axis, with statistics in float32.

    Raises:
        ValueError: if a field ``eps`` is not a finite number >= 0, or a field ``alpha`` not a finite number > 0.
    """

    def __post_init__(self) -> None:
        eps, alpha = getattr(self, "eps", 0.0), getattr(self, "alpha", 0.5)
        if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
            raise ValueError(f"eps is {eps!r}, but a norm needs a finite number >= 0, for instance 1e-5.")
        if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise ValueError(f"alpha is {alpha!r}, but a steepness is a finite number > 0, for instance 0.5.")

    @abstractmethod
    def __call__(self, width: int) -> nn.Module:
        """Build a module that maps ``[..., width]`` to ``[..., width]`` and keeps the dtype."""


@dataclass(frozen=True)
class LayerNorm(Norm):
    r"""Centred and divided by the standard deviation, then a gain and a bias.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \cdot g + b

    Args:
        eps: added to the variance, so in the unit of x squared.
        gain: learn g (starts at 1). Off gives OLMo's weightless norm.
        bias: learn b (starts at 0). Needs ``gain``.

    Example:
        >>> import torch
        >>> LayerNorm(eps=0.0)(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [-1.069..., -0.534..., 0.0, 1.603...]

    Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450.
    """

    eps: float = 1e-5
    gain: bool = True
    bias: bool = True

    def __call__(self, width: int) -> nn.Module:
        """Build a :class:`torch.nn.LayerNorm`, whose kernels take float32 statistics of half-precision input."""
        return nn.LayerNorm(width, eps=self.eps, elementwise_affine=self.gain, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Norm):
    r"""Divided by the root mean square, then a gain.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot g

    Args:
        eps: added to the mean square, so in the unit of x squared.
        gain: learn g (starts at 1).

    Example:
        >>> import torch
        >>> RMSNorm(eps=0.0)(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [0.282..., 0.565..., 0.848..., 1.697...]

    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """

    eps: float = 1e-6
    gain: bool = True

    def __call__(self, width: int) -> nn.Module:
        """Build a :class:`torch.nn.RMSNorm` that also takes input of another dtype than its gain."""
        return _RMSNormModule(width, eps=self.eps, elementwise_affine=self.gain)


@dataclass(frozen=True)
class ScaleNorm(Norm):
    r"""Divided by its length, then one gain for all features.

    .. math:: y = g \, x / \lVert x \rVert_2

    With g at its start, ``sqrt(width)``, it is RMSNorm without gain; it learns one number where RMSNorm learns
    ``width``.

    Args:
        eps: smallest length to divide by.

    Example:
        >>> ScaleNorm()(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [0.282..., 0.565..., 0.848..., 1.697...]

    Source: Nguyen, Salazar 2019, arXiv:1910.05895.
    """

    eps: float = 1e-5

    def __call__(self, width: int) -> nn.Module:
        """Build a module with one learned number."""
        return _LengthNormModule(self.eps, start=width**0.5)


@dataclass(frozen=True)
class L2Norm(Norm):
    r"""Divided by its length, and nothing learned: the projection on the unit sphere.

    .. math:: y = x / \lVert x \rVert_2

    Args:
        eps: smallest length to divide by.

    Example:
        >>> L2Norm()(2)(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])

    Source: Loshchilov et al. 2024 (nGPT), arXiv:2410.01131.
    """

    eps: float = 1e-12

    def __call__(self, width: int) -> nn.Module:
        """Build a module without parameters."""
        return _LengthNormModule(self.eps, start=None)


@dataclass(frozen=True)
class DyT(Norm):
    r"""Dynamic tanh: squashed feature by feature, no statistics at all.

    .. math:: y = g \tanh(\alpha x) + b

    It does not undo the size of its input, so depth is only as stable as the stream is bounded.

    Args:
        alpha: initial value of the learned steepness.

    Example:
        >>> DyT()(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [0.462..., 0.761..., 0.905..., 0.995...]

    Source: Zhu et al. 2025, arXiv:2503.10622.
    """

    alpha: float = 0.5

    def __call__(self, width: int) -> nn.Module:
        """Build a module with gain and bias for each feature and one steepness."""
        return _SquashNormModule(width, torch.tanh, self.alpha, shifts=False)


@dataclass(frozen=True)
class Derf(Norm):
    r"""Dynamic erf: as :class:`DyT` with the error function and a learned shift.

    .. math:: y = g \operatorname{erf}(\alpha x + s) + b

    It does not undo the size of its input, so depth is only as stable as the stream is bounded.

    Args:
        alpha: initial value of the learned steepness; the shift s starts at 0.

    Example:
        >>> Derf()(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [0.520..., 0.842..., 0.966..., 0.999...]

    Source: Chen et al. 2025, arXiv:2512.10938.
    """

    alpha: float = 0.5

    def __call__(self, width: int) -> nn.Module:
        """Build a module with gain and bias for each feature, one steepness and one shift."""
        return _SquashNormModule(width, torch.erf, self.alpha, shifts=True)


class _RMSNormModule(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        # torch leaves its fused kernel, with a warning, for bfloat16 from autocast and a float32 gain.
        gain = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, gain, self.eps)


class _LengthNormModule(nn.Module):
    """``weight * x / max(|x|, eps)``, the length in float32."""

    def __init__(self, eps: float, start: float | None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = None if start is None else nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        unit = F.normalize(wide, dim=-1, eps=self.eps).to(x.dtype)
        return unit if self.weight is None else self.weight.to(x.dtype) * unit


class _SquashNormModule(nn.Module):
    """``weight * squash(alpha * x + shift) + bias``."""

    def __init__(self, width: int, squash: Callable[[Tensor], Tensor], alpha: float, shifts: bool) -> None:
        super().__init__()
        self.squash = squash
        self.alpha = nn.Parameter(torch.tensor([alpha]))
        self.shift = nn.Parameter(torch.zeros(1)) if shifts else None
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.alpha * x if self.shift is None else self.alpha * x + self.shift
        return (self.weight * self.squash(inside) + self.bias).to(x.dtype)
