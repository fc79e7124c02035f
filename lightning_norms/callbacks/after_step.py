"""Call ``after_step()`` of the modules that change with time."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.sharding import is_deepspeed, parts_with
from lightning_norms.learning_rate import TakenSteps, UnseenSteps


class AfterStep(Callback):
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

    def __init__(self) -> None:
        super().__init__()
        self._steps: TakenSteps | None = None
        self._unseen: UnseenSteps | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_fit_end(trainer, pl_module)
        parts = parts_with(pl_module, "after_step")
        if parts and is_deepspeed(trainer.strategy):
            raise ValueError(
                "AfterStep: DeepSpeed steps an optimizer of its own, so a placement that changes with every step would "
                "stand still."
            )
        if parts:
            self._steps = TakenSteps(lambda: _call(parts))
            self._steps.follow(trainer.optimizers[:1])
            self._unseen = UnseenSteps(pl_module, "AfterStep", "after_step() is not called")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._steps is not None:
            self._steps.follow(trainer.optimizers[:1])

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._steps is not None:
            self._steps.follow(trainer.optimizers[:1], stepping=optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps is not None and self._unseen is not None:
            self._unseen.end_batch(trainer, self._steps.count)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._steps.leave()
        self._steps = self._unseen = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": None, "_unseen": None}


def _call(parts: list[Any]) -> None:
    for part in parts:
        part.after_step()
