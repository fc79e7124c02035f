"""Measure Admin's omegas on the first training batch, before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_norms.anatomy.sharding import parts_with, reshard, weight_keeper


class AdminProfile(Callback):
    """Runs the first training batch once without training, from which Admin's residuals set their omegas.

    ::

        first batch -> training_step, no gradient -> omega_(i+1)^2 = omega_i^2 + Var(f_i) / Var(x_i) -> train

    It calls ``begin_profile()`` and ``end_profile(omega)`` of every submodule that has them, in the order in which they
    were registered. Weights are profiled exactly once: never on a resume or in a second fit. All ranks take the omegas
    of rank 0.

    Raises:
        ValueError: before the first step, under DeepSpeed or FSDP1, if there is something to profile.

    Example:
        >>> trainer = Trainer(callbacks=[AdminProfile()], logger=False, enable_checkpointing=False)

    Source: Liu et al. 2020, arXiv:2004.08249.
    """

    def __init__(self) -> None:
        super().__init__()
        self._omegas: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._omegas or trainer.global_step > 0:
            return
        parts: list[Any] = parts_with(pl_module, "begin_profile")
        if not parts:
            return
        keeper = weight_keeper(trainer.strategy)
        if keeper is not None:
            raise ValueError(
                f"AdminProfile: {keeper} keeps the weights elsewhere, so omegas cannot be set here: train with ddp or "
                "FSDP2 (ModelParallelStrategy), or leave AdminProfile out for omega = 1."
            )
        reshard(pl_module)
        for part in parts:
            part.begin_profile()
        with torch.random.fork_rng(), torch.no_grad(), _without_logging(pl_module):
            pl_module.training_step(batch, batch_idx)
        reshard(pl_module)
        omegas = [1.0]
        for part in parts:
            omegas.append(trainer.strategy.broadcast(part.end_profile(omegas[-1])))
        self._omegas = omegas[:-1]
        rank_zero_info(f"AdminProfile: {len(parts)} omegas from {omegas[0]:.4g} to {omegas[-2]:.4g}.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"omegas": list(self._omegas)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._omegas = list(state_dict["omegas"])


@contextmanager
def _without_logging(module: LightningModule) -> Iterator[None]:
    # What `training_step` logs here belongs to no step.
    silent = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
    module.__dict__.update(silent)
    try:
        yield
    finally:
        for name in silent:
            del module.__dict__[name]
