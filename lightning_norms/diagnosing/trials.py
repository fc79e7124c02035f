"""One short run of a copy: the losses, the gradient by depth and what the rules of ``LRFallback`` say of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_norms.anatomy.sharding import grad_scaler
from lightning_norms.diagnosing.changes import Change
from lightning_norms.diagnosing.constants import Micro, constant_losses, read_micro
from lightning_norms.diagnosing.labels import LossWatcher
from lightning_norms.diagnosing.loss_tail import TailRecorder
from lightning_norms.learning_rate import factors_of
from lightning_norms.measuring.depth_history import Profile
from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.step_observer import StepObserver
from lightning_norms.measuring.trained_parameters import TrainedParameters
from lightning_norms.reports.diagnosis.data import Trial, TrialEvent
from lightning_norms.reports.diagnosis.progress import is_dead, level
from lightning_norms.reports.diagnosis.verdicts import judge
from lightning_norms.rescue.finding import Finding
from lightning_norms.rescue.rules import Watch
from lightning_norms.rescue.stall import StallRule

NAME = "trial"
NEW_LEVEL_AFTER = 3
"""After this many flagged steps in a row, the loss has reached a new level."""


class Recorder(Callback):
    """Records a trial and ends it: after its last step, or as soon as its verdict can no longer change.

    Args:
        steps: optimizer steps of the trial.
        constant_loss: loss of the best constant prediction, if it is known.
        constants: the same for the labels of each step, as an earlier trial on the same batches measured them.
        factor: factor on the learning rate of every optimizer.
        is_baseline: whether this is the run as given: it counts the labels of every step, and stops early only for NaN
            and infinity.
        loss_scale: by how much perfect predictions beat constant ones, if it is known.
        progress: called after every step with its number, 1-based, and its loss.

    Attributes:
        batches: a checksum of every batch.
        labels: number of labels counted on all ranks.
    """

    def __init__(
        self,
        steps: int,
        constant_loss: float | None = None,
        constants: Sequence[float] = (),
        factor: float = 1.0,
        is_baseline: bool = False,
        loss_scale: float | None = None,
        progress: Callable[[int, float], object] | None = None,
    ) -> None:
        self.steps, self.constant_loss, self.constants = steps, constant_loss, tuple(constants)
        self._factor, self._is_baseline, self._progress = factor, is_baseline, progress
        self.batches: list[float] = []
        self.labels = 0
        self.loss_scale = loss_scale
        self._labels_watcher = LossWatcher()
        self._tails = TailRecorder()
        self._micros: list[list[Micro]] = [[]]  # of each step, the last one still open
        self._stall = StallRule()
        self._watch = Watch()
        self._observer: StepObserver | None = None
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._rates: list[float] = []
        self._events: list[TrialEvent] = []
        self._groups: tuple[str, ...] = ()
        self._block_norms: list[tuple[int, tuple[float, ...]]] = []
        self._optimizers = 1
        self._flagged = self._stalled = 0  # steps in a row
        self._is_decided = self._has_run_out = False
        self._is_readable = True
        self._epoch_start = -1  # number of batches before the current epoch

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._observer = StepObserver(pl_module)
        self._optimizers = len(trainer.optimizers)
        for optimizer in trainer.optimizers:
            factors_of(optimizer).set(NAME, lambda _: self._factor)
        for config in trainer.strategy.lr_scheduler_configs:
            config.strict = False  # ReduceLROnPlateau has no metric without validation
        if trainer.optimizers:
            self._groups = _block_groups(pl_module, trainer.optimizers[0], trainer.strategy.model)

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """End a fit whose last epoch had no batch: without this, a stream that is used up is read for ever."""
        self._has_run_out = self._epoch_start == len(self.batches)
        self._epoch_start = len(self.batches)
        trainer.should_stop |= self._has_run_out

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self.batches.append(sum(float(tensor.detach().float().nan_to_num().sum()) for tensor in tensors))
        if self._is_baseline:
            self._labels_watcher.start()
            self._tails.start()

    @override
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        self._stop_watching()
        if self._is_baseline:
            self._add_tail(trainer, pl_module, loss)
        if self._observer is not None:
            self._observer.add_loss(trainer, loss, pl_module.automatic_optimization)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the step: here gradients are reduced and unscaled, and no weight has moved."""
        if self._observer is None or optimizer is not trainer.optimizers[0] or len(self._losses) >= self.steps:
            return
        observation = self._observer.observe(trainer, optimizer)
        step = len(self._losses)
        self._micros.append([])
        self._losses.append(math.nan if observation.loss is None else observation.loss)
        self._grad_norms.append(observation.grad_norm)
        norms = tuple(norm for stack in observation.stacks for norm in stack)
        if len(norms) == len(self._groups) and (step < 10 or step % 5 == 0 or step == self.steps - 1):
            self._block_norms.append((step, norms))
        self._judge(step, observation, has_scaler=grad_scaler(trainer) is not None)

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the learning rate that was used; stop when more steps change nothing."""
        self._stop_watching()
        rates = factors_of(trainer.optimizers[0]).used() if trainer.optimizers else []
        if len(self._losses) > len(self._rates):
            self._rates.append(rates[0] if rates else math.nan)
            if self._progress is not None:
                self._progress(len(self._losses), self._losses[-1])
        if self._is_decided or len(self._losses) >= self.steps:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._is_baseline:
            self.labels = self._labels_watcher.labels * trainer.world_size
            self._fit_constants(trainer)

    @override
    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._release(trainer)

    @override
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    def _stop_watching(self) -> None:
        self._tails.stop()
        self._labels_watcher.stop()

    def _add_tail(self, trainer: Any, module: Any, loss: Tensor) -> None:
        """Keep what leads from the network's outputs to this loss, unless an earlier one could not be followed."""
        micro = read_micro(self._tails, trainer, module, loss) if self._is_readable else None
        self._is_readable = micro is not None
        self._micros[-1] += [] if micro is None else [micro]

    def _fit_constants(self, trainer: Any) -> None:
        """Replace what the labels say by what the loss itself says of constant outputs; the same on every rank."""
        steps = len(self._losses)
        fit = constant_losses(self._micros[:steps]) if self._is_readable else None
        numbers = torch.tensor([math.nan] * (steps + 1) if fit is None else [*fit.by_step, fit.scale])
        if trainer.world_size > 1:
            numbers = trainer.strategy.reduce(numbers.to(trainer.strategy.root_device), reduce_op="mean").cpu()
        *by_step, scale = numbers.tolist()
        self._micros = []
        if all(map(math.isfinite, [*by_step, scale])):
            self.constants, self.loss_scale = tuple(by_step), scale
            self.constant_loss = sum(by_step) / steps if self.constant_loss is None else self.constant_loss

    def _release(self, trainer: Any) -> None:
        self._stop_watching()
        for optimizer in trainer.optimizers:
            factors_of(optimizer).remove(NAME)
        self._observer = None

    def _judge(self, step: int, observation: Observation, has_scaler: bool) -> None:
        """Ask the rules; the decision is the same on every rank, as the observation is reduced."""
        finding = self._watch.find(observation, has_scaler)
        if finding is None or not finding.is_harmless:
            is_broken = finding is not None and finding.cause == "non_finite"
            # By depth alone: whether the run has learnt is judged against constant predictions, not by its first loss.
            stall = None if is_broken else self._stall.judge(replace(observation, loss=None))
            flagged = None if finding is None or finding.cause == "stall" else finding
            self._flagged = self._note(step, flagged, self._flagged)
            self._stalled = self._note(step, stall, self._stalled)
            if flagged is None:
                self._watch.accept(observation)
            elif flagged.cause == "spike" and self._flagged > NEW_LEVEL_AFTER:
                self._watch.spike.start_afresh()
        has_failed = any(event.cause == "non_finite" for event in self._events)
        is_judged = not self._is_baseline and self.constant_loss is not None
        is_idle = is_judged and is_dead(self._excess(), self._stalled, self.constant_loss, self.loss_scale)
        self._is_decided = has_failed or is_idle

    def _note(self, step: int, finding: Finding | None, count: int) -> int:
        """Count the steps in a row with a finding; the first one of a row is an event, and the first NaN of all."""
        if finding is None:
            return 0
        is_first_nan = finding.cause == "non_finite" and all(event.cause != "non_finite" for event in self._events)
        if not count or is_first_nan:
            self._events.append(TrialEvent(step, finding.cause, finding.message, dict(finding.evidence)))
        return count + 1

    def check_data(self, wanted: int) -> None:
        """Raise if the data ended before the trial.

        Args:
            wanted: number of batches that the trial as given had; 0 for that trial itself.
        """
        if self._is_decided or len(self._losses) >= self.steps or not (self._has_run_out or len(self.batches) < wanted):
            return
        raise ValueError(
            f"diagnose: the data ran out after {len(self._losses)} of {self.steps} steps; every trial reads them from "
            "the start, so provide data that can be read several times, or fewer steps."
        )

    def _excess(self) -> tuple[float, ...]:
        """Loss minus that of a constant prediction, by step; on all labels where those of each step are unknown."""
        if self.constants:
            return tuple(loss - constant for loss, constant in zip(self._losses, self.constants, strict=False))
        return () if self.constant_loss is None else tuple(loss - self.constant_loss for loss in self._losses)

    def result(self, change: Change, seed: int, uniform_loss: float | None = None, is_negated: bool = False) -> Trial:
        """Return the trial with its verdict."""
        steps = tuple(step for step, _ in self._block_norms)
        values = tuple(zip(*(norms for _, norms in self._block_norms), strict=True))
        trial = Trial(
            name=change.name,
            change=change.words,
            patch=change.patch,
            seed=seed,
            planned_steps=self.steps,
            keeps_model=change.rebuild is None,
            losses=tuple(self._losses),
            excess=self._excess(),
            grad_norms=tuple(self._grad_norms),
            learning_rates=tuple(self._rates),
            optimizers=self._optimizers,
            is_negated=is_negated,
            gradients=Profile(self._groups, steps, values) if values else Profile((), (), ()),
            events=tuple(self._events),
            stalled_steps=self._stalled,
            loss_scale=self.loss_scale,
            end_loss=level(self._losses),
            stopped_early=self._is_decided and len(self._losses) < self.steps,
        )
        return judge(trial, self.constant_loss, uniform_loss)


def _block_groups(module: Any, optimizer: Optimizer, model: Any) -> tuple[str, ...]:
    """Blocks with a trained parameter, in the order of an observation's ``stacks``."""
    trained = TrainedParameters(module)
    groups = set(trained.norms(optimizer, model).groups)
    return tuple(group for stack in trained.depth.stacks for group in stack.groups if group in groups)
