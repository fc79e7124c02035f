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

from lightning_norms.reports.statistics import t_quantile


class Result(Enum):
    """What a difference to the baseline means on one validation set."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"
    SAME = "the same"


class Verdict(Enum):
    """What to do with a variant, given all validation sets."""

    KEEP = "keep"
    REVERT = "revert"
    MIXED = "mixed"
    UNDECIDED = "undecided"
    SAME = "the same"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Variant minus baseline on one validation set, seed by seed: below 0 the variant is better.

    Attributes:
        variant: name of the variant.
        score: name of the validation set.
        mean: mean of the paired differences.
        low: lower end of the 95 % interval of that mean; None with one seed.
        high: upper end of that interval.
        spread: the larger standard deviation over seeds, of the variant or of the baseline; None with one seed.
        seeds: number of pairs.
        result: what the difference is.
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
    r"""The paired difference with its 95 % interval, and what it means.

    .. math:: \bar d \pm t_{0.975,\,n-1}\, s_d / \sqrt n

    A gap is a result only if the interval leaves 0 out **and** the gap is larger than the standard deviation over seeds
    of either side. With three seeds, independent noise and no gap this calls a result in 4 of 100 grids (simulated).
    One seed is never a result.

    Args:
        variant: name of the variant.
        score: name of the validation set.
        values: scores of the variant, one a seed.
        baseline: scores of the baseline, for the same seeds in the same order.

    Example:
        >>> difference("post", "code", [2.7, 2.76, 2.65], [2.5, 2.55, 2.45]).result
        <Result.WORSE: 'worse'>
        >>> difference("post", "code", [2.52, 2.57, 2.47], [2.5, 2.55, 2.45]).result
        <Result.UNDECIDED: 'undecided'>
    """
    gaps = [value - other for value, other in zip(values, baseline, strict=True)]
    count, mean = len(gaps), fmean(gaps)
    if count == 1:
        return Difference(
            variant=variant, score=score, mean=mean, low=None, high=None, spread=None, seeds=1, result=Result.UNDECIDED
        )
    half = t_quantile(count - 1) * stdev(gaps) / math.sqrt(count)
    spread = max(stdev(values), stdev(baseline))
    if not any(gaps):
        result = Result.SAME
    elif abs(mean) > half and abs(mean) > spread:
        result = Result.BETTER if mean < 0 else Result.WORSE
    else:
        result = Result.UNDECIDED
    return Difference(
        variant=variant,
        score=score,
        mean=mean,
        low=mean - half,
        high=mean + half,
        spread=spread,
        seeds=count,
        result=result,
    )


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
