"""What a run must reach, judged from its end and the end of its twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        loss: by the row's yardstick.
        first: mean training loss of the first three steps.
        before: mean training loss of the ten steps before the row's fault, None where it has no such step.
        finite: all weights, buffers and moments are finite.
        error: what ended the run before its last step.
        flagged: the protection said that it cannot help, by an error or otherwise.
        lost: steps whose update is not in the final weights, by the optimizer's own counter.
        counts: what the protection did, by name.
        seconds: wall time of the fit.
    """

    loss: float
    first: float
    before: float | None
    finite: bool
    error: str | None
    flagged: bool
    lost: int
    counts: dict[str, int]
    seconds: float


class Goal(Protocol):
    """A yes or no."""

    def is_met(self, run: Ending, twin: Ending) -> bool:
        """Whether the run ended well."""
        ...


@dataclass(frozen=True)
class Near:
    """The last step is reached, everything is finite, and the loss is close to the twin's.

    ::

        loss <= twin + max(relative * |twin|, share * (twin's first loss - twin))

    Args:
        relative: of the twin's loss.
        share: of what the twin learned. Near a loss of 0 two healthy runs differ by more than ``relative``.
    """

    relative: float = 0.1
    share: float = 0.02

    def limit(self, twin: Ending) -> float:
        """The highest loss that still counts."""
        return twin.loss + max(self.relative * abs(twin.loss), self.share * (twin.first - twin.loss))

    def is_met(self, run: Ending, twin: Ending) -> bool:
        """Whether the run ended close to its twin."""
        return run.error is None and run.finite and run.loss <= self.limit(twin)


@dataclass(frozen=True)
class NotDoubled:
    """The last step is reached, everything is finite, and the loss is at most twice the twin's before the fault.

    This is how arc-training's own benchmark judges, which a run that never learned again after the fault can pass.
    """

    def is_met(self, run: Ending, twin: Ending) -> bool:
        """Whether the run is alive."""
        return run.error is None and run.finite and twin.before is not None and run.loss <= 2 * twin.before


@dataclass(frozen=True)
class Below:
    """The last step is reached, everything is finite, and the loss is below a level."""

    level: float

    def is_met(self, run: Ending, twin: Ending) -> bool:
        """Whether the run survived."""
        return run.error is None and run.finite and math.isfinite(run.loss) and run.loss < self.level


@dataclass(frozen=True)
class Flagged:
    """Everything is finite, and the protection said that it cannot help: for data that are bad for good."""

    def is_met(self, run: Ending, twin: Ending) -> bool:
        """Whether the weights were kept and a person was called."""
        return run.finite and run.flagged
