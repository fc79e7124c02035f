"""On resume the configuration wins over what a checkpoint says of the optimizers."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_norms.learning_rate import KeepsConfiguration, configured_of


class ConfigurationWins(KeepsConfiguration):
    """Sets learning rates and other numbers of the optimizers that are configured otherwise than in the checkpoint."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        configured_of(trainer).apply(trainer)
