"""How far a short run has come, step by step against the best constant prediction on the labels of that very step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, pstdev

TAIL = 10
"""The end loss is the median of this many steps."""
STALLED_FOR = 10
"""Consecutive steps for which the stall rule must hold at the end."""
MARGIN = 0.01
"""A run has learnt once it is below the loss of a constant prediction by this share of it."""
NEAR = 0.1
"""A run has arrived at the constant prediction within this share of the way from uniform predictions to it."""


def level(losses: Sequence[float]) -> float | None:
    """Median of the last finite losses; None if there are none.

    Example:
        >>> level([5.0, float("nan"), 3.0, 2.0])
        3.0
    """
    end = tail(losses)
    return median(end) if end else None


def has_learnt(excess: Sequence[float], constant_loss: float | None, scale: float | None = None) -> bool:
    """Whether the end is clearly below the best constant prediction on the same labels; False if that is unknown.

    Args:
        excess: loss minus that of the constant prediction, by step.
        constant_loss: loss of the constant prediction.
        scale: by how much perfect predictions beat constant ones; None for the constant loss itself.

    Example:
        >>> has_learnt([-0.1] * 20, 3.17), has_learnt([-0.01] * 20, 3.17), has_learnt([], None)
        (True, False, False)
    """
    end = tail(excess)
    if constant_loss is None or not end:
        return False
    margin = MARGIN * (abs(constant_loss) if scale is None else scale)
    return fmean(end) < -max(margin, 3 * standard_error(end))


def is_dead(
    excess: Sequence[float], stalled_steps: int, constant_loss: float | None, scale: float | None = None
) -> bool:
    """Whether blocks have received no gradient for so long, with nothing learnt, that more steps change nothing."""
    return stalled_steps >= STALLED_FOR and not has_learnt(excess, constant_loss, scale)


def has_arrived(
    excess: Sequence[float], distance: float, constant_loss: float | None, scale: float | None = None
) -> bool:
    """Whether a run sits at the constant prediction: its last third is near it and no longer falls.

    Args:
        excess: loss minus that of the constant prediction, by step.
        distance: nats from uniform predictions to the constant prediction.
        constant_loss: loss of the constant prediction.
        scale: by how much perfect predictions beat constant ones; None for the constant loss itself.
    """
    third = [value for value in excess if math.isfinite(value)][-max(1, len(excess) // 3) :]
    if len(third) < 2 * TAIL or constant_loss is None or has_learnt(excess, constant_loss, scale):
        return False
    early, late = third[: len(third) // 2], third[len(third) // 2 :]
    error = math.hypot(standard_error(early), standard_error(late))
    falls = fmean(early) - fmean(late) > max(2 * error, 0.1 * MARGIN * (abs(constant_loss) if scale is None else scale))
    return abs(fmean(late)) < NEAR * max(distance, 0.0) and not falls


def tail(values: Sequence[float]) -> list[float]:
    """Return the last finite values, at most :data:`TAIL` of them."""
    return [value for value in values if math.isfinite(value)][-TAIL:]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values."""
    return pstdev(values) / math.sqrt(len(values))
