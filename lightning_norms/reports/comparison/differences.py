"""What a gap to the baseline is worth: paired differences with an interval, and the verdict on a variant.

::

    one validation set   gap by seed  ->  mean, 95 % interval  ->  better  worse  undecided  the same
    all of a variant's                                         ->  keep  revert  mixed  undecided  the same
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, stdev

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom."""


class Result(Enum):
    """What a difference to the baseline is on one validation set."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"
    SAME = "the same"


class Verdict(Enum):
    """What to do with a variant, by all validation sets."""

    KEEP = "keep"
    REVERT = "revert"
    MIXED = "mixed"
    UNDECIDED = "undecided"
    SAME = "the same"


@dataclass(frozen=True)
class Difference:
    """Variant minus baseline on one validation set, seed by seed: below 0 the variant is better.

    Attributes:
        mean: of the paired differences.
        low: lower end of the 95 % interval of that mean; None with one seed.
        high: its upper end.
        spread: the larger standard deviation over seeds, of the variant or of the baseline; None with one seed.
        seeds: number of pairs.
    """

    variant: str
    score: str
    mean: float
    low: float | None
    high: float | None
    spread: float | None
    seeds: int
    result: Result


def difference(variant: str, score: str, values: list[float], baseline: list[float]) -> Difference:
    r"""Paired differences, their 95 % interval and what they are.

    .. math:: \bar d \pm t_{0.975,\,n-1}\, s_d / \sqrt n

    A gap is a result only if the interval leaves 0 out **and** the gap is larger than the standard deviation over seeds
    of either side. With three seeds, independent noise and no gap this calls a result in 4 of 100 grids (simulated).
    One seed is never a result.

    Args:
        variant: name.
        score: name of the validation set.
        values: of the variant, one a seed.
        baseline: of the baseline, for the same seeds in the same order.

    Example:
        >>> difference("post", "code", [2.7, 2.76, 2.65], [2.5, 2.55, 2.45]).result
        <Result.WORSE: 'worse'>
        >>> difference("post", "code", [2.52, 2.57, 2.47], [2.5, 2.55, 2.45]).result
        <Result.UNDECIDED: 'undecided'>
    """
    gaps = [value - other for value, other in zip(values, baseline, strict=True)]
    count, mean = len(gaps), fmean(gaps)
    if count == 1:
        return Difference(variant, score, mean, None, None, None, 1, Result.UNDECIDED)
    half = _student(count - 1) * stdev(gaps) / math.sqrt(count)
    spread = max(stdev(values), stdev(baseline))
    if not any(gaps):
        result = Result.SAME
    elif abs(mean) > half and abs(mean) > spread:
        result = Result.BETTER if mean < 0 else Result.WORSE
    else:
        result = Result.UNDECIDED
    return Difference(variant, score, mean, mean - half, mean + half, spread, count, result)


def verdict(results: Collection[Result], whole: bool = True) -> Verdict:
    """One word for a variant from its results on all validation sets.

    Args:
        results: at least one.
        whole: whether every run of the variant finished: one that dies with some seeds is not to be kept.

    Example:
        >>> verdict([Result.BETTER, Result.UNDECIDED]), verdict([Result.BETTER, Result.WORSE])
        (<Verdict.KEEP: 'keep'>, <Verdict.MIXED: 'mixed'>)
        >>> verdict([Result.BETTER, Result.BETTER], whole=False)
        <Verdict.UNDECIDED: 'undecided'>
    """
    better, worse = Result.BETTER in results, Result.WORSE in results
    if better and worse:
        return Verdict.MIXED
    if worse:
        return Verdict.REVERT
    if better:
        return Verdict.KEEP if whole else Verdict.UNDECIDED
    return Verdict.SAME if set(results) == {Result.SAME} else Verdict.UNDECIDED


def _student(freedom: int) -> float:
    return STUDENT[min(freedom, len(STUDENT)) - 1]  # beyond 30 seeds a little too wide, never too narrow
