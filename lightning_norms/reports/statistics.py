"""How a quantity grows with depth: the slope of its logarithm, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lightning_norms.reports.diagnosis.data import DepthProfile, Growth

FEWEST = 4
"""Blocks that a slope needs."""


def growths(profile: DepthProfile) -> Iterator[Growth]:
    """The growth of every stack that is deep enough and has only positive, finite values."""
    for label, values in profile.of_blocks().items():
        if len(values) >= FEWEST and all(0 < value < math.inf for value in values):
            factor, low, high = per_block(values)
            name = label.rstrip(".")
            yield Growth(name=profile.name, stack=name, blocks=len(values), factor=factor, low=low, high=high)


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
    logs = [math.log(value) for value in values]
    count = len(logs)
    middle, mean = (count - 1) / 2, sum(logs) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(logs)) / spread
    rest = sum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(logs))
    error = t_quantile(count - 2) * math.sqrt(rest / (count - 2) / spread)
    return math.exp(slope), math.exp(slope - error), math.exp(slope + error)


def t_quantile(freedom: int) -> float:
    """97.5 % point of Student's t: exact for 1 and 2 degrees of freedom, else an expansion good to three digits.

    Example:
        >>> [round(t_quantile(n), 2) for n in (1, 2, 3, 10, 46)]
        [12.71, 4.3, 3.18, 2.23, 2.01]
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
