"""Do weights in half precision still move at a lower learning rate, or is every update rounded away?"""

from __future__ import annotations

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_norms.anatomy.sharding import to_local

FEW = 0.05
"""Share of the weights that move below which a step is worth a warning."""

SAMPLE = 4096
"""Number of weights of each parameter that are compared."""


class RoundedUpdates:
    """Compares a sample of an optimizer's half-precision weights before and after one update.

    Args:
        optimizer: the optimizer that is about to update, with its gradients.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer = torch.optim.SGD([weight], lr=1e-4)
        >>> updates = RoundedUpdates(optimizer)
        >>> optimizer.step()
        >>> updates.share_moved()
        0.0
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        owned: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        half = [p for p in owned if p.dtype in (torch.bfloat16, torch.float16) and p.grad is not None]
        self._weights = half
        self._before = [_sample(parameter).clone() for parameter in half]
        self._has_gradient = [_sample(parameter.grad) != 0 for parameter in half if parameter.grad is not None]

    @torch.no_grad()
    def share_moved(self) -> float | None:
        """Share of the weights with a gradient that have moved; None without such weights."""
        moved = total = 0
        for weight, before, has_gradient in zip(self._weights, self._before, self._has_gradient, strict=True):
            moved += int(((_sample(weight) != before) & has_gradient).sum())
            total += int(has_gradient.sum())
        return moved / total if total else None

    def warn(self, rate: float) -> bool:
        """Say if nearly no weight has moved at this learning rate; whether that was said."""
        share = self.share_moved()
        is_small = share is not None and share < FEW and rate > 0
        if is_small:
            name = str(self._weights[0].dtype).removeprefix("torch.")
            rank_zero_warn(
                f"the lowered learning rate, {rate:.3g}, is too small for {name} weights: {share:.1%} of them moved in "
                "this step, the other updates were rounded away. Train with bf16-mixed, which keeps float32 weights."
            )
        return is_small


def _sample(tensor: Tensor) -> Tensor:
    return to_local(tensor.detach()).flatten()[:SAMPLE]
