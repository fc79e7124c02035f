"""Let an optimizer step that is under way move nothing, with or without a GradScaler.

Without gradients ``optimizer.step()`` changes no weight and no moment. A fused optimizer under a GradScaler refuses to
step without any; it skips on the device if the scaler finds an infinity, so one is put into one gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

CLIPPING = "configure_gradient_clipping"


class SkippedStep:
    """Takes the gradients of the step away; call :meth:`undo` after the step, or after an exception in it.

    Args:
        module: module whose ``configure_gradient_clipping`` is left out: torch cannot clip by value without gradients.
        optimizer: the optimizer whose step is under way, at ``on_before_optimizer_step``.
        scaler: the GradScaler, or None.
        keep_scale: whether the scaler must not back off, because the infinity that it finds is ours alone.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> before = layer.weight.item()
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> skipped = SkippedStep(layer, optimizer, None)
        >>> optimizer.step(), layer.weight.item() == before, len(optimizer.state)
        (None, True, 0)
        >>> skipped.undo()
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, scaler: Any, keep_scale: bool = True) -> None:
        self._attributes: dict[str, Any] = vars(module)
        self._clipping = self._attributes.get(CLIPPING)  # an attribute of the instance, which nearly no module has
        self._attributes[CLIPPING] = lambda *_, **__: None
        self._optimizer, self._scaler = optimizer, scaler
        self._scaler_state: dict[str, Any] | None = None
        self._stateless: Tensor | None = None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = None
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self._overflow(parameters, keep_scale)

    def undo(self) -> None:
        """Clip again; keep the scaler from backing off, and the optimizer's state as it was."""
        del self._attributes[CLIPPING]
        if self._clipping is not None:
            self._attributes[CLIPPING] = self._clipping
        if self._scaler_state is not None:
            self._scaler.load_state_dict(self._scaler_state)
            if self._stateless is not None:
                self._optimizer.state.pop(self._stateless, None)

    def _overflow(self, parameters: list[Tensor], keep_scale: bool) -> None:
        with_state = next((parameter for parameter in parameters if self._optimizer.state.get(parameter)), None)
        trainable = next(parameter for parameter in parameters if parameter.requires_grad)
        carrier = trainable if with_state is None else with_state
        carrier.grad = torch.full_like(carrier, torch.inf)
        if keep_scale:
            self._scaler_state = self._scaler.state_dict()
            self._stateless = trainable if with_state is None else None
