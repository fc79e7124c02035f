"""One short run of a copy: the losses, the gradient by depth and what the rules of ``detection`` say of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.sharding import grad_scaler
from lightning_norms.diagnosing.borrowing import fit_afresh
from lightning_norms.diagnosing.counterfactual import Change
from lightning_norms.diagnosing.labels import LossWatcher
from lightning_norms.learning_rate import factors_of
from lightning_norms.measuring.depth_history import Profile
from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.step_observer import StepObserver
from lightning_norms.reports.diagnosis.data import Trial, TrialEvent
from lightning_norms.reports.diagnosis.verdicts import is_dead, judge, level
from lightning_norms.rescue.rules import DivergenceRule, Finding, SpikeRule, StallRule, find_non_finite

NAME = "trial"
PATIENCE_WITH_SCALER = 20
"""Non-finite steps in a row that a GradScaler needs to find its scale."""
NEW_LEVEL_AFTER = 3
"""Flagged steps in a row after which what was flagged is the new level."""

Progress = Callable[[int, float], None]
"""Called after every step with its number, 1-based, and its loss."""


class Recorder(Callback):
    """Watches a trial and ends it: after its last step, or when its verdict can no longer change.

    Args:
        steps: optimizer steps of the trial.
        constant_loss: that of the best constant prediction, if it is known.
        constants: the same on the labels of each step, as an earlier trial on the same batches found them.
        learning_rate: factor on the learning rate of every optimizer.
        watch_labels: count the labels of every step.
        run_to_the_end: stop early for nothing but NaN and infinity.
        progress: called after every step.
    """

    def __init__(
        self,
        steps: int,
        constant_loss: float | None = None,
        constants: Sequence[float] = (),
        learning_rate: float = 1.0,
        watch_labels: bool = False,
        run_to_the_end: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.steps, self.learning_rate, self.progress = steps, learning_rate, progress
        self.constant_loss, self.constants, self.run_to_the_end = constant_loss, tuple(constants), run_to_the_end
        self.watcher = LossWatcher() if watch_labels else None
        self.labels = 0
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.batches: list[float] = []
        self.rates: list[float] = []
        self.events: list[TrialEvent] = []
        self.recorded: list[tuple[int, tuple[float, ...]]] = []
        self.groups: tuple[str, ...] = ()
        self.stalled_steps = 0
        self.stopped_early = False
        self._spike, self._divergence, self._stall = SpikeRule(), DivergenceRule(), StallRule()
        self._left_to_scaler = self._flagged = 0
        self._watching = False
        self._observer: StepObserver | None = None

    # --- hooks ----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start to observe; put the factor on."""
        self._observer = StepObserver(pl_module)
        for optimizer in trainer.optimizers:
            factors_of(optimizer).set(NAME, lambda _: self.learning_rate)
        for config in trainer.strategy.lr_scheduler_configs:
            config.strict = False  # without validation there is no metric that a plateau could be seen in
        self.groups = _block_groups(pl_module, trainer.optimizers[:1])

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch what goes into the loss; keep a number of the batch, by which another one can be told."""
        tensors = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
        self.batches.append(sum(float(each.detach().double().sum()) for each in tensors))
        if self.watcher is not None:
            self.watcher.start()
            self._watching = True

    @override
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss on its device until the step."""
        self._close()
        if self._observer is not None:
            self._observer.add_loss(trainer, loss, pl_module.automatic_optimization)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the step: gradients are reduced and unscaled here, and nothing has moved."""
        if self._observer is None or optimizer is not trainer.optimizers[0] or len(self.losses) >= self.steps:
            return
        seen = self._observer.observe(trainer, optimizer)
        step = len(self.losses)
        if self.watcher is not None:
            self.watcher.end_step()
        self.losses.append(math.nan if seen.loss is None else seen.loss)
        self.grad_norms.append(seen.grad_norm)
        by_block = tuple(norm for stack in seen.stacks for norm in stack)
        if len(by_block) == len(self.groups) and (step < 10 or step % 5 == 0 or step == self.steps - 1):
            self.recorded.append((step, by_block))
        if not self._is_the_scalers(trainer, seen):
            self._judge(step, seen)
        self.stopped_early = self._is_decided()

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the learning rate that was used; stop when nothing more is to be learnt."""
        self._close()
        used = factors_of(trainer.optimizers[0]).used() if trainer.optimizers else []
        if len(self.losses) > len(self.rates):
            self.rates.append(used[0] if used else math.nan)
            if self.progress is not None:
                self.progress(len(self.losses), self.losses[-1])
        if self.stopped_early or len(self.losses) >= self.steps:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """What the labels of the whole trial tell."""
        if self.watcher is not None:
            self.constants = self.watcher.constant_losses_over(trainer)
            self.labels = self.watcher.labels * trainer.world_size
            if self.constant_loss is None:
                self.constant_loss = self.watcher.constant_loss_over(trainer)

    @override
    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Let go of the optimizers."""
        self._leave(trainer)

    @override
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """The same after an error."""
        self._leave(trainer)

    # --- rules ----------------------------------------------------------------------------------------------------

    def _is_the_scalers(self, trainer: Any, seen: Observation) -> bool:
        scaler = grad_scaler(trainer)
        bad = find_non_finite(seen) is not None and scaler is not None
        self._left_to_scaler = self._left_to_scaler + 1 if bad else 0
        return 0 < self._left_to_scaler <= PATIENCE_WITH_SCALER

    def _judge(self, step: int, seen: Observation) -> None:
        bad = find_non_finite(seen)
        stall = None if bad else self._stall.judge(seen)
        self.stalled_steps = self.stalled_steps + 1 if stall else 0
        flagged = bad or self._spike.judge(seen) or self._divergence.judge(seen)
        self._flagged = self._flagged + 1 if flagged else 0
        if flagged is None:
            self._spike.accept(seen)
            self._divergence.accept(seen)
        elif self._flagged > NEW_LEVEL_AFTER and flagged.cause == "spike":
            self._spike.start_afresh()  # a level that stays is the new level
        if flagged and self._flagged == 1:
            self._note(step, flagged)
        if stall and self.stalled_steps == 1:
            self._note(step, stall)

    def _note(self, step: int, found: Finding) -> None:
        self.events.append(TrialEvent(step, found.cause, found.message, dict(found.evidence)))

    def _is_decided(self) -> bool:
        """Whether more steps can change nothing; the same on every rank, as it rests on reduced numbers."""
        if any(event.cause == "non_finite" for event in self.events):
            return True
        return not self.run_to_the_end and is_dead(self._excess(), self.stalled_steps, self.constant_loss)

    def _excess(self) -> tuple[float, ...]:
        """Loss less that of a constant prediction, step by step; of the whole, where steps are not known."""
        if self.constants:
            return tuple(loss - constant for loss, constant in zip(self.losses, self.constants, strict=False))
        return () if self.constant_loss is None else tuple(loss - self.constant_loss for loss in self.losses)

    def _close(self) -> None:
        if self._watching and self.watcher is not None:
            self._watching = False
            self.watcher.stop()

    def _leave(self, trainer: Any) -> None:
        self._close()
        for optimizer in trainer.optimizers:
            factors_of(optimizer).remove(NAME)
        self._observer = None

    def result(self, change: Change, seed: int, uniform_loss: float | None = None) -> Trial:
        """What was recorded, judged."""
        steps = tuple(step for step, _ in self.recorded)
        values = tuple(zip(*(norms for _, norms in self.recorded), strict=True))
        trial = Trial(
            name=change.name,
            change=change.words,
            patch=change.patch,
            seed=seed,
            planned_steps=self.steps,
            keeps_model=change.rebuild is None,
            losses=tuple(self.losses),
            excess=self._excess(),
            grad_norms=tuple(self.grad_norms),
            learning_rates=tuple(self.rates),
            gradients=Profile(self.groups, steps, values) if values else Profile((), (), ()),
            events=tuple(self.events),
            stalled_steps=self.stalled_steps,
            end_loss=level(self.losses),
            stopped_early=self.stopped_early and len(self.losses) < self.steps,
        )
        verdict, reason = judge(trial, self.constant_loss, uniform_loss)
        return replace(trial, verdict=verdict, reason=reason)


def run_trial(
    trainer: Any, module: Any, data: Any, given: Sequence[Callback], change: Change, recorder: Recorder
) -> None:
    """Fit ``module``, a copy, under a change.

    Args:
        trainer: a borrowed one.
        module: as given; a change of the architecture builds another from it.
        data: what the trainer is fitted on.
        given: callbacks of the configuration.
        change: what is tried.
        recorder: takes everything in.
    """
    subject = module if change.rebuild is None else change.rebuild(module)
    fit_afresh(trainer, subject, [*change.callbacks_from(given), recorder], data)


def _block_groups(module: Any, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    """Blocks with a parameter that the optimizer trains, in depth order: those that an observation has."""
    owned = {id(p) for each in optimizers for group in each.param_groups for p in group["params"] if p.requires_grad}
    depth = DepthMap.of(module)
    used = {depth.group_of(name) for name, parameter in module.named_parameters() if id(parameter) in owned}
    return tuple(name for stack in depth.stacks for name in stack.groups if name in used)
