"""Call ``after_step()`` of the modules that change with time."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_norms.anatomy.sharding import is_deepspeed, parts_with
from lightning_norms.learning_rate import ActsAfterSteps


class AfterStep(ActsAfterSteps):
    """Calls ``after_step()`` of every submodule that has such a method, after each step of the optimizer.

    ::

        optimizer.step()  ->  module.after_step()  for module in pl_module.modules()

    For placements such as ``ProRes``, whose branches open while training. A step is one that the optimizer took: a
    window of accumulated batches counts once, a step that the GradScaler or ``LRFallback`` skips does not count. With
    several optimizers the steps of the first one count. The callback has no state: modules keep their counts in their
    own buffers.

    Raises:
        ValueError: when training starts under DeepSpeed, if there is such a submodule.

    Example:
        >>> trainer = Trainer(callbacks=[AfterStep()], logger=False, enable_checkpointing=False)
    """

    calls_after_step: ClassVar[bool] = True
    first_only = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = parts_with(pl_module, "after_step")
        if parts and is_deepspeed(trainer.strategy):
            raise ValueError(
                "AfterStep: DeepSpeed steps an optimizer of its own, so a placement that changes with every step would "
                "stand still."
            )
        if parts:
            self.begin(trainer, pl_module, lambda: _call(parts), "after_step() is not called")


def _call(parts: list[Any]) -> None:
    for part in parts:
        part.after_step()
