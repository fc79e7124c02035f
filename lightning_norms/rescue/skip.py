"""Let an optimizer step that is under way move nothing, with or without a GradScaler.

Without gradients ``optimizer.step()`` changes no weight and no moment. A fused optimizer under a GradScaler refuses to
step without any; it skips on the device if the scaler finds an infinity, so one is put into one gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Overflow:
    """How to undo an infinity that was put into a gradient.

    Args:
        scaler: the scaler's state before.
        optimizer: the optimizer whose step it was.
        without_state: the parameter that carries it, if it had no optimizer state before.
    """

    scaler: dict[str, Any]
    optimizer: Optimizer
    without_state: Tensor | None

    def undo(self, scaler: Any) -> None:
        """Keep the scaler, after the step, from backing off for an infinity that was ours."""
        scaler.load_state_dict(self.scaler)
        if self.without_state is not None:
            self.optimizer.state.pop(self.without_state, None)


def skip_step(optimizer: Optimizer, scaler: Any) -> Overflow | None:
    """Take the gradients of the step away; return what to undo after it, if anything.

    Args:
        optimizer: the one whose step is under way, at ``on_before_optimizer_step``.
        scaler: the GradScaler, or None.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> weight.grad = torch.ones(1)
        >>> skip_step(optimizer, None)
        >>> optimizer.step(), weight.item(), len(optimizer.state)
        (None, 1.0, 0)
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = None
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return None
    with_state = next((parameter for parameter in parameters if optimizer.state.get(parameter)), None)
    trainable = next(parameter for parameter in parameters if parameter.requires_grad)
    carrier = trainable if with_state is None else with_state
    carrier.grad = torch.full_like(carrier, torch.inf)
    return Overflow(scaler.state_dict(), optimizer, trainable if with_state is None else None)


CLIPPING = "configure_gradient_clipping"


class NoClipping:
    """Leaves out Lightning's clipping of the step under way: torch cannot clip by value where there is no gradient.

    Args:
        pl_module: the module whose ``configure_gradient_clipping`` is not called until :meth:`undo`.
    """

    def __init__(self, pl_module: Any) -> None:
        self._attributes: dict[str, Any] = vars(pl_module)
        self._own = self._attributes.get(CLIPPING)  # an attribute of the instance, which nearly no module has
        self._attributes[CLIPPING] = lambda *_, **__: None

    def undo(self) -> None:
        """Clip again, after the step or after an exception in it."""
        del self._attributes[CLIPPING]
        if self._own is not None:
            self._attributes[CLIPPING] = self._own
