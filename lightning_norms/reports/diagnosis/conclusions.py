"""From what was measured to what is said: the causes, the fixes in order, and the answer in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from lightning_norms.reports.diagnosis.claims import claims
from lightning_norms.reports.diagnosis.data import (
    AS_GIVEN,
    Diagnosis,
    Facts,
    Fix,
    Look,
    Trial,
    Verdict,
)
from lightning_norms.reports.diagnosis.mechanisms import mechanisms
from lightning_norms.reports.diagnosis.summary import summarize
from lightning_norms.reports.diagnosis.verdicts import settled

SEVERITY = (
    Verdict.NON_FINITE,
    Verdict.DIVERGES,
    Verdict.STALLS,
    Verdict.SPIKES,
    Verdict.UNDECIDED,
    Verdict.TRAINS,
)
"""Worst first: over several seeds the worst is the verdict."""


def conclude(
    facts: Facts,
    look: Look,
    trials: Sequence[Trial],
    notes: Sequence[str] = (),
    rescaled_look: Look | None = None,
    shallow_look: Look | None = None,
) -> Diagnosis:
    """The whole diagnosis.

    Args:
        facts: the run as configured.
        look: what was measured at the start.
        trials: all trials of all seeds; those named ``AS_GIVEN`` are the configuration itself. May be empty.
        notes: what was left out, and why.
        rescaled_look: the look after the residual rescale.
        shallow_look: the look at fewer blocks.
    """
    trials = [settled(each, _beside(each, trials), look.constant_loss) for each in trials]
    found = Diagnosis(
        facts,
        look,
        overall(trials) if facts.trainable else Verdict.STALLS,
        tuple(trials),
        mechanisms(facts, look, trials),
        rank(trials),
        claims(look, trials, rescaled_look, shallow_look),
        rescaled_look,
        shallow_look,
        tuple(notes),
    )
    return replace(found, summary=summarize(found))


def overall(trials: Iterable[Trial]) -> Verdict:
    """The worst verdict of the configuration as given over all seeds; undecided if it was not tried."""
    seen = [trial.verdict for trial in trials if trial.name == AS_GIVEN]
    return min(seen, key=SEVERITY.index, default=Verdict.UNDECIDED)


def rank(trials: Sequence[Trial]) -> tuple[Fix, ...]:
    """Every change that was tried, the best first.

    What trains on every seed stands before what does not; then changes that keep the architecture; then the lower end
    loss.
    """
    base = {trial.seed: trial for trial in trials if trial.name == AS_GIVEN}
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.name != AS_GIVEN:
            by_name.setdefault(trial.name, []).append(trial)
    fixes = [_fix(group, base) for group in by_name.values()]
    return tuple(sorted(fixes, key=_order))


def _beside(trial: Trial, trials: Iterable[Trial]) -> list[Trial]:
    """The other trials of its seed on the same architecture."""
    return [each for each in trials if each is not trial and each.seed == trial.seed and each.keeps_model]


def _fix(group: Sequence[Trial], base: dict[int, Trial]) -> Fix:
    gains = [
        reference.end_loss - trial.end_loss
        for trial in group
        if trial.end_loss is not None
        and not trial.stopped_early  # fewer steps: no end that could be compared
        and (reference := base.get(trial.seed)) is not None
        and reference.end_loss is not None
        and not reference.stopped_early
    ]
    first = group[0]
    return Fix(
        name=first.name,
        change=first.change,
        patch=first.patch,
        trains=all(trial.verdict is Verdict.TRAINS for trial in group),
        keeps_model=first.keeps_model,
        verdicts=tuple(trial.verdict for trial in group),
        gain=fmean(gains) if gains else None,
        spread=stdev(gains) if len(gains) > 1 else None,
        end_losses=tuple(trial.end_loss for trial in group if trial.end_loss is not None),
    )


def _order(fix: Fix) -> tuple[bool, bool, float]:
    end = fmean(fix.end_losses) if fix.end_losses else float("inf")
    return (not fix.trains, not fix.keeps_model, end)
