"""How much of the gradient each block of a trial received."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_norms.measuring.depth_history import Profile

VANISHED = 1e-5
"""A block whose gradient has less than this share of its stack's largest receives none to speak of."""
FIRST = slice(0, 1)
"""The first recorded step."""


def end_of(gradients: Profile) -> slice:
    """The recorded steps that count as the end: at most three, as a batch may leave a part out."""
    return slice(-max(1, min(3, len(gradients.steps) // 4)), None)


def weakest(gradients: Profile, columns: slice) -> tuple[float, str] | None:
    """The smallest gradient of a block over the largest of its stack within some recorded steps, and its name.

    Stacks that received nothing in these steps do not count; None if there is no other.

    Example:
        >>> weakest(Profile(("block_00", "block_01"), (0, 5), ((1e-6, 0.0), (1.0, 2.0))), FIRST)
        (1e-06, 'block_00')
    """
    return min(_shares(gradients, columns), default=None)


def received_nothing(gradients: Profile) -> bool:
    """Whether there are blocks, and none had a gradient in any recorded step."""
    return bool(gradients.groups) and not any(any(row) for row in gradients.values)


def all_stacks_at_work(gradients: Profile) -> bool:
    """Whether every stack had a gradient in the last recorded steps."""
    values, end = gradients.values, end_of(gradients)
    return all(any(any(values[row][end]) for row in rows) for rows in gradients.stacks().values())


def _shares(gradients: Profile, columns: slice) -> Iterator[tuple[float, str]]:
    for rows in gradients.stacks().values():
        norms = {row: max(gradients.values[row][columns], default=0.0) for row in rows}
        largest = max(norms.values(), default=0.0)
        if largest > 0:
            yield from ((norm / largest, gradients.groups[row]) for row, norm in norms.items())
