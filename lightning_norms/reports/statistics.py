"""How a quantity grows with depth: the slope of its logarithm, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import linear_regression

from lightning_norms.reports.diagnosis.data import DepthProfile, Growth

FEWEST = 4
"""Blocks that a slope needs."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % points of Student's t for 1 to 30 degrees of freedom."""
NORMAL = 1.960
"""97.5 % point of the normal distribution, to which they fall."""


def growths(profile: DepthProfile) -> Iterator[Growth]:
    """The growth of every stack that is deep enough and has only positive, finite values."""
    for label, values in profile.of_blocks().items():
        if len(values) >= FEWEST and all(0 < value < math.inf for value in values):
            factor, low, high = per_block(values)
            yield Growth(
                name=profile.name, stack=label.rstrip("."), blocks=len(values), factor=factor, low=low, high=high
            )


def per_block(values: Sequence[float]) -> tuple[float, float, float]:
    r"""Factor from one block to the next by least squares on logarithms, and its 95 % interval.

    .. math:: \ln v_l = a + b\,l + \varepsilon_l, \quad \text{factor} = e^{b}, \quad b \pm t_{0.975, n-2}\, s_b

    Neighbouring blocks are taken as independent, so the interval is a narrow one.

    Args:
        values: one a block, lowest first, all above 0; at least three.

    Example:
        >>> [round(value, 6) for value in per_block([1.0, 2.0, 4.0, 8.0])]
        [2.0, 2.0, 2.0]
    """
    blocks, logs = range(len(values)), [math.log(value) for value in values]
    slope, start = linear_regression(blocks, logs)
    freedom, middle = len(values) - 2, (len(values) - 1) / 2
    missed = sum((value - start - slope * block) ** 2 for block, value in zip(blocks, logs, strict=True))
    error = math.sqrt(missed / freedom / sum((block - middle) ** 2 for block in blocks))
    half = t_quantile(freedom) * error
    return math.exp(slope), math.exp(slope - half), math.exp(slope + half)


def t_quantile(freedom: int) -> float:
    """97.5 % point of Student's t: from a table up to 30 degrees of freedom, and interpolated to the normal beyond.

    Example:
        >>> [round(t_quantile(n), 2) for n in (1, 2, 3, 10, 46)]
        [12.71, 4.3, 3.18, 2.23, 2.01]
    """
    most = len(STUDENT)
    return STUDENT[freedom - 1] if freedom <= most else NORMAL + (STUDENT[-1] - NORMAL) * most / freedom
