"""Let an optimizer step that is under way move nothing, with or without a GradScaler.

Without gradients ``optimizer.step()`` changes no weight and no moment. They are taken away at the last moment before
the step, behind every callback's and the module's own ``on_before_optimizer_step``, so that hooks that read gradients
find those of the step::

    callbacks' hooks -> module's hook -> gradients go -> (clipping is left out) -> optimizer.step()

An optimizer that is not torch's may count such a step, or expect gradients: it gets zeros, and is put back after it.

A fused optimizer under a GradScaler refuses to step without any gradient; it skips on the device if the scaler finds an
infinity, so one is put into one gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.rescue.optimizer_parts import accepts_no_gradient, is_torchs_own
from lightning_norms.rescue.snapshot import Snapshot

HOOK, CLIPPING = "on_before_optimizer_step", "configure_gradient_clipping"


class SkippedStep:
    """Takes the gradients of the step away when its last hook has run; call :meth:`undo` after the step.

    Args:
        module: the LightningModule. Its ``configure_gradient_clipping`` is not called for this step: torch cannot clip
            by value without gradients, and people's own may refuse those that are not finite.
        optimizer: the optimizer whose step is under way, at a callback's ``on_before_optimizer_step``.
        scaler: the GradScaler, or None.
        keep_scale: whether the scaler must not back off, because the infinity that it finds is ours alone.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> module = LightningModule()
        >>> module.layer = nn.Linear(1, 1)
        >>> optimizer = torch.optim.AdamW(module.parameters())
        >>> module.layer(torch.ones(1, 1)).sum().backward()
        >>> skipped = SkippedStep(module, optimizer, None)
        >>> module.on_before_optimizer_step(optimizer)  # Lightning does
        >>> module.layer.weight.grad is None
        True
        >>> skipped.undo()
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, scaler: Any, keep_scale: bool = True) -> None:
        self._module, self._attributes = module, vars(module)
        # Attributes of the instance, which nearly no module has.
        self._instance_hooks = {name: self._attributes[name] for name in (HOOK, CLIPPING) if name in self._attributes}
        self._module_hook = getattr(module, HOOK, None)
        self._attributes |= {HOOK: self._last_hook, CLIPPING: lambda *_, **__: None}
        self._optimizer, self._scaler, self._keep_scale = optimizer, scaler, keep_scale
        self._scaler_state: dict[str, Any] | None = None
        self._stateless: Tensor | None = None
        self._before: Snapshot | None = None

    def undo(self) -> None:
        """Give the module its hooks back; keep the scaler from backing off, and the optimizer's state as it was."""
        if self._before is not None:
            self._before.restore(self._module, [self._optimizer])
        for name in (HOOK, CLIPPING):
            self._attributes.pop(name, None)
        self._attributes |= self._instance_hooks
        if self._scaler_state is not None:
            self._scaler.load_state_dict(self._scaler_state)
            if self._stateless is not None:
                self._optimizer.state.pop(self._stateless, None)

    def _last_hook(self, optimizer: Optimizer) -> None:
        if self._module_hook is not None:
            self._module_hook(optimizer)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if not is_torchs_own(self._optimizer):
            self._before = Snapshot.take(self._module, [self._optimizer])
        are_zeros = not accepts_no_gradient(self._optimizer)
        for parameter in parameters:
            is_zero = are_zeros and parameter.grad is not None
            parameter.grad = torch.zeros_like(parameter.grad) if is_zero else None
        if self._scaler is not None and getattr(self._optimizer, "_step_supports_amp_scaling", False):
            self._overflow(parameters)

    def _overflow(self, parameters: list[Tensor]) -> None:
        with_state = next((parameter for parameter in parameters if self._optimizer.state.get(parameter)), None)
        trainable = next(parameter for parameter in parameters if parameter.requires_grad)
        carrier = trainable if with_state is None else with_state
        carrier.grad = torch.full_like(carrier, torch.inf)
        if self._keep_scale:
            self._scaler_state = self._scaler.state_dict()
            self._stateless = trainable if with_state is None else None
