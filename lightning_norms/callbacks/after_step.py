"""Call ``after_step()`` of the modules that change with time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_norms.anatomy.sharding import is_deepspeed, parts_with


class AfterStep(Callback):
    """Calls ``after_step()`` of every submodule that has such a method, after each step of the optimizer.

    ::

        optimizer.step()  ->  module.after_step()  for module in pl_module.modules()

    For placements such as ``ProRes``, whose branches open while training. A step is one that the optimizer took: a
    window of accumulated batches counts once, a step that the GradScaler skips does not count. With several optimizers
    the steps of the first one count. The callback has no state: modules keep their counts in their own buffers.

    Raises:
        ValueError: when training starts under DeepSpeed, if there is such a submodule.

    Example:
        >>> trainer = Trainer(callbacks=[AfterStep()], logger=False, enable_checkpointing=False)
    """

    calls_after_step: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._hooks = ExitStack()
        self._within = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_fit_end(trainer, pl_module)
        parts = parts_with(pl_module, "after_step")
        if parts and is_deepspeed(trainer.strategy):
            raise ValueError(
                "AfterStep: DeepSpeed steps an optimizer of its own, so a placement that changes with every step would "
                "stand still."
            )
        if parts and trainer.optimizers:
            optimizer = trainer.optimizers[0]
            self._hooks.callback(optimizer.register_step_pre_hook(lambda *_: self._begin()).remove)
            self._hooks.callback(optimizer.register_step_post_hook(lambda *_: self._end(parts)).remove)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()
        self._within = 0

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def _begin(self) -> None:
        self._within += 1

    def _end(self, parts: list[Any]) -> None:
        # An optimizer whose step() calls super().step() ends twice in one step.
        self._within -= 1
        if self._within == 0:
            for part in parts:
                part.after_step()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": ExitStack(), "_within": 0}
