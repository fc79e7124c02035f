"""Carry out what was decided about a step: skip it, roll the run back, restart it. Every rank does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_norms.anatomy.fresh_weights import already_scaled, looks_trained
from lightning_norms.anatomy.rescaling import is_rescaled, mark_rescaled, matrices_of, rescale
from lightning_norms.anatomy.sharding import grad_scaler, is_deepspeed
from lightning_norms.anatomy.writers import Matrix
from lightning_norms.learning_rate import factors_of, follow
from lightning_norms.rescale_rules import RescaleRule
from lightning_norms.rescue.buffers import BufferKeeper
from lightning_norms.rescue.checkpoint_guard import CheckpointGuard
from lightning_norms.rescue.counterfactual import Comparison, Replay
from lightning_norms.rescue.rescue import Decision, Rescue
from lightning_norms.rescue.skip import SkippedStep
from lightning_norms.rescue.snapshot_keeper import SnapshotKeeper

NAME = "fallback"


class Intervention:
    """Acts on one fit: holds the learning rate factors, the snapshots and the buffers that acting needs.

    ::

        begin -> (act -> end_step) every step -> leave

    Args:
        trainer: the Lightning Trainer, when its fit starts.
        module: its LightningModule.
        rescue: what decides; it is told when the run is put back.
        every_n_steps: optimizer steps between two snapshots of a healthy run.
        start_within: optimizer steps for which the start is kept.
        rule: factors for the residual writers at a restart, or None.
        pattern: regular expression for the names of these writers.

    Raises:
        ValueError: if the run cannot be acted on.
    """

    def __init__(
        self,
        trainer: Any,
        module: nn.Module,
        rescue: Rescue,
        *,
        every_n_steps: int,
        start_within: int,
        rule: RescaleRule | None,
        pattern: str | None,
    ) -> None:
        _refuse(trainer)
        self._trainer, self._module, self._rescue = trainer, module, rescue
        self.snapshots = SnapshotKeeper(trainer, module, every_n_steps, start_within)
        self._rule, self._pattern = rule, pattern
        self._factors = [factors_of(optimizer) for optimizer in trainer.optimizers]
        if any(NAME in factors.names() for factors in self._factors):  # a subclass, which Lightning tells apart
            raise ValueError("LRFallback: another LRFallback acts in this run already; keep one of them in the Trainer")
        self._replay = Replay(trainer, module)
        self._buffers: BufferKeeper | None = None
        self._rescaled = False
        self._skipped: SkippedStep | None = None
        self._guard: CheckpointGuard | None = None
        self._begun = self._begun_before = 0  # calls of optimizer.step(), also at the last look at gradients
        self._counted: list[Any] = []
        self._handles: list[Any] = []

    def begin(self, before_checkpoint: Callable[[bool], None]) -> None:
        """Put the factor on the learning rate, and keep what may be gone back to.

        Args:
            before_checkpoint: called before a checkpoint is made, with True for one of the weights only.
        """
        for factors in self._factors:
            factors.set(NAME, self.factor)
        self._count_steps()
        self._guard = CheckpointGuard(self._trainer, before_checkpoint)
        if self._rescue.dry_run:
            return
        self._buffers = BufferKeeper(self._module)
        if self._rule is not None:
            self._matrices(self._rule)  # the error about a model in which nothing is found belongs here
        if self._rescue.state.steps == 0:
            size = in_units(self.snapshots.keep_start().bytes)
            rank_zero_info(f"LRFallback: keeps the start, {size}, and later one healthy snapshot.")
            self.snapshots.name_what_stays()
        elif self.snapshots.healthy is None and not self._rescue.watch.stall.is_suspicious():
            self.snapshots.keep_healthy(self._rescue.state.steps)

    def leave(self) -> None:
        """Leave the optimizers and the module as they were."""
        for factors in self._factors:
            factors.remove(NAME)
        for handle in self._handles:
            handle.remove()
        if self._guard is not None:
            self._guard.leave()
        self._undo_skip()

    def keep_buffers(self) -> None:
        """Take the buffers as they are: a skipped step goes back to them."""
        if self._buffers is not None:
            self._buffers.keep()

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Remember the batch, in case that its loss must be compared."""
        self._replay.keep_batch(batch, batch_idx)

    def compare(self) -> Comparison | None:
        """Losses of the present batch on the present weights and on the snapshot's; None if it cannot be told."""
        healthy = self.snapshots.healthy
        return None if healthy is None else self._replay.compare(healthy)

    def is_second_look(self, optimizer: Optimizer) -> bool:
        """Whether these are the gradients of a second loss within one ``optimizer.step()``."""
        is_counted = any(optimizer is counted for counted in self._counted)
        return is_counted and grad_scaler(self._trainer) is None and 0 < self._begun == self._begun_before

    def begin_step(self, optimizer: Optimizer) -> None:
        """Count the step that is under way again: a GradScaler may not even have begun the one before."""
        self._undo_skip()
        self._factors = follow(self._factors, self._trainer.optimizers, stepping=optimizer)
        self._count_steps()
        self._begun_before = self._begun
        if self._rescue.state.steps == 0:
            self.snapshots.complete_start()
        for factors in self._factors:
            factors.cancel_step(False)

    def act(self, decision: Decision, optimizer: Optimizer) -> None:
        """Carry out a decision about the step that ``optimizer`` is about to take."""
        action, finding = decision.action, decision.finding
        if action == "leave":
            return
        if action in ("accept", "take", "go_on"):
            if decision.trusts_weights:
                self.snapshots.keep_healthy(decision.step)
            self.keep_buffers()
        elif action == "skip" and self._buffers is not None:
            self._buffers.put_back()
        elif action in ("rollback", "restart"):
            self.go_back(action, keep_gradients=True)  # until the last hook of this step
        if action in ("skip", "rollback", "restart"):
            is_overflow = action == "skip" and finding is not None and finding.cause == "non_finite"
            self._skip(optimizer, keep_scale=not is_overflow)

    def end_step(self) -> None:
        """Undo, after the step, what only its skipping needed; keep a snapshot of a healthy run when it is due."""
        self._undo_skip()
        steps = self._rescue.state.steps
        self.snapshots.step_taken(steps)
        is_due = not self._rescue.dry_run and self._rescue.is_healthy and self.snapshots.is_due(steps)
        if is_due:
            self.snapshots.keep_healthy(steps)
        self._replay.drop_batch(is_healthy=is_due)

    def go_back(self, action: str, keep_gradients: bool = False) -> None:
        """Put a snapshot back: the healthy one for "rollback", the start for "restart", whose warmup begins again."""
        self._rescue.go_back(action)
        names = self.snapshots.go_back(action, keep_gradients)
        if names:
            rank_zero_info(f"LRFallback: not in the snapshot, so left as they are: {', '.join(names)}")
        if action == "restart":
            for factors in self._factors:
                factors.clock = 0  # a Warmup callback's schedule starts again
            if self._rule is not None and not is_rescaled(self._module):
                self._rescale(self._rule)

    def metrics(self) -> dict[str, float]:
        """Return the numbers for loggers."""
        return self._rescue.metrics(self.factor(self._clock))

    def factor(self, clock: int) -> float:
        """Return the factor on the learning rate; after a restart a ``Warmup`` callback climbs again by itself."""
        has_warmup = any("warmup" in factors.names() for factors in self._factors)
        return self._rescue.factor(clock, ramp=not has_warmup)

    def are_weights_finite(self) -> bool:
        """Whether all weights that are trained, and all averages of them, are finite, on every rank."""
        is_bad = not all(bool(value.isfinite().all()) for value in self.snapshots.live_weights())
        return not self._trainer.strategy.reduce_boolean_decision(is_bad, all=False)

    def keep_checkpoint(self) -> None:
        """Take what a checkpoint is about to hold as healthy, as a resumed run can go back to its checkpoint only."""
        if self._rescue.is_healthy and not self._rescue.dry_run:
            self.snapshots.keep_healthy(self._rescue.state.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, the snapshots that a checkpoint needs, and whether a restart has rescaled; plain."""
        snapshots = self.snapshots.state_dict(self._rescue.is_healthy)
        return {"clock": self._clock, "rescaled": self._rescaled, **snapshots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood; other keys are ignored."""
        self._rescaled = state["rescaled"]
        if self._rescaled:
            mark_rescaled(self._module)
        for factors in self._factors:
            if "warmup" not in factors.names():
                factors.clock = state["clock"]
        self.snapshots.load_state_dict(state)

    def _count_steps(self) -> None:
        """Count the steps that the optimizers begin, also of those that were made anew in mid-run."""
        optimizers = list(self._trainer.optimizers)
        if [*map(id, optimizers)] == [*map(id, self._counted)]:
            return
        for handle in self._handles:
            handle.remove()
        self._counted = optimizers
        self._handles = [optimizer.register_step_pre_hook(self._step_begins) for optimizer in optimizers]

    def _step_begins(self, *_: Any) -> None:
        self._begun += 1

    @property
    def _clock(self) -> int:
        return next((factors.clock for factors in self._factors), 0)

    def _skip(self, optimizer: Optimizer, keep_scale: bool) -> None:
        """Let the step that is under way move nothing: no weight, no moment, no weight decay, no factor."""
        self._undo_skip()
        for factors in self._factors:
            factors.cancel_step()
        self._skipped = SkippedStep(self._module, optimizer, grad_scaler(self._trainer), keep_scale)

    def _undo_skip(self) -> None:
        if self._skipped is not None:
            self._skipped.undo()
            self._skipped = None

    def _rescale(self, rule: RescaleRule) -> None:
        matrices = self._matrices(rule)
        is_trained = self._trainer.strategy.reduce_boolean_decision(looks_trained(self._module), all=False)
        if is_trained or already_scaled(matrices, rule):
            rank_zero_info(f"LRFallback: {rule} is not applied: the start was trained, or its init has the factor.")
            return
        rescale(matrices, rule, holders=[self._module, *self._trainer.callbacks])
        mark_rescaled(self._module)
        self._rescaled = True
        self.snapshots.keep_start()
        rank_zero_info(f"LRFallback: {rule} on {len(matrices)} residual writers.")

    def _matrices(self, rule: RescaleRule) -> list[Matrix]:
        return [matrix for matrix in matrices_of(rule, self._module, self._pattern) if matrix.parameter.requires_grad]


def in_units(count: int) -> str:
    """Return a number of bytes as people write it.

    Example:
        >>> in_units(624), in_units(4_512), in_units(3_900_000_000)
        ('624 bytes', '4.5 kB', '3.9 GB')
    """
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    return next((f"{count / size:.1f} {unit}" for unit, size in units.items() if count >= size), f"{count} bytes")


def _refuse(trainer: Any) -> None:
    """Raise one sentence about a run that cannot be watched, before it trains."""
    names = [type(getattr(optimizer, "_optimizer", optimizer)).__name__ for optimizer in trainer.optimizers]
    if len(names) > 1:
        raise ValueError(
            "LRFallback needs a loss for its optimizer, and cannot tell whose it sees with several "
            f"({', '.join(names)}): leave it out of this run."
        )
    if "LBFGS" in names:
        raise ValueError("LRFallback cannot judge LBFGS, which evaluates several losses inside one step.")
    if is_deepspeed(trainer.strategy):
        raise ValueError("LRFallback cannot act under DeepSpeed, which keeps gradients and steps to itself.")
