"""Save a run by itself: skip a bad step, go back to a healthy one, start again lower; and say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.fresh_weights import already_scaled, looks_trained
from lightning_norms.anatomy.sharding import grad_scaler, is_deepspeed
from lightning_norms.anatomy.writers import Matrix, residual_writers, scale_, value_path
from lightning_norms.checks import check_pattern, check_switches
from lightning_norms.learning_rate import Factors, factors_of
from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.step_observer import StepObserver
from lightning_norms.metrics import FALLBACK, SPIKE_SCORE
from lightning_norms.rescale_rules import GPT2Rescale, RescaleRule
from lightning_norms.rescue.buffers import BufferKeeper
from lightning_norms.rescue.events import Event, EventLog
from lightning_norms.rescue.ladder import Ladder, Limits
from lightning_norms.rescue.rules import Finding, Watch, find_non_finite
from lightning_norms.rescue.skip import NoClipping, Overflow, skip_step
from lightning_norms.rescue.snapshot import Snapshot
from lightning_norms.rescue.snapshot_keeper import SnapshotKeeper

NAME = "fallback"
MARK = "residual_rescaled"
PATIENCE_WITH_SCALER = 20
BLIND = (
    "LRFallback sees no loss, so that only gradients are judged: in manual optimization call"
    " self.manual_backward(loss) instead of loss.backward()"
)


class FallbackExhaustedError(RuntimeError):
    """Every rung was tried, and the run is still not healthy. The message is the report."""


class LRFallback(Callback):
    """Skips, rolls back, or restarts at a lower learning rate, decided before the bad step is taken.

    ::

        loss, gradients  ->  detection: which cause?  ->  ladder: which rung?  ->  done before the optimizer moves
                             non_finite, spike            skip
                             divergence                   roll back to the last healthy snapshot, lr x cut
                             stall                        restart from step 0, lr x cut, fresh warmup
                                                          stop: FallbackExhaustedError, with what was tried

    All ranks decide on the same reduced numbers. A skip moves no tensor (buffers go back, too) and no factor. What does
    not show in a loss or gradient, such as a learning rate that is wrong for one step, is seen at the next step. A
    rollback puts back weights, buffers, moments, the GradScaler and weight averages; step counters, schedulers, random
    numbers and data go on, so the bad batches are passed by. The lower learning rate is a factor on top of any
    scheduler, kept in the checkpoint. Every intervention is a line in ``events.jsonl``, a line on the console, and
    ``fallback/...`` for the loggers.

    After a rollback or restart the baselines start anew, so for 16 steps only the rule for early steps can fire: that
    is the cool-down. Under a GradScaler the first 20 non-finite steps in a row are left to the scaler, which skips them
    by itself. Under ``ddp_spawn`` :attr:`events` stay in the processes that trained; ``events.jsonl`` has them all.

    Args:
        cut: the learning rate is multiplied by it at each rollback and restart.
        max_skips: steps skipped in a row before that counts as a divergence.
        max_rollbacks: rollbacks in a run.
        max_restarts: restarts in a run.
        lowest_factor: no cut goes below this share of the planned learning rate.
        snapshot_every_n_steps: optimizer steps between two snapshots of a healthy run.
        restart_within: optimizer steps for which the weights of step 0 are kept; after that a stall rolls back.
        restart_warmup_steps: length of the fresh warmup after a restart, unless a ``Warmup`` starts its own again.
        rescale_on_restart: also apply ``rule`` to the residual writers at a restart, if that was not done before.
        rule: factor for ``rescale_on_restart``.
        pattern: regular expression for the writers' names, where they are not found without it.
        recovery_steps: quiet optimizer steps over which the factor climbs back to 1 in a straight line; None for never.
        dry_run: only report.

    Raises:
        TypeError: when built, if ``rule`` is no rule.
        ValueError: when built, on an argument out of range; at fit start, if the run cannot be watched (LBFGS,
            several optimizers, DeepSpeed).
        FallbackExhaustedError: in training, when nothing is left to try.

    Example:
        >>> fallback = LRFallback(cut=0.3, snapshot_every_n_steps=20)

    Source: the ladder follows what people do by hand (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1, roll back
        about 100 steps and pass the batches by; Zhang et al. 2022, arXiv:2205.01068, lower the learning rate).
    """

    def __init__(
        self,
        cut: float = 0.5,
        max_skips: int = 3,
        max_rollbacks: int = 3,
        max_restarts: int = 3,
        lowest_factor: float = 0.01,
        snapshot_every_n_steps: int = 50,
        restart_within: int = 500,
        restart_warmup_steps: int = 100,
        rescale_on_restart: bool = False,
        rule: RescaleRule = GPT2Rescale(),  # noqa: B008 - frozen, and YAML shows it by name
        pattern: str | None = None,
        recovery_steps: int | None = None,
        dry_run: bool = False,
    ) -> None:
        super().__init__()
        self.ladder = Ladder(Limits(cut, lowest_factor, max_skips, max_rollbacks, max_restarts))
        self.snapshot_every_n_steps = _whole("snapshot_every_n_steps", snapshot_every_n_steps, 1)
        self.restart_within = _whole("restart_within", restart_within, 0)
        self.restart_warmup_steps = _whole("restart_warmup_steps", restart_warmup_steps, 0)
        self.recovery_steps = None if recovery_steps is None else _whole("recovery_steps", recovery_steps, 1)
        check_switches("LRFallback", rescale_on_restart=rescale_on_restart, dry_run=dry_run)
        check_pattern("LRFallback", "pattern", pattern)
        if not isinstance(rule, RescaleRule):
            raise TypeError(f"LRFallback: rule must be a RescaleRule such as GPT2Rescale(), got {rule!r}")
        self.rescale_on_restart, self.rule, self.pattern, self.dry_run = rescale_on_restart, rule, pattern, dry_run
        self._limits = self.ladder.limits
        self._restored: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self.ladder = Ladder(self._limits)
        self.watch = Watch()
        self.steps = 0
        self._quiet_since = 0
        self._restarted_at: int | None = None
        self._rescaled = False
        self._left_to_scaler = 0
        self._incident: str | None = None
        self._flagged = 0
        self._logged = 0
        self._events = EventLog(None)
        self._kept = SnapshotKeeper(self.snapshot_every_n_steps, self.restart_within)
        self._factors: list[Factors] = []
        self._observer: StepObserver | None = None
        self._buffers: BufferKeeper | None = None
        self._undo_overflow: Overflow | None = None
        self._no_clipping: NoClipping | None = None

    # --- start and end --------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A new fit starts over; a checkpoint is loaded after this."""
        if stage == "fit":
            self._restored = None
            self._reset()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the run can be watched, and keep the start: here every strategy has restored everything."""
        _refuse(trainer)
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # a collective: on every rank
        self._events = EventLog(folder if trainer.is_global_zero else None)
        all_factors = [factors_of(optimizer) for optimizer in trainer.optimizers]
        if any(NAME in factors.names() for factors in all_factors):  # a subclass, which Lightning takes for another one
            raise ValueError("LRFallback: another LRFallback acts in this run already; keep one of them in the Trainer")
        self._factors = all_factors
        restored, self._restored = self._restored, None
        if restored is not None:
            self._load(restored, pl_module)
        self._observer = StepObserver(pl_module)
        if not self._observer.has_depths:
            rank_zero_info(f"LRFallback: a silent stall cannot be seen here. {describe(pl_module)}")
        self._buffers = None if self.dry_run else BufferKeeper(pl_module)
        self._kept.watch(trainer, pl_module)
        for factors in self._factors:
            factors.set(NAME, self._factor)
        if self.dry_run:
            return
        if self.rescale_on_restart:
            self._matrices(pl_module)  # the error of a model in which nothing is found belongs here
        if self.steps == 0:
            size = self._kept.keep_start(trainer, pl_module).bytes / 1e6
            rank_zero_info(f"LRFallback: keeps the start, {size:.1f} MB, and later one healthy snapshot.")
        elif self._kept.healthy is None and not self.watch.stall.is_suspicious():
            self._kept.keep_healthy(trainer, pl_module, self.steps)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizers as they were, and let go of the snapshots."""
        self._leave()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same: Lightning calls neither ``on_fit_end`` nor ``teardown`` after an exception."""
        self._leave()

    def _leave(self) -> None:
        self._restored = self.state_dict()  # for a checkpoint that is saved after fit
        for factors in self._factors:
            factors.remove(NAME)
        self._factors, self._observer, self._buffers = [], None, None
        self._kept.forget()
        self._clip_again()

    # --- every step -----------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before the first forward pass of a step: this is what its buffers go back to if it is skipped."""
        if self._buffers is not None and self._observer is not None and not self._observer.is_within_window:
            self._buffers.keep()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss on its device until the step."""
        if self._observer is not None:
            self._observer.add_loss(trainer, loss, pl_module.automatic_optimization)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Look, decide, act: gradients are reduced and unscaled here, not yet clipped, and nothing has moved."""
        if self._observer is None:
            return
        seen = self._observer.observe(trainer, optimizer)
        if self.steps == 0 and seen.loss is None and not seen.non_finite and not pl_module.automatic_optimization:
            rank_zero_warn(BLIND)
        self.steps += 1
        for factors in self._factors:
            factors.cancel_step(False)  # one that a GradScaler did not even begin
        if self._observer.has_changed:
            self.watch.stall.start_afresh()  # something was frozen or unfrozen: other gradients, other shares
        if self._is_the_scalers(trainer, seen) or (seen.loss is None and not seen.grad_norm):
            return  # not ours, or nothing to judge: training_step returned None
        finding = self.watch.find(seen)
        if finding is None:
            self._accept(seen)
        elif self.dry_run:
            self._only_report(trainer, finding)
        else:
            self._act(trainer, pl_module, optimizer, finding)
        for factors in self._factors:
            factors.refresh()  # in full precision they were put on before this was decided

    def _is_the_scalers(self, trainer: Trainer, seen: Observation) -> bool:
        """Whether a GradScaler skips this step by itself: overflow is how it finds its scale, and no event."""
        bad = find_non_finite(seen) is not None and grad_scaler(trainer) is not None
        self._left_to_scaler = self._left_to_scaler + 1 if bad else 0
        return 0 < self._left_to_scaler <= PATIENCE_WITH_SCALER

    def _accept(self, seen: Observation) -> None:
        self.watch.accept(seen)
        self.ladder.step_taken()
        self._incident, self._flagged = None, 0
        self._recover()
        if self._buffers is not None:
            self._buffers.keep()

    def _only_report(self, trainer: Trainer, finding: Finding) -> None:
        self._report(trainer, finding, "report")
        self._flagged += 1
        if self._flagged > self._limits.max_skips:  # a level that stays is the new level
            self.watch.new_level()

    def _recover(self) -> None:
        if self.recovery_steps is not None and self.ladder.factor < 1.0:
            left = max(1, self.recovery_steps - (self.steps - self._quiet_since) + 1)
            self.ladder.factor += (1.0 - self.ladder.factor) / left

    def _act(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, finding: Finding) -> None:
        action = self._climb(finding.cause)
        if finding.cause == "spike" and action != "skip":
            finding = replace(finding, cause="divergence")  # a spike that stays
        self._report(trainer, finding, action)
        self._go_back(trainer, pl_module, finding, action)
        self._clip_again()
        self._no_clipping = NoClipping(pl_module)
        overflow = self._skip(trainer, optimizer)
        if overflow and (action != "skip" or finding.cause != "non_finite"):
            self._undo_overflow = overflow  # the scaler must not back off for an infinity that we put there

    def _climb(self, cause: str) -> str:
        return self.ladder.climb(cause, self._kept.healthy is not None, self._kept.start is not None)

    def _go_back(self, trainer: Trainer, pl_module: LightningModule, finding: Finding, action: str) -> None:
        if action == "stop":
            raise FallbackExhaustedError(self._last_words(finding))
        if action == "rollback":
            self._put_back(trainer, pl_module, self._kept.healthy)
        elif action == "restart":
            self._put_back(trainer, pl_module, self._kept.start)
            self._begin_again(trainer, pl_module)
        elif self._buffers is not None:
            self._buffers.put_back()

    # --- the rungs ------------------------------------------------------------------------------------------------

    def _skip(self, trainer: Trainer, optimizer: Optimizer) -> Overflow | None:
        """Let the step that is under way move nothing: no weight, no moment, no weight decay, no factor."""
        for factors in self._factors:
            factors.cancel_step()
        return skip_step(optimizer, grad_scaler(trainer))

    def _clip_again(self) -> None:
        if self._no_clipping is not None:
            self._no_clipping.undo()
            self._no_clipping = None

    def _put_back(self, trainer: Trainer, pl_module: LightningModule, snapshot: Snapshot | None) -> None:
        unknown = self._kept.put_back(trainer, pl_module, snapshot)
        if unknown:
            rank_zero_info(f"LRFallback: not in the snapshot, so left as they are: {', '.join(unknown)}")
        self.watch.start_afresh()
        self._quiet_since, self._left_to_scaler = self.steps, 0

    def _begin_again(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restarted_at = self.steps
        for factors in self._factors:
            factors.clock = 0  # a Warmup callback's schedule starts again
        if self.rescale_on_restart and not getattr(pl_module, MARK, False):
            self._rescale(trainer, pl_module)
        self._kept.healthy = self._kept.start

    def _rescale(self, trainer: Trainer, pl_module: LightningModule) -> None:
        matrices = self._matrices(pl_module)
        trained = trainer.strategy.reduce_boolean_decision(looks_trained(pl_module), all=False)
        if trained or already_scaled(matrices, self.rule):
            rank_zero_info(f"LRFallback: {self.rule} is left out: the start was trained, or its init has the factor.")
            return
        for matrix in matrices:
            scale_(matrix, self.rule.gain(matrix.layer, matrix.layers))
        setattr(pl_module, MARK, True)
        self._rescaled = True
        self._kept.start = self._kept.take(trainer, pl_module, step=0)
        rank_zero_info(f"LRFallback: {self.rule} on {len(matrices)} residual writers.")

    def _matrices(self, pl_module: LightningModule) -> list[Matrix]:
        find = value_path if self.rule.whole_value_path else residual_writers
        return [matrix for matrix in find(pl_module, self.pattern) if matrix.parameter.requires_grad]

    def _factor(self, clock: int) -> float:
        """What the learning rate is multiplied by; after a restart it climbs in a straight line."""
        if self._restarted_at is None or any("warmup" in factors.names() for factors in self._factors):
            return self.ladder.factor
        return self.ladder.factor * min(1.0, (clock + 1) / max(1, self.restart_warmup_steps))

    # --- after the step -------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Snapshot a healthy run, and log."""
        if self._observer is None:
            return
        if self._undo_overflow is not None:
            self._undo_overflow.undo(trainer.precision_plugin.scaler)  # type: ignore[attr-defined]
            self._undo_overflow = None
        self._clip_again()
        self._kept.step_taken(self.steps)
        if not self.dry_run and self._is_healthy() and self._kept.is_due(self.steps):
            self._kept.keep_healthy(trainer, pl_module, self.steps)
        stepped, self._logged = self.steps > self._logged, self.steps
        if stepped and trainer.loggers and trainer._logger_connector.should_update_logs:
            self._log(trainer)

    def _is_healthy(self) -> bool:
        return self._incident is None and not self.watch.stall.is_suspicious()

    # --- telling --------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, finding: Finding, action: str) -> None:
        """One event for each incident and action: steps skipped in a row are one."""
        incident = f"{finding.cause}/{action}"
        if incident == self._incident and action in ("skip", "report"):
            return
        self._incident = incident
        said = {
            "skip": "the step is skipped",
            "rollback": f"back to step {self._kept.healthy.step if self._kept.healthy else 0}, "
            f"learning rate x {self.ladder.factor:.4g}",
            "restart": f"starting again from step 0, learning rate x {self.ladder.factor:.4g}, with a fresh warmup",
            "stop": "nothing is left to try",
            "report": "dry run: nothing is done",
        }[action]
        message = f"LRFallback, step {self.steps - 1}: {finding.cause}: {finding.message}; {said}."
        event = Event(self.steps - 1, finding.cause, action, {**finding.evidence}, self.ladder.factor, message)
        self._events.append(event)
        rank_zero_info(message)
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        values = {FALLBACK.of(name): float(getattr(self.ladder, name)) for name in ("skips", "rollbacks", "restarts")}
        values[FALLBACK.of("factor")] = self._factor(self._clock)
        values |= {SPIKE_SCORE.of(name): score.value() for name, score in self.watch.scores.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _last_words(self, finding: Finding) -> str:
        tried = "\n".join(f"  {event.message}" for event in self._events.events)
        return f"the run is not healthy ({finding.cause}: {finding.message}), and nothing is left to try:\n{tried}"

    @property
    def _clock(self) -> int:
        return next((factors.clock for factors in self._factors), 0)

    @property
    def events(self) -> list[Event]:
        """What was done in this run, oldest first."""
        return list(self._events.events)

    # --- state ----------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let no weight that is not finite reach a file; and keep what is written as the last healthy moment.

        A resumed run can go back to its checkpoint only, so the run that goes on does the same.
        """
        if self._observer is None or self.dry_run:
            return
        bad = not all(_finite(parameter) for parameter in pl_module.parameters() if parameter.requires_grad)
        if trainer.strategy.reduce_boolean_decision(bad, all=False):
            finding = Finding("non_finite", "the weights themselves, found when a checkpoint was to be written")
            action = self._climb("divergence")
            self._report(trainer, finding, action)
            self._go_back(trainer, pl_module, finding, action)
            _write_again(trainer, checkpoint)
        elif self._is_healthy():
            self._kept.keep_healthy(trainer, pl_module, self.steps)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counts, factor, baselines, events, whether the run is healthy, and the start while it may be needed."""
        if self._restored is not None and self._observer is None:
            return self._restored
        return {
            "steps": self.steps,
            "quiet_since": self._quiet_since,
            "restarted_at": self._restarted_at,
            "clock": self._clock,
            "rescaled": self._rescaled,
            "left_to_scaler": self._left_to_scaler,
            "incident": self._incident,
            "healthy": self._is_healthy(),
            "ladder": self.ladder.state_dict(),
            "watch": self.watch.state_dict(),
            "events": self._events.state_dict(),
            **self._kept.state_dict(self._is_healthy()),
        }

    def __getstate__(self) -> dict[str, Any]:
        live = dict.fromkeys(("_observer", "_buffers", "_undo_overflow", "_no_clipping"))
        return {**self.__dict__, **live, "_factors": [], "_restored": self.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the state for ``on_train_start``."""
        self._restored = dict(state_dict)

    def _load(self, state: dict[str, Any], pl_module: LightningModule) -> None:
        self.steps, self._quiet_since = state["steps"], state["quiet_since"]
        self._restarted_at, self._incident = state["restarted_at"], state["incident"]
        self.ladder.load_state_dict(state["ladder"])
        self.watch.load_state_dict(state["watch"])
        self._events.load_state_dict(state["events"])
        self._events.resume_at(self.steps)
        self._left_to_scaler, self._rescaled = state["left_to_scaler"], state["rescaled"]
        if self._rescaled:
            setattr(pl_module, MARK, True)
        for factors in self._factors:
            if "warmup" not in factors.names():
                factors.clock = state["clock"]
        self._kept.load_state_dict(state)


def _refuse(trainer: Any) -> None:
    """One sentence about a run that cannot be watched, before it trains."""
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


def _write_again(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """What Lightning has put into a checkpoint before the run went back."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    # A WeightAveraging that stands before us has put its average into "state_dict", which has gone back as well.
    weights = "current_model_state" if "current_model_state" in checkpoint else "state_dict"
    checkpoint[weights] = strategy.lightning_module_state_dict()
    checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
    checkpoint["callbacks"] |= {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())}
    if type(precision).__qualname__ in checkpoint:
        checkpoint[type(precision).__qualname__] = precision.state_dict()


def _finite(parameter: Tensor) -> bool:
    return bool(torch.isfinite(parameter.detach()).all())


def _whole(name: str, value: object, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"LRFallback: {name} must be a whole number >= {lowest}, got {value!r}")
    return value
