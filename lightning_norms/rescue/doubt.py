"""A loss that rose: is it the weights, or the data? Decided by a comparison on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_norms.rescue.counterfactual import Comparison
from lightning_norms.rescue.finding import Finding

PATIENCE = 16
"""Doubtful steps in a row that may pass before the new level of the loss is accepted."""
FIRST_STEPS = 3
"""Doubtful steps in a row that pass while there is no snapshot but the start."""
TAKE, GO_BACK, NEW_LEVEL, UNKNOWN = "take", "go back", "new level", "unknown"

Compare = Callable[[], Comparison | None]


@dataclass(kw_only=True)
class Doubt:
    """Counts doubtful steps in a row, and says when to compare and what follows.

    ::

        the snapshot is clearly better    go back
        both alike                        take the step: the data changed; after 16 in a row, a new level
        cannot be compared                unknown

    Attributes:
        steps: doubtful steps in a row.
        began_with_data: whether the first comparison found the weights as good as the snapshot's.

    Example:
        >>> high = Finding("spike", "the loss is high", doubtful=True)
        >>> Doubt().weigh(high, lambda: Comparison(step=50, present=9.0, before=8.9), lowest=0.3)[0]
        'take'
    """

    steps: int = 0
    began_with_data: bool = False

    def weigh(
        self, finding: Finding, compare: Compare, lowest: float | None, is_grave: bool = True
    ) -> tuple[str, Comparison | None]:
        """Return what follows from a doubtful finding, and the comparison if there was one.

        Args:
            finding: of the present step.
            compare: two passes over the present batch; asked at the 1st, 2nd, 4th, 8th, ... step of a row.
            lowest: the best level of the loss so far.
            is_grave: whether the loss is far above the one that the run began with.
        """
        self.steps += 1
        is_power_of_two = self.steps & (self.steps - 1) == 0
        if finding.cause == "spike" and not is_power_of_two:
            return TAKE, None
        comparison = compare()
        if comparison is None:
            return UNKNOWN, None
        is_level = finding.cause == "divergence"
        if comparison.helps(lowest):
            return (GO_BACK if is_level or is_grave or self.steps > 1 else TAKE), comparison
        if comparison.step == 0:  # the start may be as bad as a ruined run
            return (UNKNOWN if is_level or self.steps > FIRST_STEPS else TAKE), comparison
        self.began_with_data |= self.steps == 1
        return (NEW_LEVEL if is_level or self.steps >= PATIENCE else TAKE), comparison

    def end(self) -> None:
        """A step without doubt."""
        self.steps, self.began_with_data = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, plain."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood."""
        vars(self).update(state)
