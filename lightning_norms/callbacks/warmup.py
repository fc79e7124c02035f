"""Warmup for any LightningModule, on top of whatever optimizer and scheduler it has."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.sharding import is_deepspeed
from lightning_norms.learning_rate import (
    Factors,
    KeepsConfiguration,
    UnseenSteps,
    configured_of,
    effective_learning_rates,
    factors_of,
    follow,
    show_to_monitors,
)
from lightning_norms.schedules import Run, Schedule, UntunedWarmup

NAME = "warmup"


class Warmup(KeepsConfiguration):
    r"""Multiplies the learning rate of every optimizer by a schedule, step by step.

    .. math:: \text{effective} = \text{scheduler's learning rate} \cdot \text{schedule}(\text{step})

    It works with any scheduler or none, in automatic and manual optimization, without a change to the module. A step
    is one that the optimizer really took, counted for each optimizer on its own: accumulation counts once a window,
    and a step that the fp16 GradScaler skips does not advance the warmup (Lightning still steps the user's scheduler).
    Your own code may set learning rates anywhere. An optimizer made anew in mid-run goes on where the old one stood.
    Checkpoints hold the scheduler's learning rate and the number of steps. A resumed run continues its warmup; a
    checkpoint made without this callback starts it. A second ``Warmup`` on the same optimizer raises.

    Every ``Trainer(log_every_n_steps)`` steps all loggers get ``learning_rate/effective/<group>``. A
    ``LearningRateMonitor`` shows the effective learning rate if it stands after this callback, else the scheduler's.

    Args:
        schedule: factor by optimizer step, counted from 0.

    Raises:
        TypeError: when built, if ``schedule`` is no schedule.
        ValueError: when training starts, if the schedule needs something that the run or its optimizer does not have
            (``UntunedWarmup`` needs a beta2, which SGD lacks), or under DeepSpeed.

    Example:
        >>> from lightning_norms.schedules import LinearWarmup
        >>> trainer = Trainer(callbacks=[Warmup(LinearWarmup(100))], logger=False, enable_checkpointing=False)

    Source: Vaswani et al. 2017, arXiv:1706.03762; default schedule: Ma & Yarats 2019, arXiv:1910.04209.
    """

    def __init__(self, schedule: Schedule = UntunedWarmup()) -> None:  # noqa: B008 - frozen, and YAML shows it by name
        super().__init__()
        if not isinstance(schedule, Schedule):
            raise TypeError(f"Warmup needs a schedule, for instance Warmup(LinearWarmup(100)); got {schedule!r}")
        self.schedule = schedule
        self._steps: list[int] = []
        self._optimizers: list[Optimizer] = []
        self._factors: list[Factors] = []
        self._monitors: list[Callback] = []
        self._unseen: UnseenSteps | None = None
        self._taken = self._taken_before = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._steps = []  # a new fit starts over; a checkpoint is loaded after this

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in on_fit_start: sharded strategies restore their state after it.
        if is_deepspeed(trainer.strategy):
            raise ValueError(
                "Warmup: DeepSpeed steps an optimizer of its own, which this callback does not reach: use the WarmupLR "
                "of DeepSpeed's configuration, or a scheduler in configure_optimizers."
            )
        configured_of(trainer).warn(trainer)
        self._optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]
        all_factors = [factors_of(optimizer) for optimizer in self._optimizers]
        if any(NAME in factors.names() for factors in all_factors):  # a subclass, which Lightning takes for another one
            raise ValueError("Warmup: another Warmup is on this optimizer already; keep one of them in the Trainer")
        total_steps = _total_steps(trainer, pl_module)
        schedules = [self.schedule.resolve(_run(optimizer, total_steps)) for optimizer in self._optimizers]
        _warn_if_longer(trainer, schedules, total_steps)
        steps = self._steps + [0] * len(all_factors)
        for factors, schedule, step in zip(all_factors, schedules, steps, strict=False):
            factors.clock = step
            factors.set(NAME, schedule)
        self._factors = all_factors
        self._taken = self._taken_before = sum(factors.taken for factors in all_factors)
        self._unseen = UnseenSteps(pl_module, "Warmup", "the warmup has no effect")
        self._monitors = show_to_monitors(trainer, self)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._follow(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._follow(trainer, stepping=optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for factors in self._factors:
            factors.hide()  # a step whose exception was swallowed by manual optimization is still open
        taken = sum(factors.taken for factors in self._factors)
        stepped, self._taken = taken > self._taken, taken
        if self._unseen is not None:
            self._unseen.end_batch(trainer, taken - self._taken_before)
        if stepped and trainer.loggers and trainer._logger_connector.should_update_logs:
            # At the step number of the losses that `self.log` wrote for this step.
            rates = effective_learning_rates(self._optimizers)
            for logger in trainer.loggers:
                logger.log_metrics(metrics=rates, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = self.state_dict()["steps"]  # for a checkpoint that is saved after fit
        for factors in self._factors:
            factors.remove(NAME)
        self._optimizers, self._factors, self._unseen = [], [], None
        for callback in self._monitors:
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # set by its callback connector
        self._monitors = []

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)  # Lightning calls neither on_fit_end nor teardown after an exception

    def _follow(self, trainer: Trainer, stepping: Optimizer | None = None) -> None:
        """Warm up optimizers that were made anew in mid-run from where those before them stood."""
        if self._factors:
            self._factors = follow(self._factors, trainer.optimizers, stepping)
            self._optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": [factors.clock for factors in self._factors] or list(self._steps)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = list(state_dict["steps"])

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_steps": self.state_dict()["steps"],
            "_optimizers": [],
            "_factors": [],
            "_unseen": None,
        }


def _run(optimizer: Optimizer, total_steps: int | None) -> Run:
    group = optimizer.param_groups[0]
    beta2 = float(group["betas"][1]) if "betas" in group else None
    # A scheduler keeps the base learning rate as initial_lr and may already have changed lr.
    return Run(total_steps, beta2, learning_rate=float(group.get("initial_lr", group["lr"])))


def _total_steps(trainer: Trainer, pl_module: LightningModule) -> int | None:
    """Optimizer steps of the whole run; None if it has no known end."""
    if pl_module.automatic_optimization:
        # Not before on_train_start: Lightning would set the data up before it has the state of a stateful loader.
        total = trainer.estimated_stepping_batches
    else:  # max_steps counts the steps of all optimizers together
        total = trainer.max_steps if len(trainer.optimizers) == 1 else math.inf
    return int(total) if 0 < total < math.inf else None


def _warn_if_longer(trainer: Any, schedules: list[Schedule], total_steps: int | None) -> None:
    longest = max(schedules, key=lambda schedule: schedule.warmup_length(), default=None)
    if longest is None or total_steps is None or longest.warmup_length() <= total_steps or trainer.fast_dev_run:
        return
    rank_zero_warn(
        f"Warmup takes {longest.warmup_length()} optimizer steps, but the run ends after {total_steps}:"
        f" its last step uses {longest(total_steps - 1):.2g} of the scheduler's learning rate. Train longer, or use a"
        " shorter warmup",
        category=UserWarning,
    )
