"""What a norm computes. A recipe (``RMSNorm(eps=1e-6)``) is called with a width and gives the module.

WHERE a norm sits is the business of :mod:`lightning_norms.model.placements`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Norm(ABC):
    """A recipe for norm modules: ``norm(width)`` gives a module over the last axis, statistics in float32."""

    @abstractmethod
    def __call__(self, width: int) -> nn.Module:
        """A module that maps ``[..., width]`` to ``[..., width]`` and keeps the dtype."""


@dataclass(frozen=True)
class LayerNorm(Norm):
    r"""Centred and divided by the standard deviation, then a gain and a bias.

    .. math:: y = \frac{x - \operatorname{mean}(x)}{\sqrt{\operatorname{var}(x) + \epsilon}} \cdot g + b

    Args:
        eps: added to the variance, so in the unit of x squared.
        gain: learn g (starts at 1). Off gives OLMo's weightless norm.
        bias: learn b (starts at 0). Needs ``gain``.

    Raises:
        ValueError: if ``eps`` is negative or not finite.

    Example:
        >>> import torch
        >>> LayerNorm(eps=0.0)(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [-1.069..., -0.534..., 0.0, 1.603...]

    Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450.
    """

    eps: float = 1e-5
    gain: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, width: int) -> nn.Module:
        """A :class:`torch.nn.LayerNorm`, whose kernels take float32 statistics of half-precision input."""
        return nn.LayerNorm(width, eps=self.eps, elementwise_affine=self.gain, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(Norm):
    r"""Divided by the root mean square, then a gain.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot g

    Args:
        eps: added to the mean square, so in the unit of x squared.
        gain: learn g (starts at 1).

    Raises:
        ValueError: if ``eps`` is negative or not finite.

    Example:
        >>> import torch
        >>> RMSNorm(eps=0.0)(4)(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
        [0.282..., 0.565..., 0.848..., 1.697...]

    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """

    eps: float = 1e-6
    gain: bool = True

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, width: int) -> nn.Module:
        """A :class:`torch.nn.RMSNorm` that also takes input of another dtype than its gain."""
        return _RMSNormModule(width, eps=self.eps, elementwise_affine=self.gain)


class _RMSNormModule(nn.RMSNorm):
    """torch's RMSNorm leaves its fused kernel, with a warning, for bfloat16 from autocast and a float32 gain."""

    def forward(self, x: Tensor) -> Tensor:
        gain = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, gain, self.eps)


def _check_eps(eps: float) -> None:
    if not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps!r}, but a norm needs a finite number >= 0, for instance 1e-5.")
