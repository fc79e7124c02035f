"""How a short run ended: a table of rules from its losses, its gradient by depth and its events to one word.

A dead run is recognised by its gradient and its loss together: at step 75 a dead post-norm run has the same loss as a
healthy one, and in a healthy run a block may be weak for some steps. Progress is measured step by step against the best
constant prediction on the labels of that very step, which cancels the noise of the batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from lightning_norms.reports.diagnosis.data import Trial, Verdict
from lightning_norms.reports.diagnosis.progress import TAIL, has_arrived, has_learnt, is_dead, standard_error, tail
from lightning_norms.reports.diagnosis.reach import (
    FIRST,
    VANISHED,
    all_stacks_at_work,
    end_of,
    received_nothing,
    weakest,
)

KEPT = 0.01
"""A block keeps its gradient if it has this share of the largest of its stack at the end."""


def judge(trial: Trial, constant_loss: float | None = None, uniform_loss: float | None = None) -> Trial:
    """Give a trial the verdict of the first rule in :data:`RULES` that applies.

    Args:
        trial: a short run; reads its losses, events and ``stalled_steps``.
        constant_loss: loss of the best constant prediction, nats; None if the labels are unknown.
        uniform_loss: loss of uniform predictions, ln V; progress is counted from there for a run that starts above it.

    Example:
        >>> losses = (5.0,) * 5 + (3.2,) * 25
        >>> excess = tuple(loss - 3.1 for loss in losses)
        >>> trial = Trial(name="as given", seed=0, planned_steps=30, losses=losses, excess=excess, stalled_steps=20)
        >>> judge(trial, 3.1).verdict
        <Verdict.STALLS: 'stalls silently'>
    """
    run = Run(trial, constant_loss, uniform_loss)
    rule = next(rule for rule in RULES if rule.applies(run))
    return replace(trial, verdict=rule.verdict, reason=rule.reason.format(run=run), plateau=rule.plateau)


def settle(trial: Trial, others: Sequence[Trial], constant_loss: float | None) -> Trial:
    """Turn a plateau at the constant prediction into a stall if another trial has learnt from the same batches.

    Alone, a flat run cannot be told from a plateau, which many tasks have at this loss.

    Args:
        trial: a trial with its verdict.
        others: the other trials of the same seed that keep the architecture.
        constant_loss: loss of the constant prediction.
    """
    better = [
        other
        for other in others
        if not other.stopped_early and has_learnt(other.excess, constant_loss, other.loss_scale)
    ]
    if not trial.plateau or not better:
        return trial
    runs = {other.name: Run(other, constant_loss) for other in better}
    best = min(runs, key=lambda name: runs[name].end_excess)
    flat = FLAT.format(run=Run(trial, constant_loss))
    reason = f"{flat}, while {best} came {-runs[best].end_excess:.2g} below it on the same batches"
    return replace(trial, verdict=Verdict.STALLS, reason=reason, plateau=False)


class Run:
    """The numbers of a trial that the rules read; NaN where there is no loss."""

    def __init__(self, trial: Trial, constant_loss: float | None, uniform_loss: float | None = None) -> None:
        finite = _with_gradient(trial)
        losses = finite or [math.nan]
        self.trial, self.steps, self.constant = trial, len(trial.losses), constant_loss
        self.has_loss, self.stalled = bool(finite), trial.stalled_steps
        self.stalled_for = "the last step" if self.stalled == 1 else f"the last {self.stalled} steps"
        self.first, self.end = losses[0], median(losses[-TAIL:])
        lowest = min(median(losses[i : i + 5]) for i in range(max(1, len(losses) - 4)))
        self.bottom = min(lowest, self.first)
        self.end_excess = fmean(tail(trial.excess) or [math.nan])
        scale = trial.loss_scale
        self.has_learnt = has_learnt(trial.excess, constant_loss, scale)
        fell_far = constant_loss is None and 0 < self.end < 0.3 * self.first  # all that can be said of such a loss
        self.is_dead = is_dead(trial.excess, self.stalled, constant_loss, scale) and not fell_far
        noise = 1.25 * standard_error(losses[-TAIL:]) if len(losses) > 1 else 0.0
        size, rise = abs(lowest) if scale is None else scale, self.end - self.bottom
        lower_quarter = sorted(losses[-TAIL:])[len(losses[-TAIL:]) // 4]
        stays = rise > 4 * noise or lower_quarter > self.bottom + 0.1 * rise  # most steps, not a few spikes
        self.has_risen = rise > max(0.5 * (self.first - lowest), 0.1 * size) and stays
        size = abs(self.first) if scale is None else scale
        self.has_fallen = self.has_learnt or self.first - self.end > max(0.02 * size, 2 * noise)
        start = self.first if uniform_loss is None else min(self.first, uniform_loss)
        distance = 0.0 if constant_loss is None else start - constant_loss
        self.is_flat = has_arrived(trial.excess, distance, constant_loss, scale)
        self.is_far = constant_loss is not None and self.end > constant_loss + 0.3 * max(0.0, distance)
        gradients = trial.gradients
        self.knows_nothing_better = not self.has_learnt and not fell_far
        self.is_still = bool(trial.learning_rates) and not any(trial.learning_rates)
        self.is_blind = bool(trial.grad_norms) and not any(trial.grad_norms)
        self.is_cut_off = received_nothing(gradients)
        first, last = (weakest(gradients, columns) or (1.0, "") for columns in (FIRST, end_of(gradients)))
        self.weakest_share, self.weakest_block = f"{last[0]:.2g}", last[1]
        self.has_vanished = max(first[0], last[0]) < VANISHED
        self.kept_gradients = bool(gradients.groups) and last[0] > KEPT and all_stacks_at_work(gradients)
        self.lost_gradients = last[0] <= KEPT
        self.is_at_chance = self.constant is not None or not self.has_fallen  # a fall to the constant is no learning
        self.against_constant = (
            "" if self.constant is None else f", and that of a constant prediction {self.constant:.4g}"
        )
        self.broken = next((event for event in trial.events if event.cause == "non_finite"), None)
        diverged = [event.step for event in trial.events if event.cause == "divergence"]
        self.since = f"from step {diverged[0]} on " if diverged else ""
        self.spikes = [event.step for event in trial.events if event.cause == "spike"]
        self.spike_count = len(self.spikes)
        self.spike_steps = ", ".join(map(str, self.spikes[:4])) + (", ..." if self.spike_count > 4 else "")


@dataclass(frozen=True)
class Rule:
    """One row of :data:`RULES`."""

    verdict: Verdict
    applies: Callable[[Run], bool]
    reason: str
    """Template of the sentence behind the verdict."""
    plateau: bool = False


STALLED = "for {run.stalled_for} some blocks received no gradient"
FELL = "the loss fell from {run.first:.4g} to {run.end:.4g}"
FLAT = (
    "the loss no longer falls: it ends at {run.end:.4g}, like a constant prediction "
    "({run.end_excess:+.2g} on the same labels)"
)
RULES = (
    Rule(Verdict.NON_FINITE, lambda run: run.broken is not None, "step {run.broken.step}: {run.broken.message}"),
    Rule(Verdict.UNDECIDED, lambda run: not run.has_loss, "no loss was recorded"),
    Rule(Verdict.STALLS, lambda run: run.is_still, "the learning rate is 0 in all {run.steps} steps: no weight moves"),
    Rule(
        Verdict.STALLS,
        lambda run: run.is_blind,
        "the gradient is exactly 0 in all {run.steps} steps: the loss does not depend on any trained weight",
    ),
    Rule(
        Verdict.DIVERGES,
        lambda run: run.trial.is_negated,
        "the loss is minus cross-entropy, so going from {run.first:.4g} to {run.end:.4g} makes the predictions worse: "
        "flip its sign",
    ),
    Rule(
        Verdict.STALLS,
        lambda run: run.is_dead and run.constant is None,
        STALLED + "; the loss is {run.end:.4g}",
    ),
    Rule(
        Verdict.STALLS,
        lambda run: run.is_dead,
        STALLED + ", and the loss, {run.end:.4g}, is no better than that of a constant prediction, {run.constant:.4g}",
    ),
    Rule(
        Verdict.STALLS,
        lambda run: run.is_cut_off and run.knows_nothing_better,
        "no block received a gradient in any step; the loss is {run.end:.4g}{run.against_constant}",
    ),
    Rule(
        Verdict.STALLS,
        lambda run: run.has_vanished and run.knows_nothing_better and not run.has_risen and run.is_at_chance,
        "from the first step on {run.weakest_block} receives {run.weakest_share} of the largest gradient of its stack, "
        "and the loss ends at {run.end:.4g}{run.against_constant}",
    ),
    Rule(
        Verdict.UNDECIDED,
        lambda run: run.has_risen and run.trial.optimizers > 1,
        "the loss rose from {run.bottom:.4g} to {run.end:.4g}, as it may when several optimizers compete",
    ),
    Rule(
        Verdict.DIVERGES,
        lambda run: run.has_risen,
        "{run.since}the loss rose to {run.end:.4g}, up from its lowest level, {run.bottom:.4g}",
    ),
    Rule(
        Verdict.SPIKES,
        lambda run: run.spike_count >= 3 and not run.has_learnt,
        "the loss spiked {run.spike_count} times (steps {run.spike_steps}) and ends at {run.end:.4g}",
    ),
    Rule(
        Verdict.UNDECIDED,
        lambda run: not run.has_fallen and run.end >= run.first,
        "the loss did not fall in {run.steps} steps: from {run.first:.4g} to {run.end:.4g}",
    ),
    Rule(
        Verdict.UNDECIDED,
        lambda run: not run.has_fallen,
        "the loss hardly moved in {run.steps} steps: from {run.first:.4g} to {run.end:.4g}",
    ),
    Rule(
        Verdict.UNDECIDED,
        lambda run: run.stalled > 0 and not run.has_learnt,
        STALLED + ", too few to call it a stall; the loss is {run.end:.4g}",
    ),
    Rule(
        Verdict.SPIKES, lambda run: run.is_flat and run.spike_count > 0, "after a spike at step {run.spikes[0]} " + FLAT
    ),
    Rule(Verdict.UNDECIDED, lambda run: run.is_flat, FLAT + ", which may be a plateau", plateau=True),
    Rule(
        Verdict.UNDECIDED,
        lambda run: run.is_far,
        "after {run.steps} steps the loss, down from {run.first:.4g} to {run.end:.4g}, is still above that of a "
        "constant prediction, {run.constant:.4g}",
    ),
    Rule(Verdict.TRAINS, lambda run: run.stalled > 0, FELL + ", but " + STALLED + ": the others learn alone"),
    Rule(
        Verdict.TRAINS,
        lambda run: run.is_cut_off,
        FELL + ", but no block received a gradient: the other parts learn alone",
    ),
    Rule(Verdict.TRAINS, lambda run: run.kept_gradients, FELL + ", and every block kept its gradient"),
    Rule(
        Verdict.TRAINS,
        lambda run: run.lost_gradients,
        FELL + ", but {run.weakest_block} receives only {run.weakest_share} of the largest gradient of its stack",
    ),
    Rule(Verdict.TRAINS, lambda run: run.has_fallen, FELL),
)
"""The verdicts from top to bottom: the first rule that applies decides."""


def _with_gradient(trial: Trial) -> list[float]:
    """Return the finite losses of the steps that had a gradient: a batch without a label has a loss of 0 and none."""
    norms = trial.grad_norms if any(trial.grad_norms) else ()
    silent = {step for step, norm in enumerate(norms) if norm == 0}
    return [loss for step, loss in enumerate(trial.losses) if math.isfinite(loss) and step not in silent]
