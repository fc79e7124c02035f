"""Profile Admin's omegas on the first real batches, before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_norms.anatomy.sharding import is_deepspeed, is_flattened, parts_with, reshard


class AdminProfile(Callback):
    """Runs the first training batch once without training, and lets Admin's residuals set their omegas from it.

    ::

        first batch -> training_step, no gradient -> omega_(i+1)^2 = omega_i^2 + Var(f_i) / Var(x_i) -> train

    It talks to every submodule that has ``begin_profile()`` and ``end_profile(omega)``, in the order in which they
    stand. Once in the life of the weights: never on a resume, a second fit, or without such a submodule. Ranks profile
    on rank 0's batch, so all agree.

    Raises:
        ValueError: before the first step, if there is something to profile and the strategy holds its weights
            elsewhere (DeepSpeed, FSDP1).

    Example:
        >>> trainer = Trainer(callbacks=[AdminProfile()], logger=False, enable_checkpointing=False)

    Source: Liu et al. 2020, arXiv:2004.08249.
    """

    def __init__(self) -> None:
        super().__init__()
        self._omegas: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before the very first step only."""
        if self._omegas or trainer.global_step > 0:
            return
        parts: list[Any] = parts_with(pl_module, "begin_profile")
        if not parts:
            return
        _refuse(trainer.strategy)
        reshard(pl_module)
        for part in parts:
            part.begin_profile()
        with torch.random.fork_rng(), torch.no_grad(), _not_logging(pl_module):
            pl_module.training_step(batch, batch_idx)
        reshard(pl_module)
        omegas = [1.0]
        for part in parts:
            omegas.append(trainer.strategy.broadcast(part.end_profile(omegas[-1])))
        self._omegas = omegas[:-1]
        rank_zero_info(f"AdminProfile: {len(parts)} omegas from {omegas[0]:.4g} to {omegas[-2]:.4g}.")

    @override
    def state_dict(self) -> dict[str, Any]:
        """The omegas that were set: plain numbers."""
        return {"omegas": list(self._omegas)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A resumed run is not profiled again."""
        self._omegas = list(state_dict["omegas"])


def _refuse(strategy: Any) -> None:
    name = "DeepSpeed" if is_deepspeed(strategy) else "FSDP1" if is_flattened(strategy.model) else ""
    if name:
        raise ValueError(
            f"AdminProfile: {name} keeps the weights elsewhere, so omegas cannot be set here: train with ddp or FSDP2 "
            "(ModelParallelStrategy), or leave AdminProfile out for omega = 1."
        )


@contextmanager
def _not_logging(module: LightningModule) -> Iterator[None]:
    """What ``training_step`` logs here belongs to no step."""
    names = ("log", "log_dict")
    for name in names:
        module.__dict__[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]
