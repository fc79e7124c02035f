"""How a short run ended: pure rules from its losses, its gradient by depth and what was flagged, to one word.

::

    any NaN or infinity                                             non-finite
    the loss went back up and stayed                                diverges
    depths without a gradient at the end, and nothing learnt        stalls silently
    spikes at three times, or one that it did not come back from    spikes
    the loss fell, and no depth lost its gradient                   trains
    none of these                                                   undecided

A run is told dead by its gradient and its loss together: at step 75 a dead post-norm run has the same loss as a healthy
one, and a healthy run may have a depth that is weak for some steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, pstdev

from lightning_norms.reports.diagnosis import Trial, Verdict

TAIL = 10
"""Steps that the end loss is the median of."""
STALLED_FOR = 10
"""Steps in a row that the stall rule must hold for at the end."""
MARGIN = 0.05
"""Share of the constant predictor's loss by which a run must be below it to have learnt more than a constant."""


def level(losses: Sequence[float], steps: int = TAIL) -> float | None:
    """Median of the last finite losses; None if there are none.

    Example:
        >>> level([5.0, float("nan"), 3.0, 2.0])
        3.0
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    return median(finite[-steps:]) if finite else None


def has_learnt(losses: Sequence[float], constant_loss: float | None) -> bool:
    """Whether the end loss is clearly below that of the best constant prediction; False where that is not known."""
    end = level(losses)
    if end is None or constant_loss is None:
        return False
    return end < constant_loss - max(MARGIN * abs(constant_loss), 2 * _noise(losses))


def is_dead(losses: Sequence[float], stalled_steps: int, constant_loss: float | None) -> bool:
    """Whether depths have had no gradient for so long, and so little was learnt, that more steps change nothing."""
    return stalled_steps >= STALLED_FOR and not has_learnt(losses, constant_loss)


def judge(trial: Trial, constant_loss: float | None = None, uniform_loss: float | None = None) -> tuple[Verdict, str]:
    """The verdict on a trial, and why.

    Args:
        trial: with its losses, events and ``stalled_steps``; its own verdict is not read.
        constant_loss: of the best constant prediction, nats; None if the labels are not known.
        uniform_loss: of a model that knows nothing, ln V; a run that starts above it has that much less to show.

    Example:
        >>> judge(Trial("as given", "", {}, 0, 30, losses=(5.0,) * 5 + (3.2,) * 25, stalled_steps=20), 3.1)
        (<Verdict.STALLS: 'stalls silently'>, 'depths without a gradient for the last 20 steps, at loss 3.2: ...')
    """
    end, first = level(trial.losses), _first(trial.losses)
    bad = next((event for event in trial.events if event.cause == "non_finite"), None)
    if bad is not None:
        return Verdict.NON_FINITE, f"step {bad.step}: {bad.message}"
    if end is None or first is None:
        return Verdict.UNDECIDED, "no loss was seen"
    if is_dead(trial.losses, trial.stalled_steps, constant_loss):
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
    if len(spikes) >= 3 and not has_learnt(trial.losses, constant_loss):
        steps = ", ".join(str(event.step) for event in spikes[:4])
        return Verdict.SPIKES, f"{len(spikes)} spikes (steps {steps}), and the loss is at {end:.4g}"
    fall = first - end
    if fall <= max(0.02 * abs(first), 2 * _noise(trial.losses)):
        return Verdict.UNDECIDED, f"the loss hardly moved in {len(trial.losses)} steps: {first:.4g} to {end:.4g}"
    if trial.stalled_steps and not has_learnt(trial.losses, constant_loss):
        last = trial.stalled_steps
        return Verdict.UNDECIDED, f"depths without a gradient for the last {last} steps only, at loss {end:.4g}"
    start = first if uniform_loss is None else min(first, uniform_loss)
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
