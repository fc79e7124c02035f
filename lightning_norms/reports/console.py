"""Plain numbers to text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.table import Column, Table


def depth_table(profile: Profile, title: str, depths: int = 8, steps: int = 6) -> Table:
    """A few depths (top block first, as in the picture) by a few steps; fits 80 columns.

    Args:
        profile: values [groups][steps].
        title: what is shown, with the unit.
        depths: number of blocks shown for each stack; everything outside the stacks is shown too.
        steps: number of optimizer steps shown, the first and the last among them.
    """
    columns = spaced(range(len(profile.steps)), steps)
    titles = (Column("depth \\ step"), *(Column(str(profile.steps[column]), "number") for column in columns))
    stacks = profile.stacks().values()
    hidden = {row for rows in stacks for row in rows} - {row for rows in stacks for row in spaced(rows, depths)}
    rows = [
        (profile.groups[row], *(number(profile.values[row][column]) for column in columns))
        for row in reversed(range(len(profile.groups)))
        if row not in hidden
    ]
    return Table(title, titles, rows)


def ratio_readings(profile: Profile, quantity: str) -> list[str]:
    """One line a stack: ratio of the bottom block to the top block at the first and at the last step.

    Example:
        >>> profile = Profile(("block_00", "block_01"), (0, 90), ((3.2, 1e-6), (1.0, 2.0)))
        >>> ratio_readings(profile, "gradient")
        ['bottom/top gradient ratio: 3.2 at step 0 -> 5e-07 at step 90']
    """
    lines = []
    for label, rows in profile.stacks().items():
        if len(rows) > 1 and profile.steps:
            bottom, top = profile.values[rows[0]], profile.values[rows[-1]]
            ends = [0, len(profile.steps) - 1][: len(profile.steps)]
            ratios = [f"{_ratio(bottom[end], top[end])} at step {profile.steps[end]}" for end in ends]
            lines.append(f"{label.rstrip('.')} bottom/top {quantity} ratio: {' -> '.join(ratios)}".lstrip())
    return lines


def spaced(items: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of ``items``, evenly spaced, with both ends.

    Example:
        >>> spaced(range(48), 4)
        [0, 16, 31, 47]
    """
    if len(items) <= count or count < 2:
        return list(items)[: max(count, 0)]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def loss_text(loss: float) -> str:
    """Three decimals, or three digits for a loss so small that decimals would hide it.

    Example:
        >>> loss_text(3.14159), loss_text(0.000123)
        ('3.142', '0.000123')
    """
    return f"{loss:.3f}" if loss == 0 or not abs(loss) < 0.1 else f"{loss:.3g}"


def number(value: float) -> str:
    """A few digits: plain between 0.01 and 1000, else in powers of ten.

    Example:
        >>> number(8.6e-7), number(3.14159), number(0.0), number(float("nan"))
        ('8.6e-07', '3.14', '0', 'nan')
    """
    if value == 0 or value != value:
        return f"{value:.0f}"
    return f"{value:.3g}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def with_deviation(mean: float, deviation: float | None, signed: bool = False) -> str:
    """A mean with its standard deviation over seeds, if there is more than one seed.

    Example:
        >>> with_deviation(2.5, 0.05), with_deviation(2.5, None, signed=True)
        ('2.500 ± 0.050', '+2.500')
    """
    shown = f"{mean:+.3f}" if signed else f"{mean:.3f}"
    return shown if deviation is None else f"{shown} ± {deviation:.3f}"


def _ratio(bottom: float, top: float) -> str:
    return f"{bottom / top:.2g}" if top else ("nan" if bottom == 0 or bottom != bottom else "inf")
