"""How a short run ended: pure rules from its losses, its gradient by depth and what was flagged, to one word.

::

    any NaN or infinity                                             non-finite
    the loss went back up and stayed                                diverges
    depths without a gradient at the end, and nothing learnt        stalls silently
    flat at the loss of a constant prediction                       undecided; after a spike: spikes; and if another
                                                                    trial has learnt from the same batches: stalls
    spikes at three times, or one that it did not come back from    spikes
    the loss fell, and no depth lost its gradient                   trains
    none of these                                                   undecided

A run is told dead by its gradient and its loss together: at step 75 a dead post-norm run has the same loss as a healthy
one, and a healthy run may have a depth that is weak for some steps. What was learnt is judged step by step against the
best constant prediction on the very labels of that step, which takes the noise of the batches out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median, pstdev

from lightning_norms.reports.diagnosis.data import Trial, Verdict

TAIL = 10
"""Steps that the end loss is the median of."""
STALLED_FOR = 10
"""Steps in a row that the stall rule must hold for at the end."""
MARGIN = 0.01
"""Share of the constant prediction's loss by which a run must be below it to have learnt more than a constant."""
NEAR = 0.1
"""Share of the way from knowing nothing to a constant prediction within which a run counts as having arrived."""


PLATEAU = ", which may be a plateau"


def level(losses: Sequence[float], steps: int = TAIL) -> float | None:
    """Median of the last finite losses; None if there are none.

    Example:
        >>> level([5.0, float("nan"), 3.0, 2.0])
        3.0
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    return median(finite[-steps:]) if finite else None


def has_learnt(excess: Sequence[float], constant_loss: float | None) -> bool:
    """Whether the end is clearly below the best constant prediction on the same labels; False if that is not known.

    Example:
        >>> has_learnt([-0.1] * 20, 3.17), has_learnt([-0.01] * 20, 3.17), has_learnt([], None)
        (True, False, False)
    """
    mean, error = _end(excess)
    return constant_loss is not None and mean is not None and mean < -max(MARGIN * abs(constant_loss), 3 * error)


def is_dead(excess: Sequence[float], stalled_steps: int, constant_loss: float | None) -> bool:
    """Whether depths have had no gradient for so long, and so little was learnt, that more steps change nothing."""
    return stalled_steps >= STALLED_FOR and not has_learnt(excess, constant_loss)


def has_arrived(excess: Sequence[float], way: float, constant_loss: float | None) -> bool:
    """Whether a run sits at the constant prediction and no longer falls: its last third is flat, and near it.

    Args:
        excess: by step.
        way: nats from knowing nothing to the constant prediction.
        constant_loss: of the constant prediction.
    """
    third = [value for value in excess if math.isfinite(value)][-max(1, len(excess) // 3) :]
    if len(third) < 2 * TAIL or constant_loss is None or has_learnt(excess, constant_loss):
        return False
    early, late = third[: len(third) // 2], third[len(third) // 2 :]
    error = math.hypot(pstdev(early) / math.sqrt(len(early)), pstdev(late) / math.sqrt(len(late)))
    falls = fmean(early) - fmean(late) > max(2 * error, 0.1 * MARGIN * abs(constant_loss))
    return abs(fmean(late)) < NEAR * max(way, 0.0) and not falls


def judge(trial: Trial, constant_loss: float | None = None, uniform_loss: float | None = None) -> tuple[Verdict, str]:
    """The verdict on a trial, and why.

    Args:
        trial: with its losses, events and ``stalled_steps``; its own verdict is not read.
        constant_loss: of the best constant prediction, nats; None if the labels are not known.
        uniform_loss: of a model that knows nothing, ln V; a run that starts above it has that much less to show.

    Example:
        >>> losses = (5.0,) * 5 + (3.2,) * 25
        >>> excess = tuple(loss - 3.1 for loss in losses)
        >>> judge(Trial("as given", "", {}, 0, 30, losses=losses, excess=excess, stalled_steps=20), 3.1)
        (<Verdict.STALLS: 'stalls silently'>, 'depths without a gradient for the last 20 steps, at loss 3.2: ...')
    """
    end, first = level(trial.losses), _first(trial.losses)
    bad = next((event for event in trial.events if event.cause == "non_finite"), None)
    if bad is not None:
        return Verdict.NON_FINITE, f"step {bad.step}: {bad.message}"
    if end is None or first is None:
        return Verdict.UNDECIDED, "no loss was seen"
    if is_dead(trial.excess, trial.stalled_steps, constant_loss):
        return Verdict.STALLS, _stalled(trial, end, constant_loss)
    lowest = _lowest(trial.losses)
    diverged = next((event for event in trial.events if event.cause == "divergence"), None)
    rise = end - min(lowest, first)
    if rise > max(0.5 * (first - lowest), 0.1 * abs(lowest), 4 * _noise(trial.losses)):
        since = f"since step {diverged.step} " if diverged is not None else ""
        return Verdict.DIVERGES, f"{since}the loss is at {end:.4g}, up from {min(lowest, first):.4g}, its lowest level"
    return _without_a_rise(trial, first, end, constant_loss, uniform_loss)


def _without_a_rise(
    trial: Trial, first: float, end: float, constant_loss: float | None, uniform_loss: float | None
) -> tuple[Verdict, str]:
    """The rest of the ladder, for a run that ended finite, alive and not above where it had been."""
    spikes = [event for event in trial.events if event.cause == "spike"]
    if len(spikes) >= 3 and not has_learnt(trial.excess, constant_loss):
        steps = ", ".join(str(event.step) for event in spikes[:4])
        return Verdict.SPIKES, f"{len(spikes)} spikes (steps {steps}), and the loss is at {end:.4g}"
    fall = first - end
    if fall <= max(0.02 * abs(first), 2 * _noise(trial.losses)):
        how = "did not come down" if fall <= 0 else "hardly moved"
        return Verdict.UNDECIDED, f"the loss {how} in {len(trial.losses)} steps: {first:.4g} to {end:.4g}"
    if trial.stalled_steps and not has_learnt(trial.excess, constant_loss):
        last = trial.stalled_steps
        return Verdict.UNDECIDED, f"depths without a gradient for the last {last} steps only, at loss {end:.4g}"
    start = first if uniform_loss is None else min(first, uniform_loss)
    if constant_loss is not None and has_arrived(trial.excess, start - constant_loss, constant_loss):
        text = (
            f"the loss no longer falls: it is at {end:.4g}, {_beside(trial)} a constant prediction of the same labels"
        )
        if spikes:
            return Verdict.SPIKES, f"after a spike at step {spikes[0].step} {text}"
        return Verdict.UNDECIDED, text + PLATEAU
    if constant_loss is not None and end > constant_loss + 0.3 * max(0.0, start - constant_loss):
        return (
            Verdict.UNDECIDED,
            f"the loss fell from {first:.4g} to {end:.4g}, still above {constant_loss:.4g}, that of a constant "
            f"prediction, after {len(trial.losses)} steps",
        )
    return Verdict.TRAINS, f"the loss fell from {first:.4g} to {end:.4g}{_depths(trial)}"


def _stalled(trial: Trial, end: float, constant_loss: float | None) -> str:
    text = f"depths without a gradient for the last {trial.stalled_steps} steps, at loss {end:.4g}"
    if constant_loss is None:
        return text
    return f"{text}: {end - constant_loss:+.2g} from that of a constant prediction, {constant_loss:.4g}"


def _depths(trial: Trial) -> str:
    if trial.stalled_steps:
        return f", but some depths had no gradient in the last {trial.stalled_steps} steps: the others learn alone"
    return ", and every depth kept its gradient" if trial.gradients.groups else ""


def _end(excess: Sequence[float]) -> tuple[float | None, float]:
    """Mean of the last steps, and its standard error."""
    tail = [value for value in excess if math.isfinite(value)][-TAIL:]
    if not tail:
        return None, 0.0
    return fmean(tail), pstdev(tail) / math.sqrt(len(tail))


def settled(trial: Trial, others: Sequence[Trial], constant_loss: float | None) -> Trial:
    """A run that is flat at the constant prediction is dead if another one has learnt from the same batches.

    Alone it cannot be told from a plateau, which many tasks have there.

    Args:
        trial: as it was judged.
        others: of the same seed, that keep the architecture.
        constant_loss: of the constant prediction.
    """
    flat = trial.verdict is Verdict.UNDECIDED and trial.reason.endswith(PLATEAU)
    better = [each for each in others if not each.stopped_early and has_learnt(each.excess, constant_loss)]
    if not flat or not better:
        return trial
    best = min(better, key=lambda each: fmean(each.excess[-TAIL:]))
    reason = (
        trial.reason.removesuffix(PLATEAU) + f", while {best.name} has come to {_beside(best)} it on the same batches"
    )
    return replace(trial, verdict=Verdict.STALLS, reason=reason)


def _beside(trial: Trial) -> str:
    return f"{fmean(trial.excess[-TAIL:]):+.2g} from"


def _first(losses: Sequence[float]) -> float | None:
    return next((loss for loss in losses if math.isfinite(loss)), None)


def _lowest(losses: Sequence[float]) -> float:
    """The lowest level: median of five steps in a row."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return min(median(finite[i : i + 5]) for i in range(max(1, len(finite) - 4)))


def _noise(losses: Sequence[float]) -> float:
    """Standard error of the end level, from the scatter of the last steps."""
    tail = [loss for loss in losses if math.isfinite(loss)][-TAIL:]
    return 1.25 * pstdev(tail) / math.sqrt(len(tail)) if len(tail) > 1 else 0.0
