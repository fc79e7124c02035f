"""``diagnose``: measure a run's first step, try it and single changes to it for some steps each, and conclude.

::

    module, data, trainer
        |-- copy --> look          one step: sizes by depth, what the first update changes
        |-- copy --> as given      some eighty steps, through a real Trainer.fit
        |-- copy --> each change   the same batches from the same weights
        '-- untouched              conclude: verdict, causes, fixes
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.checks import check_whole
from lightning_norms.diagnosing.borrowing import (
    borrowed,
    copy_module,
    fit_afresh,
    is_left_out,
    plain_trainer,
    same_order,
)
from lightning_norms.diagnosing.changes import BASELINE, Change, Plan, plan, shallower
from lightning_norms.diagnosing.facts import TRAINED, facts_of_frozen
from lightning_norms.diagnosing.looking import Looker
from lightning_norms.diagnosing.trials import Recorder
from lightning_norms.reports.diagnosis.conclusions import conclude
from lightning_norms.reports.diagnosis.data import Diagnosis, Facts, Look, Trial, Verdict

Rebuild = Callable[[int], tuple[Any, Any]]
"""Seed -> (module, data) built with it."""
STEPS = 80
"""Default number of optimizer steps per trial."""
Progress = Callable[[str, int, int, float], object]
"""Name of a trial, its number of steps, steps done, loss (NaN at the start) -> ignored."""


def diagnose(
    module: LightningModule,
    data: Any = None,
    trainer: Any = None,
    *,
    steps: int | None = None,
    seeds: Sequence[int] | None = None,
    n_seeds: int = 1,
    trials: bool = True,
    rebuild: Rebuild | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find out whether a configuration trains, why not, and what would fix it, with the numbers behind each answer.

    Everything runs on copies through ``Trainer.fit``, with the user's precision, strategy, optimizer and callbacks.
    Module, trainer, random generators and folders stay as they are.

    Args:
        module: any LightningModule, before its training.
        data: a LightningDataModule, training loaders, or None for the module's own ``train_dataloader``.
        trainer: provides precision, strategy, accumulation, clipping and callbacks; None for one process on any
            accelerator. Callbacks that write, monitor or rescue are left out.
        steps: optimizer steps per trial; a trial stops earlier once it is decided. None for 80, or for 1.5 times the
            length of the configuration's warmup, up to 160.
        seeds: repeat all trials for these seeds. The module as given belongs to the seed set by ``seed_everything``,
            or else to seed 0.
        n_seeds: number of consecutive seeds, starting with that of the module as given; instead of ``seeds``.
        trials: False only measures the first step.
        rebuild: builds module and data for another seed; without it, seeds differ only in the order of the data and in
            dropout, unless the module builds itself in ``configure_model``.
        progress: called at the start of every trial and after every step, see :data:`Progress`.

    Raises:
        ValueError: the run cannot be diagnosed: no optimizer, LBFGS, DeepSpeed, a module that cannot be copied, data
            without a batch; or an argument makes no sense.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> diagnosis = diagnose(BoringModel(), steps=5)
        >>> diagnosis.facts.optimizer, diagnosis.look.flags[0].name
        ('SGD', 'no blocks')
    """
    if steps is not None:
        check_whole("diagnose", "steps", steps, 1)
    _check_kinds(module, data, trainer)
    seeds = _check_seeds(seeds, n_seeds)
    frozen = facts_of_frozen(module)
    if frozen is not None:
        return conclude(frozen, Look(), trials=(), notes=("no trial was run: there is nothing to train",))
    trainer = plain_trainer(module) if trainer is None else trainer
    left_out = [type(callback).__name__ for callback in trainer.callbacks if is_left_out(callback)]
    with borrowed(trainer) as callbacks:
        session = _Session(
            module=module,
            data=data,
            trainer=trainer,
            callbacks=callbacks,
            left_out=left_out,
            wanted_steps=steps,
            progress=progress or (lambda *_: None),
            rebuild=rebuild,
        )
        return session.run(seeds, trials)


@dataclass(kw_only=True)
class _Session:
    """One call of :func:`diagnose`: what all its fits share."""

    module: Any
    data: Any
    trainer: Any
    callbacks: Sequence[Callback]
    left_out: Sequence[str]
    wanted_steps: int | None
    progress: Progress
    rebuild: Rebuild | None
    steps: int = STEPS
    notes: list[str] = field(default_factory=list)
    uniform_loss: float | None = None
    is_negated: bool = False
    constant_loss: float | None = None
    constants: tuple[float, ...] = ()
    loss_scale: float | None = None
    labels: int = 0
    batches: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        entropy = getattr(self.data, "unigram_entropy", None) if hasattr(type(self.data), "unigram_entropy") else None
        self.constant_loss = None if entropy is None else float(entropy)

    def run(self, seeds: Sequence[int], trials: bool) -> Diagnosis:
        self.progress("first step", 1, 0, math.nan)
        facts, look, built = self._look()
        self.progress("first step", 1, 1, math.nan if look.first_loss is None else look.first_loss)
        if not trials:
            return conclude(facts, look, (), ("no trial was run: only the first step was measured",))
        self.uniform_loss, self.is_negated = look.uniform_loss, look.is_negated
        self.steps = self._choose_steps(facts)
        trained = any(flag.name == TRAINED for flag in look.flags)
        changes = plan(facts, built, self.callbacks, self.steps, trained)
        rescale = next((change for change in changes.changes if change.name == "rescale"), None)
        rescaled, shallow = (self._look(change)[1] if change else None for change in (rescale, shallower(built)))
        del built
        self.notes += changes.notes
        done = self._all_seeds(changes, seeds)
        if look.labels:  # the whole trial has counted more of them than the first step
            look = replace(look, constant_loss=self.constant_loss, labels=self.labels)
        return conclude(facts, look, done, self.notes, rescaled, shallow)

    def _choose_steps(self, facts: Facts) -> int:
        """No trial is longer than the run; one that ends within the warmup does not reach the peak, and says so."""
        steps, warmup = self.wanted_steps or STEPS, facts.warmup_steps or 0
        longer = math.ceil(1.5 * warmup)
        if self.wanted_steps is None and STEPS < longer <= 2 * STEPS:
            steps = longer
            self.notes.append(f"trials have {steps} steps, to see what follows {warmup} steps of warmup")
        if facts.total_steps is not None and facts.total_steps < steps:
            steps = facts.total_steps
            self.notes.append(f"trials have {steps} steps, because the run itself has no more")
        if warmup > steps:
            self.notes.append(
                f"the warmup of the configuration takes {warmup} steps, but trials have {steps} and reach only "
                f"{steps / warmup:.0%} of its learning rate; increase steps"
            )
        return steps

    def _look(self, change: Change = BASELINE) -> tuple[Facts, Look, Any]:
        """Measure the first step under a change; also returns the module as it was built."""
        looker = Looker(self.callbacks, self.left_out, self.constant_loss)
        built = self._fit(self.module, self.data, change, looker)
        if looker.facts is None or looker.look is None:
            raise ValueError("diagnose: the data provides no batch for a first optimizer step.")
        return looker.facts, looker.look, built

    def _fit(self, module: Any, data: Any, change: Change, watcher: Callback) -> Any:
        """Fit a copy of the module under a change, and return it."""
        with isolate_rng(), same_order(data):
            subject = copy_module(module)
            subject = subject if change.rebuild is None else change.rebuild(subject)
            fit_afresh(self.trainer, subject, [*change.all_callbacks(self.callbacks), watcher], data)
        return subject

    def _all_seeds(self, changes: Plan, seeds: Sequence[int]) -> list[Trial]:
        tried, trials = [BASELINE, *changes.changes], list[Trial]()
        for seed in seeds:
            with self._seed(seed) as (module, data):
                label = "" if seed == seeds[0] else f", seed {seed}"
                trials += self._trials(module, data, tried, seed, label)
                is_saved = any(trial.keeps_model and trial.verdict is Verdict.TRAINS for trial in trials)
                if seed == seeds[0] and changes.last_resort is not None and not is_saved:
                    trials += self._trials(module, data, [changes.last_resort], seed, label)
                    tried.append(changes.last_resort)
        if len(seeds) > 1 and self.rebuild is None:
            self.notes.append("seeds differ only in the order of the data and in dropout: the weights start the same")
        return trials

    @contextmanager
    def _seed(self, seed: int) -> Iterator[tuple[Any, Any]]:
        """Module and data of a seed; its own seed leaves the module and the random generators as given."""
        if seed == _own_seed():
            yield self.module, self.data
            return
        before = {key: os.getenv(key) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
        with isolate_rng():
            seed_everything(seed, workers=bool(int(before["PL_SEED_WORKERS"] or 0)), verbose=False)
            try:
                yield (self.module, self.data) if self.rebuild is None else self.rebuild(seed)
            finally:
                for key, value in before.items():
                    os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)

    def _trials(self, module: Any, data: Any, changes: Sequence[Change], seed: int, label: str) -> Iterable[Trial]:
        for change in changes:
            is_baseline, progress = change is BASELINE, partial(self.progress, change.name + label, self.steps)
            constants = () if is_baseline else self.constants
            scale = None if is_baseline else self.loss_scale
            recorder = Recorder(self.steps, self.constant_loss, constants, change.factor, is_baseline, scale, progress)
            progress(0, math.nan)
            try:
                self._fit(module, data, change, recorder)
                recorder.check_data(0 if is_baseline else len(self.batches))
            except (ValueError, RuntimeError) as error:
                if is_baseline:
                    raise
                self.notes.append(
                    f"{change.name} could not be tried: {str(error).splitlines()[0].removeprefix('diagnose: ')}"
                )
                continue
            if is_baseline:
                self.batches, self.constants = recorder.batches, recorder.constants
                self.loss_scale = recorder.loss_scale
                if self.constant_loss is None:
                    self.constant_loss, self.labels = recorder.constant_loss, recorder.labels
            elif any(map(operator.ne, recorder.batches, self.batches)):
                self.notes.append(
                    f"the data loader returned different batches in the {change.name} trial, so its gain is not "
                    "exactly comparable"
                )
            yield recorder.result(change, seed, self.uniform_loss, self.is_negated)


def _own_seed() -> int:
    return int(os.getenv("PL_GLOBAL_SEED") or 0)


def _check_kinds(module: Any, data: Any, trainer: Any) -> None:
    if not has_class_name(module, "LightningModule"):
        kind = "a LightningModule class, not an instance of it" if isinstance(module, type) else type(module).__name__
        raise ValueError(
            f"diagnose: module must be a LightningModule, with its training_step and configure_optimizers, got {kind}."
        )
    if has_class_name(data, "Trainer") or not (trainer is None or has_class_name(trainer, "Trainer")):
        kinds = f"data={type(data).__name__}, trainer={type(trainer).__name__}"
        raise ValueError(f"diagnose: the order is diagnose(module, data, trainer), got {kinds}.")


def _check_seeds(seeds: Sequence[int] | None, n_seeds: int) -> tuple[int, ...]:
    check_whole("diagnose", "n_seeds", n_seeds, 1)
    if seeds is None:
        return tuple(range(_own_seed(), _own_seed() + n_seeds))
    if n_seeds != 1:
        raise ValueError("diagnose: give either seeds or n_seeds, not both.")
    if isinstance(seeds, (int, str)) or not seeds:
        raise ValueError(f"diagnose: seeds must be a list of whole numbers, got {seeds!r}; their number is n_seeds.")
    for seed in seeds:
        check_whole("diagnose", "a seed", seed, 0)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"diagnose: seeds {list(seeds)} names a seed twice.")
    return tuple(seeds)
