"""The two moments that a run can go back to, its start and its last healthy step: taken, put back, checkpointed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_norms.anatomy.sharding import grad_scaler, sharding_group
from lightning_norms.rescue.averages import find_averages
from lightning_norms.rescue.live_state import LiveState
from lightning_norms.rescue.optimizer_parts import unreachable_state
from lightning_norms.rescue.snapshot import Snapshot

FIRST_STEPS = 10
"""Steps to the first snapshot after the start, whose loss may be as high as a ruined run's."""


class SnapshotKeeper:
    """Keeps the start and one healthy snapshot of a run.

    Args:
        trainer: the Lightning Trainer.
        module: its LightningModule.
        every_n_steps: optimizer steps between two snapshots of a healthy run.
        start_within: optimizer steps for which the start is kept.

    Attributes:
        start: the run before its first step; None once it is let go.
        healthy: the last moment that is known to be healthy; at first the start itself.
    """

    def __init__(self, trainer: Any, module: nn.Module, every_n_steps: int, start_within: int) -> None:
        self.start: Snapshot | None = None
        self.healthy: Snapshot | None = None
        self._trainer, self._module = trainer, module
        self._is_lazy = self._has_warned = False
        self._every_n_steps, self._start_within = every_n_steps, start_within
        # A sharded snapshot is of no use in a checkpoint, which rank 0 writes.
        by_tensor = any(hasattr(parameter, "placements") for parameter in module.parameters())
        self._is_sharded = by_tensor or sharding_group(trainer.strategy.model) is not None

    @property
    def ways_back(self) -> dict[str, int]:
        """The steps that can be gone back to, by action."""
        steps = {} if self.healthy is None else {"rollback": self.healthy.step}
        return steps if self.start is None else {**steps, "restart": 0}

    def keep_start(self) -> Snapshot:
        """Take the run as it is now as its start, and as healthy."""
        self._is_lazy = any(is_lazy(parameter) for parameter in self._module.parameters())
        self.start = self.healthy = self._take(step=0)
        return self.start

    def complete_start(self) -> None:
        """Take the start again at the first step if lazy modules had no weights before their first batch."""
        if self.start is not None and self._is_lazy:
            self.keep_start()

    def keep_healthy(self, step: int) -> None:
        """Take the run as it is now, after ``step`` optimizer steps, as healthy."""
        self.healthy = self._take(step)
        self.name_what_stays()

    def name_what_stays(self) -> None:
        """Warn once of the state of optimizers that no way leads to, as far as their own ``state_dict`` tells."""
        if self._has_warned:
            return
        live = LiveState(self._module, self._trainer.optimizers)
        for optimizer in self._trainer.optimizers:
            names = unreachable_state(optimizer, list(live.entries.values()))
            if names:
                self._has_warned = True
                rank_zero_warn(
                    f"LRFallback: {type(optimizer).__name__} keeps tensors that a rollback cannot put back: "
                    f"{', '.join(names)} in its state_dict(). Keep them in optimizer.state or as attributes of it."
                )

    def is_due(self, step: int) -> bool:
        """Whether a healthy run is to be kept again: every n steps, and in the beginning at steps 10, 20, 40, ..."""
        if self.healthy is None:
            return True
        last = self.healthy.step
        return step - last >= self._every_n_steps or max(FIRST_STEPS, 2 * last) <= step < last + self._every_n_steps

    def step_taken(self, step: int) -> None:
        """Let go of the start when the time for it is over."""
        if step > self._start_within:
            self.start = None

    def go_back(self, action: str, keep_gradients: bool = False) -> tuple[str, ...]:
        """Put the start ("restart") or the last healthy moment ("rollback") back, and take it as healthy.

        Returns:
            Names of the trainable parameters that it does not hold.
        """
        self.healthy = self.start if action == "restart" else self.healthy
        assert self.healthy is not None  # the ladder asks for what is there
        optimizers = self._trainer.optimizers
        return self.healthy.restore(self._module, optimizers, keep_gradients=keep_gradients, **self._more())

    def live_weights(self) -> Iterator[Tensor]:
        """Yield the trained weights and their averages as they are."""
        callbacks = self._trainer.callbacks
        live = LiveState(self._module, self._trainer.optimizers, find_averages(callbacks), owners=callbacks)
        kinds = ("parameter", "average", "copy")
        return (value for key, value in live.entries.items() if key.kind in kinds and isinstance(value, Tensor))

    def state_dict(self, run_is_healthy: bool) -> dict[str, Any]:
        """Return what a resumed run cannot take from the checkpoint itself, whose weights are healthy if the run is."""
        last: dict[str, Any] | str | None = None
        if self.healthy is not None and not self._is_sharded and not run_is_healthy:
            last = "start" if self.healthy is self.start else self.healthy.state_dict()
        start = None if self.start is None or self._is_sharded else self.start.state_dict()
        return {"start": start, "last_healthy": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; other keys are ignored."""
        self.start = None if state["start"] is None else Snapshot.from_state(state["start"])
        last = state["last_healthy"]
        self.healthy = self.start if last == "start" else Snapshot.from_state(last) if last else None

    def _take(self, step: int) -> Snapshot:
        """Copy the run into the memory of the last healthy snapshot, unless that is the start."""
        reuse = None if self.healthy is self.start else self.healthy
        return Snapshot.take(self._module, self._trainer.optimizers, step=step, reuse=reuse, **self._more())

    def _more(self) -> dict[str, Any]:
        callbacks = self._trainer.callbacks
        return {"scaler": grad_scaler(self._trainer), "averages": find_averages(callbacks), "owners": callbacks}
