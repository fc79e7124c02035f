"""``diagnose``: look at a run's first step, try it and its counterfactuals for some steps each, and conclude.

::

    given module, data, trainer
        |-- copy --> look          one step: sizes by depth, what the first update changes
        |-- copy --> as given      some eighty steps, on a real Trainer.fit
        |-- copy --> each change   the same batches from the same weights
        '-- untouched              conclude: verdict, causes, fixes
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_norms.diagnosing.borrowing import borrowed, fit_afresh, is_left_out, same_order
from lightning_norms.diagnosing.changes import GIVEN, Plan, plan, shallower
from lightning_norms.diagnosing.counterfactual import Change
from lightning_norms.diagnosing.initial_flags import TRAINED
from lightning_norms.diagnosing.looking import Looker
from lightning_norms.diagnosing.trial_progress import Silent, TrialProgress
from lightning_norms.diagnosing.trials import Recorder, run_trial
from lightning_norms.reports.diagnosis.conclusions import conclude
from lightning_norms.reports.diagnosis.data import Diagnosis, Facts, Look, Trial, Verdict

Rebuild = Callable[[int], tuple[Any, Any]]
"""Seed -> (module, data) made anew with it."""


def diagnose(
    module: LightningModule,
    data: Any = None,
    trainer: Any = None,
    *,
    steps: int | None = None,
    seeds: int = 1,
    trials: bool = True,
    rebuild: Rebuild | None = None,
    progress: TrialProgress | None = None,
) -> Diagnosis:
    """Whether a configuration trains, why not, and what would fix it, each answer with its numbers.

    Everything runs on copies, through ``Trainer.fit``: precision, strategy, optimizer and callbacks are the user's.
    Module, trainer, random generators and folders are left as they were.

    Args:
        module: any LightningModule, before its training.
        data: a LightningDataModule, training loaders, or None for the module's own ``train_dataloader``.
        trainer: whose precision, strategy, accumulation, clipping and callbacks count; None for one process on any
            accelerator. Callbacks that write, watch or rescue are left out.
        steps: optimizer steps of a trial; those that are decided earlier stop earlier. None for 80, or half as many
            again as the configuration's warmup takes, up to 160.
        seeds: repeat all trials for so many seeds.
        trials: False only looks at the first step.
        rebuild: makes module and data anew for seeds after the first; without it these differ only in the order of the
            data and in dropout, unless the module builds itself in ``configure_model``.
        progress: told of every step.

    Raises:
        ValueError: nothing can be said: no optimizer, LBFGS, DeepSpeed, a module that cannot be copied, data without
            a batch.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> found = diagnose(BoringModel(), steps=5)
        >>> found.facts.optimizer, found.look.flags[0].name
        ('SGD', 'no blocks')
    """
    _check(steps, seeds)
    trainer = _plain_trainer(module) if trainer is None else trainer
    session = _Session(module, data, trainer, steps, progress or Silent(), rebuild)
    frozen = _all_frozen(module)
    if frozen is not None:
        return conclude(*frozen, trials=(), notes=("nothing was tried: there is nothing to train",))
    with borrowed(trainer) as given:
        return session.run(given, seeds, trials)


STEPS = 80
"""Of a trial, unless somebody says otherwise."""


class _Session:
    """One call: what every fit of it shares."""

    def __init__(
        self, module: Any, data: Any, trainer: Any, steps: int | None, progress: TrialProgress, rebuild: Rebuild | None
    ) -> None:
        self.module, self.data, self.trainer = module, data, trainer
        self.wanted_steps, self.steps = steps, STEPS if steps is None else steps
        self.progress, self.rebuild = progress, rebuild
        self.notes: list[str] = []
        entropy = getattr(data, "unigram_entropy", None) if hasattr(type(data), "unigram_entropy") else None
        self.uniform_loss: float | None = None
        self.labels = 0
        self.batches: list[float] = []
        self.constants: tuple[float, ...] = ()
        self.constant_loss: float | None = None if entropy is None else float(entropy)

    def run(self, given: Sequence[Callback], seeds: int, trials: bool) -> Diagnosis:
        """Look, try, conclude."""
        left_out = [type(each).__name__ for each in self.trainer.callbacks if is_left_out(each)]
        with self.progress:
            self.progress.start("look", 1)
            facts, look, built = self._look(given, left_out)
            self.progress.step(1, math.nan if look.first_loss is None else look.first_loss)
            if not trials:
                return conclude(facts, look, (), ("no trials: only the first step was looked at",))
            self.uniform_loss = look.uniform_loss
            self._fit_steps(facts)
            trained = any(flag.name == TRAINED for flag in look.flags)
            chosen = plan(facts, built, given, self.steps, trained)
            rescaled = self._changed_look(
                given, next((each for each in chosen.changes if each.name == "rescale"), None)
            )
            shallow = self._changed_look(given, shallower(built))
            del built
            self.notes += chosen.notes
            done = self._all_seeds(given, chosen, seeds)
            if self.labels:  # the whole trial has told more of them than the first step
                look = replace(look, constant_loss=self.constant_loss, labels=self.labels)
        return conclude(facts, look, done, self.notes, rescaled, shallow)

    def _fit_steps(self, facts: Facts) -> None:
        """No trial is longer than the run; one that is shorter than its warmup does not see the peak, and says so."""
        longer = math.ceil(1.5 * (facts.warmup_steps or 0))
        if self.wanted_steps is None and STEPS < longer <= 2 * STEPS:
            self.steps = longer
            self.notes.append(f"trials have {self.steps} steps, to see what comes after {facts.warmup_steps} of warmup")
        if facts.total_steps is not None and facts.total_steps < self.steps:
            self.steps = facts.total_steps
            self.notes.append(f"trials have {self.steps} steps, as the run itself has no more")
        if facts.warmup_steps and facts.warmup_steps > self.steps:
            self.notes.append(
                f"the warmup of the configuration takes {facts.warmup_steps} steps, and trials have {self.steps}: "
                f"they reached {self.steps / facts.warmup_steps:.0%} of its learning rate; give more steps"
            )

    def _all_seeds(self, given: Sequence[Callback], chosen: Plan, seeds: int) -> list[Trial]:
        changes, done = [GIVEN, *chosen.changes], list[Trial]()
        for number in range(seeds):
            with self._seed(number) as (module, data):
                done += self._trials(module, data, given, changes, number)
                saved = any(trial.keeps_model and trial.verdict is Verdict.TRAINS for trial in done)
                if number == 0 and chosen.last_resort is not None and not saved:
                    done += self._trials(module, data, given, [chosen.last_resort], number)
                    changes.append(chosen.last_resort)
        if seeds > 1 and self.rebuild is None:
            self.notes.append("seeds differ in the order of the data and in dropout; the weights start the same")
        return done

    def _changed_look(self, given: Sequence[Callback], change: Change | None) -> Look | None:
        """The first step under a change; None if there is no such change."""
        return None if change is None else self._look(given, (), change)[1]

    def _look(
        self, given: Sequence[Callback], left_out: Sequence[str], change: Change = GIVEN
    ) -> tuple[Facts, Look, Any]:
        looker = Looker(given, left_out, self.constant_loss)
        subject = _copied(self.module)
        with isolate_rng(), same_order(self.data):
            subject = subject if change.rebuild is None else change.rebuild(subject)
            fit_afresh(self.trainer, subject, [*change.callbacks_from(given), looker], self.data)
        if looker.facts is None or looker.look is None:
            raise ValueError("diagnose: the data gave no batch for a first optimizer step; nothing could be looked at.")
        return looker.facts, looker.look, subject

    @contextmanager
    def _seed(self, number: int) -> Iterator[tuple[Any, Any]]:
        """Module and data of the seed ``number``: 0 is what was given, with the random numbers as they are."""
        if number == 0:
            yield self.module, self.data
            return
        before = {key: os.getenv(key) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
        seed = int(before["PL_GLOBAL_SEED"] or 0) + number
        with isolate_rng():
            seed_everything(seed, workers=bool(int(before["PL_SEED_WORKERS"] or 0)), verbose=False)
            try:
                yield (self.module, self.data) if self.rebuild is None else self.rebuild(seed)
            finally:
                for key, value in before.items():
                    os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)

    def _trials(
        self, module: Any, data: Any, given: Sequence[Callback], changes: Sequence[Change], number: int
    ) -> Iterable[Trial]:
        for change in changes:
            recorder = self._recorder(change)
            self.progress.start(change.name if not number else f"{change.name}, seed {number}", self.steps)
            try:
                with isolate_rng(), same_order(data):
                    run_trial(self.trainer, _copied(module), data, given, change, recorder)
            except (ValueError, RuntimeError) as error:
                if change is GIVEN:
                    raise
                self.notes.append(f"{change.name} could not be tried: {str(error).splitlines()[0]}")
                continue
            if change is GIVEN:
                self.batches, self.constants = recorder.batches, recorder.constants
                if self.constant_loss is None:
                    self.constant_loss, self.labels = recorder.constant_loss, recorder.labels
            elif recorder.batches != self.batches[: len(recorder.batches)]:
                self.notes.append(f"the data gave other batches to {change.name}: its gain has that noise in it")
            yield recorder.result(change, number, self.uniform_loss)

    def _recorder(self, change: Change) -> Recorder:
        return Recorder(
            self.steps,
            self.constant_loss,
            () if change is GIVEN else self.constants,
            change.learning_rate,
            watch_labels=change is GIVEN,
            run_to_the_end=change is GIVEN,
            progress=self.progress.step,
        )


def _check(steps: int | None, seeds: int) -> None:
    for name, value, least in (("steps", STEPS if steps is None else steps, 1), ("seeds", seeds, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"diagnose: {name} is {value!r}, but it must be a whole number >= {least}.")


def _copied(module: Any) -> Any:
    """A copy that shares nothing with the user's module, the trainer that it hangs on left out."""
    attached = {name: getattr(module, name) for name in ("_trainer", "_fabric") if getattr(module, name, None)}
    for name in attached:
        setattr(module, name, None)
    try:
        return copy.deepcopy(module)
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        raise ValueError(
            f"diagnose: {type(module).__name__} cannot be copied, and trials need copies: {str(error).splitlines()[0]}"
        ) from error
    finally:
        for name, value in attached.items():
            setattr(module, name, value)


def _plain_trainer(module: Any) -> Any:
    # `lightning.pytorch` and `pytorch_lightning` are two copies, and each refuses the other's modules.
    library = next(parent.__module__ for parent in type(module).__mro__ if parent.__name__ == "LightningModule")
    package = importlib.import_module("lightning.pytorch" if library.startswith("lightning.") else "pytorch_lightning")
    return package.Trainer(
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
    )


def _all_frozen(module: Any) -> tuple[Facts, Look] | None:
    """Facts of a module without anything to train, for which no optimizer can be made; None for any other."""
    parameters = list(module.parameters())
    if not parameters or any(parameter.requires_grad for parameter in parameters):
        return None
    count = sum(parameter.numel() for parameter in parameters)
    facts = Facts(
        type(module).__name__, count, 0, {}, "none", math.nan, None, None, None, None, "", 1, 1, False, (), ()
    )
    return facts, Look(None, None, None, None, 0, None, None)
