"""The failure that never spikes: some blocks receive no gradient any more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from lightning_norms.measuring.observation import Observation
from lightning_norms.rescue.finding import Finding


class StallRule:
    r"""Some blocks receive almost no gradient any more, while the loss may still look like that of any other run.

    A block's share is its gradient norm over the largest of its stack. Against its own share in the first three steps
    of its stack:

    .. math:: q_b(t) = \frac{g_b(t)}{\max_c g_c(t)} \Big/ \max_{s < 3} \frac{g_b(s)}{\max_c g_c(s)}

    A stack has stalled when at least an eighth of its blocks (one at the least) have q below 10^-1.5 in four of the
    last five steps. A block that starts at nearly nothing and grows (ReZero) has q above 1. A run whose loss fell to
    less than 30 % of its first one has learnt, and is no stall.

    No gradient at all is absence, not weakness: a stack is judged only on the steps that use it (two towers in turns),
    and of those only the blocks that take part (layer drop, frozen blocks, idle experts).

    Measured: an 18-layer post-norm toy at learning rate 3e-3 is named at steps 4 to 27 in eight of eight seeds; healthy
    runs of 6, 18, 24 and 48 blocks never went below 10^-1.1. In dead runs of 48 blocks no gradient is exactly 0.
    """

    DEAD, SUSPICIOUS = -1.5, -1.1
    """Decades below the share at the start."""
    STEPS, START = 5, 3

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.losses: list[float] = []
        self.stacks: list[dict[str, Any]] = []  # of every stack: steps that used it, shares at the start, last falls
        self.in_use: list[int] = []  # stacks that the last step used

    def judge(self, observation: Observation) -> Finding | None:
        """Take the step in, and say whether the run has stalled. Every step counts, also the stalled ones."""
        if [len(stack) for stack in observation.stacks] != [len(state["start"]) for state in self.stacks]:
            self.start_afresh()  # something was frozen or unfrozen: other blocks, other shares
            self.stacks = [{"steps": 0, "start": [0.0] * len(stack), "falls": []} for stack in observation.stacks]
        if observation.loss is not None:
            self.first_loss = observation.loss if self.first_loss is None else self.first_loss
            self.losses = [*self.losses, observation.loss][-self.STEPS :]
        self.in_use = [number for number, stack in enumerate(observation.stacks) if any(stack)]
        for number in self.in_use:
            self._take_in(self.stacks[number], _shares(observation.stacks[number]))
        return self.finding()

    def finding(self) -> Finding | None:
        """Return the stall that the steps so far amount to, or None."""
        level = min((self._level(self.stacks[number]) for number in self.in_use), default=0.0)
        if level > self.DEAD or self._has_learnt():
            return None
        message = f"some blocks receive {_fraction(level)} of the gradient share they had at the start"
        evidence = {"decades": level, "loss": self.losses[-1] if self.losses else math.nan}
        return Finding("stall", message, evidence | ({"first_loss": self.first_loss} if self.first_loss else {}))

    def level(self) -> float:
        """Return the decades by which weak blocks fell in four of a stack's last five steps; 0 while it has fewer."""
        return min(map(self._level, self.stacks), default=0.0)

    def is_suspicious(self) -> bool:
        """Whether a snapshot taken now might be of a dying run."""
        return self.level() < self.SUSPICIOUS and not self._has_learnt()

    def start_afresh(self) -> None:
        """Take the next three steps as the start."""
        self.__init__()  # type: ignore[misc]

    def _take_in(self, state: dict[str, Any], shares: Sequence[float]) -> None:
        if state["steps"] < self.START:
            state["start"] = [*map(max, state["start"], shares)]
        state["steps"] += 1
        state["falls"] = [*state["falls"], _fall(shares, state["start"])][-self.STEPS :]

    def _level(self, state: dict[str, Any]) -> float:
        if len(state["falls"]) < self.STEPS:
            return 0.0
        _, weakest_of_four = sorted(state["falls"], reverse=True)[:2]
        return float(weakest_of_four)

    def _has_learnt(self) -> bool:
        return bool(
            self.losses and self.first_loss and self.first_loss > 0 and median(self.losses) < 0.3 * self.first_loss
        )


def _shares(norms: Sequence[float]) -> list[float]:
    """Each block's gradient norm over the largest of its stack."""
    return [norm / max(norms) for norm in norms]


def _fall(shares: Sequence[float], start: Sequence[float]) -> float:
    """Decades, at most 0, by which the weakest eighth of a stack has fallen below its shares at the start."""
    against_start = sorted(now / first for now, first in zip(shares, start, strict=True) if now > 0 and first > 1e-6)
    if len(against_start) < 2:
        return 0.0  # one block alone is always the largest of its stack
    weakest_eighth = against_start[: math.ceil(len(against_start) / 8)]
    return min(0.0, math.log10(max(weakest_eighth)))


def _fraction(level: float) -> str:
    """A share in words: 1/30; below a millionth nobody needs the digits."""
    return "less than a millionth" if level < -6 else f"1/{10**-level:.0f}"
