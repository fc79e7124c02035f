"""What to do about a finding: skip, roll back, restart, stop. Bounded at every rung, and pure.

::

    non_finite, spike      skip the step        max_skips in a row, then as a divergence
    divergence             roll back and cut    max_rollbacks, then as a stall
    stall                  restart and cut      max_restarts; if the start is gone, roll back
                           stop                 a named error, with a report of what was tried

What was used up comes back: one rollback and one restart for every 500 healthy steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lightning_norms.checks import check_number, check_whole

REFUND_STEPS = 500
"""Healthy steps in a row that give a rollback and a restart back."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How often each action may be taken, and how far the learning rate may fall.

    The arguments are those of :class:`lightning_norms.callbacks.lr_fallback.LRFallback`.

    Raises:
        ValueError: an argument is out of range.
    """

    cut: float = 0.5
    lowest_factor: float = 0.01
    max_skips: int = 3
    max_rollbacks: int = 3
    max_restarts: int = 3

    def __post_init__(self) -> None:
        for name in ("cut", "lowest_factor"):
            check_number("LRFallback", name, getattr(self, name), above=0, below=1)
        for name in ("max_skips", "max_rollbacks", "max_restarts"):
            check_whole("LRFallback", name, getattr(self, name), 0)


@dataclass
class Ladder:
    """Counts what was done and says what comes next.

    Args:
        limits: how often each action may be taken.
        factor: what the learning rate is multiplied by.
        skips_in_a_row: steps skipped since the last one that was taken.

    Example:
        >>> ladder = Ladder(Limits(max_skips=1))
        >>> [ladder.climb("spike", ("rollback", "restart")) for _ in range(2)], ladder.factor
        (['skip', 'rollback'], 0.5)
    """

    limits: Limits
    _: KW_ONLY
    factor: float = 1.0
    skips_in_a_row: int = 0
    skips: int = 0
    rollbacks: int = 0
    restarts: int = 0
    refunded: int = 0
    healthy_steps: int = 0

    def climb(self, cause: str, ways_back: Collection[str], cut: bool = True) -> str:
        """Return the action for a finding of this cause, counted as done; a rollback or restart cuts the factor.

        Args:
            cause: "non_finite", "spike", "divergence" or "stall".
            ways_back: "rollback" if a healthy snapshot is at hand, "restart" if the start is.
            cut: whether going back cuts the learning rate.
        """
        self.healthy_steps = 0
        if cause in ("non_finite", "spike") and self.skips_in_a_row < self.limits.max_skips:
            self.skips_in_a_row += 1
            self.skips += 1
            return "skip"
        limits = self.limits
        if cut and self.factor * limits.cut < limits.lowest_factor:
            return "stop"
        may = {
            "rollback": self.rollbacks - self.refunded < limits.max_rollbacks,
            "restart": self.restarts - self.refunded < limits.max_restarts,
        }
        # A ruined start is not cured by going back to a moment at which it was ruined already.
        order = ("restart", "rollback") if cause == "stall" else ("rollback", "restart")
        action = next((action for action in order if action in ways_back and may[action]), "stop")
        if action != "stop":
            self.factor *= limits.cut if cut else 1.0
            self.rollbacks += action == "rollback"
            self.restarts += action == "restart"
            self.skips_in_a_row = 0
        return action

    def step_taken(self) -> None:
        """Count a healthy step; many in a row give back what was used up."""
        self.skips_in_a_row = 0
        self.healthy_steps += 1
        if self.healthy_steps % REFUND_STEPS == 0:
            self.refunded = min(self.refunded + 1, max(self.rollbacks, self.restarts))

    def recover(self, steps_left: int) -> None:
        """Let a factor below 1 climb, by one of the equal steps that take it back to 1 in ``steps_left`` steps."""
        if self.factor < 1.0:
            self.factor += (1.0 - self.factor) / max(1, steps_left)

    def state_dict(self) -> dict[str, Any]:
        """Return counts and factor, plain."""
        return {name: value for name, value in vars(self).items() if name != "limits"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood."""
        vars(self).update(state)
