"""What to do about a finding: skip, roll back, restart, stop. Bounded at every rung, and pure.

::

    non_finite, spike      skip the step        max_skips in a row, then as a divergence
    divergence             roll back and cut    max_rollbacks, then as a stall
    stall                  restart and cut      max_restarts; if the start is gone, roll back
                           stop                 a named error, with a report of what was tried
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How far each rung goes.

    Args:
        cut: the learning rate is multiplied by it at each rollback and restart; 0 < cut < 1.
        lowest_factor: no cut goes below this share of the planned learning rate.
        max_skips: steps skipped in a row before it counts as a divergence.
        max_rollbacks: rollbacks in a run.
        max_restarts: restarts in a run.

    Raises:
        ValueError: one sentence on what is wrong.
    """

    cut: float = 0.5
    lowest_factor: float = 0.01
    max_skips: int = 3
    max_rollbacks: int = 3
    max_restarts: int = 3

    def __post_init__(self) -> None:
        for name in ("cut", "lowest_factor"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < 1):
                raise ValueError(f"{name} is {value!r}, but it is a share of the learning rate: 0 < {name} < 1.")
        for name in ("max_skips", "max_rollbacks", "max_restarts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}, but it must be a whole number >= 0.")


class Ladder:
    """Counts what was done and says what comes next.

    Args:
        limits: of each rung.

    Attributes:
        factor: what the learning rate is multiplied by.
        skips_in_a_row: steps skipped since the last one that was taken.

    Example:
        >>> ladder = Ladder(Limits(max_skips=1))
        >>> [ladder.climb("spike", can_roll_back=True, can_restart=True) for _ in range(2)], ladder.factor
        (['skip', 'rollback'], 0.5)
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.factor = 1.0
        self.skips_in_a_row = 0
        self.skips = 0
        self.rollbacks = 0
        self.restarts = 0

    def climb(self, cause: str, can_roll_back: bool, can_restart: bool) -> str:
        """The action for a finding of this cause, counted as done; the factor is cut if it lowers the learning rate.

        Args:
            cause: "non_finite", "spike", "divergence" or "stall".
            can_roll_back: a healthy snapshot is at hand.
            can_restart: the snapshot of step 0 is at hand.
        """
        if cause in ("non_finite", "spike") and self.skips_in_a_row < self.limits.max_skips:
            self.skips_in_a_row += 1
            self.skips += 1
            return "skip"
        rollback = ("rollback", can_roll_back and self.rollbacks < self.limits.max_rollbacks)
        restart = ("restart", can_restart and self.restarts < self.limits.max_restarts)
        # A ruined start is not cured by going back to a moment at which it was ruined already.
        order = (restart, rollback) if cause == "stall" else (rollback, restart)
        if self.factor * self.limits.cut < self.limits.lowest_factor:
            return "stop"
        action = next((name for name, possible in order if possible), "stop")
        if action != "stop":
            self.factor *= self.limits.cut
            self.rollbacks += action == "rollback"
            self.restarts += action == "restart"
            self.skips_in_a_row = 0
        return action

    def step_taken(self) -> None:
        """A healthy step went through."""
        self.skips_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Counts and factor, plain."""
        return {name: value for name, value in vars(self).items() if name != "limits"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood."""
        vars(self).update(state)
