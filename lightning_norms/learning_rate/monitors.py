"""Show the effective learning rate to ``LearningRateMonitor``, and to nobody else."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.learning_rate.registry import all_factors_of


class ShowFactors(Callback):
    """Applies the factors right before ``LearningRateMonitor`` reads the learning rate."""

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for factors in all_factors_of(trainer.optimizers):
            factors.show()


class HideFactors(Callback):
    """Removes the factors right after ``LearningRateMonitor`` has read the effective learning rate.

    Otherwise they would still be applied where other callbacks and manual optimization write learning rates.
    """

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for factors in all_factors_of(trainer.optimizers):
            factors.hide()


def show_to_monitors(trainer: Any, callback: Callback) -> list[Callback]:
    """Insert callbacks around every ``LearningRateMonitor`` after ``callback``, and return them for removal."""
    own = trainer.callbacks.index(callback)
    monitors = [c for c in trainer.callbacks[own + 1 :] if has_class_name(c, "LearningRateMonitor")]
    inserted: list[Callback] = []
    for monitor in monitors:
        at = trainer.callbacks.index(monitor)
        pair = [ShowFactors(), HideFactors()]
        trainer.callbacks[at : at + 1] = [pair[0], monitor, pair[1]]
        inserted += pair
    return inserted
