"""How gradients at the start go with the number on the second axis of a grid, against what is published."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import linear_regression

from lightning_norms.reports.comparison.data import Comparison, Spread


@dataclass(frozen=True)
class Exponent:
    """Power law of a block's first gradient: ``gradient ~ number ** exponent``.

    Attributes:
        label: place on the first axis.
        block: "top" or "bottom".
        fitted: least squares in logarithms, one a seed; mean and standard deviation.
        published: exponent of the top block; None where there is none.
    """

    label: str
    block: str
    fitted: Spread
    published: float | None


def exponents(comparison: Comparison) -> tuple[Exponent, ...]:
    """For every label of the first axis, where the second one is of numbers and gradients were measured."""
    if not comparison.published:
        return ()
    rows = dict.fromkeys(labels[0] for labels in comparison.labels.values())
    fits = ((row, block, _fits(comparison, row, at)) for row in rows for block, at in (("top", -1), ("bottom", 0)))
    return tuple(
        Exponent(row, block, Spread.of(slopes), comparison.published.get(row) if block == "top" else None)
        for row, block, slopes in fits
        if slopes
    )


def slope(points: list[tuple[float, float]]) -> float | None:
    """Exponent of a power law through points, by least squares in logarithms; None from fewer than two places.

    Example:
        >>> slope([(2.0, 3.0), (8.0, 1.5), (32.0, 0.75)])
        -0.5
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and 0 < y < math.inf]
    if len({x for x, _ in logs}) < 2:
        return None
    return round(linear_regression(*zip(*logs, strict=True)).slope, 12)


def _fits(comparison: Comparison, row: str, at: int) -> list[float]:
    """One exponent a seed, from the gradient of the block at this index in every variant of the row."""
    points = defaultdict(list)
    for run in comparison.runs:
        label, number = comparison.labels.get(run.variant, ("", ""))
        blocks = [norm for group, norm in (run.gradient_first or {}).items() if "block_" in group]
        if label == row and blocks and run.finished and (x := _number(number)) is not None:
            points[run.seed].append((x, blocks[at]))
    slopes = (slope(pairs) for pairs in points.values())
    return [exponent for exponent in slopes if exponent is not None]


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None
