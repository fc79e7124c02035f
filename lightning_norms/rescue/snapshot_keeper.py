"""The two moments that a run can go back to, its start and its last healthy step: taken, put back, checkpointed."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_norms.anatomy.sharding import grad_scaler, sharding_group
from lightning_norms.rescue.snapshot import Snapshot, find_averages


class SnapshotKeeper:
    """Keeps the start and one healthy snapshot of a run.

    Args:
        every_n_steps: optimizer steps between two snapshots of a healthy run.
        start_within: optimizer steps for which the start is kept.

    Attributes:
        start: the run before its first step; None once it is let go.
        healthy: the last moment that is known to be healthy; at first the start itself.
    """

    def __init__(self, every_n_steps: int, start_within: int) -> None:
        self.every_n_steps, self.start_within = every_n_steps, start_within
        self.start: Snapshot | None = None
        self.healthy: Snapshot | None = None
        self._is_sharded = False

    def watch(self, trainer: Any, module: nn.Module) -> None:
        """Look at what is to be kept: a sharded snapshot is of no use in a checkpoint, which rank 0 writes."""
        by_tensor = any(hasattr(parameter, "placements") for parameter in module.parameters())
        self._is_sharded = by_tensor or sharding_group(trainer.strategy.model) is not None

    def take(self, trainer: Any, module: nn.Module, step: int) -> Snapshot:
        """A snapshot of the run as it is, in the memory of the last healthy one where that is no longer needed."""
        return Snapshot.take(
            module,
            trainer.optimizers,
            step=step,
            scaler=grad_scaler(trainer),
            averages=find_averages(trainer.callbacks),
            reuse=None if self.healthy is self.start else self.healthy,
        )

    def keep_start(self, trainer: Any, module: nn.Module) -> Snapshot:
        """Take the run as it is now as its start, and as healthy."""
        self.start = self.healthy = self.take(trainer, module, step=0)
        return self.start

    def keep_healthy(self, trainer: Any, module: nn.Module, step: int) -> None:
        """Take the run as it is now as healthy."""
        self.healthy = self.take(trainer, module, step)

    def is_due(self, step: int) -> bool:
        """Whether a healthy run should be kept again at ``step``."""
        return self.healthy is None or step - self.healthy.step >= self.every_n_steps

    def step_taken(self, step: int) -> None:
        """Let go of the start when the time for it is over."""
        if step > self.start_within:
            self.start = None

    def put_back(self, trainer: Any, module: nn.Module, snapshot: Snapshot | None) -> tuple[str, ...]:
        """Put a kept snapshot back into the run; names of the parameters that it does not know."""
        assert snapshot is not None  # the ladder asks for what is there
        scaler = grad_scaler(trainer)
        return snapshot.restore(module, trainer.optimizers, scaler=scaler, averages=find_averages(trainer.callbacks))

    def forget(self) -> None:
        """Let go of the healthy snapshot; the start may still have to go into a checkpoint."""
        self.healthy = None

    def state_dict(self, run_is_healthy: bool) -> dict[str, Any]:
        """What a resumed run cannot take from the checkpoint itself.

        Args:
            run_is_healthy: then the checkpoint's own weights are the last healthy moment.
        """
        last: dict[str, Any] | str | None = None
        if self.healthy is not None and not self._is_sharded and not run_is_healthy:
            last = "start" if self.healthy is self.start else self.healthy.state_dict()
        start = None if self.start is None or self._is_sharded else self.start.state_dict()
        return {"start": start, "last_healthy": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; other keys are passed over."""
        self.start = None if state["start"] is None else Snapshot.from_state(state["start"])
        last = state["last_healthy"]
        self.healthy = self.start if last == "start" else Snapshot.from_state(last) if last else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "start": None, "healthy": None}
