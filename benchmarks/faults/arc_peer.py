"""arc-training 5.2 as a peer, by its public interface. It is AGPL: this runs in an environment of its own."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.faults.columns import Guard


class ControllerCallback(Callback):
    """Calls ``Controller.step(loss)`` between backward and the optimizer's step, as arc's README does in a plain loop.

    A step that it wants left out gets no gradients, which for torch's optimizers is no step.
    """

    def __init__(self) -> None:
        self.controller: Any = None
        self._loss: Tensor | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from arc import Controller, ControllerConfig  # type: ignore[import-not-found]

        schedules = trainer.lr_scheduler_configs
        scaled = str(trainer.precision).startswith("16")  # as arc's own callback for Lightning does
        self.controller = Controller(
            pl_module,
            trainer.optimizers[0],
            scheduler=schedules[0].scheduler if schedules else None,
            config=ControllerConfig(verbose=False, external_grad_scaler=scaled),
        )

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if getattr(optimizer, "_optimizer", optimizer) is not self.controller.optimizer:
            return
        if self.controller.step(self._loss).should_skip:
            for weight in pl_module.parameters():
                weight.grad = None


def _guard(callback: Any) -> Guard:
    def counts() -> dict[str, int]:
        controller = callback.controller
        done = {"rollback": controller.total_rollbacks, "skip": controller.total_skips} if controller else {}
        return {name: count for name, count in done.items() if count}

    def flagged() -> bool:
        return callback.controller is not None and bool(callback.controller.unrecoverable)

    return Guard([callback], counts=counts, flagged=flagged)


def controller_guard() -> Guard:
    """The Controller."""
    return _guard(ControllerCallback())


def callback_guard() -> Guard:
    """The callback for Lightning."""
    from arc.api.integrations import LightningCallback  # type: ignore[import-not-found]

    warnings.filterwarnings("ignore", module="arc")
    return _guard(LightningCallback(verbose=False))
