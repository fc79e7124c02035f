"""From measurements to the diagnosis: the verdict over all seeds, the causes, the claims and the fixes in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from lightning_norms.reports.diagnosis.claims import claims
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Facts, Fix, Look, Trial, Verdict
from lightning_norms.reports.diagnosis.mechanisms import mechanisms
from lightning_norms.reports.diagnosis.summary import summarize
from lightning_norms.reports.diagnosis.verdicts import settle

SEVERITY = (
    Verdict.NON_FINITE,
    Verdict.DIVERGES,
    Verdict.STALLS,
    Verdict.SPIKES,
    Verdict.UNDECIDED,
    Verdict.TRAINS,
)
"""Worst first: the verdict over several seeds is the worst one."""


def conclude(
    facts: Facts,
    look: Look,
    trials: Sequence[Trial],
    notes: Sequence[str] = (),
    rescaled_look: Look | None = None,
    shallow_look: Look | None = None,
) -> Diagnosis:
    """Assemble the diagnosis.

    Args:
        facts: the run as configured.
        look: measurements at the first step.
        trials: all trials of all seeds; those named ``AS_GIVEN`` are the configuration itself. May be empty.
        notes: what was left out, and why.
        rescaled_look: measurements after the residual rescale.
        shallow_look: measurements with fewer blocks.
    """
    trials = [settle(trial, _comparable(trial, trials), look.constant_loss) for trial in trials]
    diagnosis = Diagnosis(
        facts=facts,
        look=look,
        verdict=overall(trials) if facts.trainable else Verdict.STALLS,
        trials=tuple(trials),
        causes=mechanisms(facts, look, trials),
        fixes=rank(trials),
        claims=claims(look, trials, rescaled_look, shallow_look),
        rescaled_look=rescaled_look,
        shallow_look=shallow_look,
        notes=tuple(notes),
    )
    return replace(diagnosis, summary=summarize(diagnosis))


def overall(trials: Iterable[Trial]) -> Verdict:
    """Return the worst verdict of the configuration as given over all seeds; undecided if it was not tried."""
    verdicts = [trial.verdict for trial in trials if trial.name == AS_GIVEN]
    return min(verdicts, key=SEVERITY.index, default=Verdict.UNDECIDED)


def rank(trials: Sequence[Trial]) -> tuple[Fix, ...]:
    """Summarize every change that was tried, the best first.

    Changes that train on every seed come first; among them, those that keep the architecture; then the lowest end loss.
    """
    base = {trial.seed: trial for trial in trials if trial.name == AS_GIVEN}
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.name != AS_GIVEN:
            by_name.setdefault(trial.name, []).append(trial)
    fixes = [_fix(group, base) for group in by_name.values()]
    return tuple(sorted(fixes, key=_order))


def _comparable(trial: Trial, trials: Iterable[Trial]) -> list[Trial]:
    """The other trials of the same seed on the same architecture."""
    return [other for other in trials if other is not trial and other.seed == trial.seed and other.keeps_model]


def _fix(group: Sequence[Trial], base: dict[int, Trial]) -> Fix:
    gains = [
        reference.end_loss - trial.end_loss
        for trial in group
        if trial.end_loss is not None
        and not trial.stopped_early  # after fewer steps the end losses are not comparable
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
