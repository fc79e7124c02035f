"""On resume the configuration wins over what a checkpoint says of the optimizers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_norms.learning_rate import configured_of


class ConfigurationWins(Callback):
    """Sets learning rates and other numbers of the optimizers that are configured otherwise than in the checkpoint."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        configured_of(trainer).remember(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        configured_of(trainer).apply(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        configured_of(trainer).save(checkpoint)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        configured_of(trainer).load(checkpoint)
