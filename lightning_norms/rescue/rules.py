"""What goes wrong in a run, recognised from plain numbers before the step that would do the damage.

Four causes, each with a rule of its own and its evidence::

    non_finite   a loss or a gradient that is NaN or infinite
    spike        one loss far above all recent ones, or one gradient norm ten times their largest
    divergence   the level of the loss goes back up over half of the way that it had come down
    stall        no spike and no NaN: some depths get no gradient any more (see :class:`StallRule`)

Rules hold little state, all of it plain data. What a rule has flagged never enters its baseline.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.spike_score import SpikeScore

WINDOW = 16
"""Accepted steps that a baseline is made of. Before it is full, the rule for early steps holds."""


@dataclass(frozen=True)
class Finding:
    """What was recognised: a cause, its evidence in numbers, and one plain sentence."""

    cause: str
    message: str
    evidence: dict[str, float] = field(default_factory=dict)


def find_non_finite(seen: Observation) -> Finding | None:
    """NaN and infinity are a class of their own: compared with any limit they say no.

    Example:
        >>> find_non_finite(Observation(loss=float("nan"), grad_norm=1.0, non_finite=1)).cause
        'non_finite'
    """
    if not seen.non_finite and math.isfinite(seen.grad_norm) and (seen.loss is None or math.isfinite(seen.loss)):
        return None
    evidence = {"loss": math.nan if seen.loss is None else seen.loss, "grad_norm": seen.grad_norm}
    return Finding("non_finite", f"loss {_text(seen.loss)}, gradient norm {seen.grad_norm:.4g}", evidence)


class SpikeRule:
    r"""One value far above all recent ones.

    With the last 16 accepted losses, a loss is a spike if it is above

    .. math:: \max + \max(1.5 \cdot \text{range},\ 6 \sigma,\ 0.1 \, |\text{median}|,\ 0.1 \cdot \text{way come})

    where sigma is 1.4826 x the median absolute deviation, and the way come is the first loss less the lowest level.
    The rule is shift-invariant but for one term, so it holds for losses that are negative or near zero. A gradient norm
    is a spike above 10 x the largest of the 16. Before there are 16, a loss must be above the largest so far by its
    size and by three times the range so far, *and* the gradient norm 1.5 times the last one (1.6 times, in the first
    three steps, which have no range to go by).
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.first: float | None = None
        self.lowest: float | None = None

    def judge(self, seen: Observation) -> Finding | None:
        """A finding, or None; changes nothing."""
        loss = seen.loss
        if loss is not None and self.losses and loss > self.loss_limit():
            early = len(self.losses) < WINDOW
            if not early or seen.grad_norm > (1.5 if len(self.losses) >= 3 else 1.6) * self.norms[-1]:
                limit = self.loss_limit()
                message = f"loss {loss:.4g}, above {limit:.4g}, the most that the last {len(self.losses)} steps allow"
                return Finding("spike", message, {"loss": loss, "limit": limit, "grad_norm": seen.grad_norm})
        limit = 10 * max(self.norms, default=0.0)
        if len(self.norms) >= WINDOW and seen.grad_norm > limit > 0:
            message = f"gradient norm {seen.grad_norm:.4g}, above {limit:.4g}, ten times the most of {WINDOW} steps"
            return Finding("spike", message, {"grad_norm": seen.grad_norm, "limit": limit})
        return None

    def loss_limit(self) -> float:
        """The highest loss that is no spike."""
        top = max(self.losses)
        if len(self.losses) < WINDOW:
            return top + max(abs(top), 3 * (top - min(self.losses)))
        middle = median(self.losses)
        sigma = 1.4826 * median(abs(loss - middle) for loss in self.losses)
        come = 0.0 if self.first is None or self.lowest is None else max(0.0, self.first - self.lowest)
        return top + max(1.5 * (top - min(self.losses)), 6 * sigma, 0.1 * abs(middle), 0.1 * come)

    def accept(self, seen: Observation) -> None:
        """Let a healthy step into the baseline."""
        self.norms = [*self.norms, seen.grad_norm][-WINDOW:]
        if seen.loss is not None:
            self.losses = [*self.losses, seen.loss][-WINDOW:]
            self.first = seen.loss if self.first is None else self.first
            if len(self.losses) == WINDOW:
                level = median(self.losses)
                self.lowest = level if self.lowest is None else min(self.lowest, level)

    def start_afresh(self) -> None:
        """Forget the baseline, after a rollback or where a new level is accepted. The way come stays."""
        self.losses, self.norms = [], []


class DivergenceRule:
    """The level of the loss, the median of 16 accepted steps, goes back up and stays.

    Flagged if the level is above the lowest one by more than half of the way from the first loss to the lowest level,
    by more than 20 % of the lowest, and by more than twice the range that 16 losses had at the lowest.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first: float | None = None
        self.lowest: float | None = None
        self.noise = 0.0

    def judge(self, seen: Observation) -> Finding | None:
        """A finding, or None; changes nothing."""
        losses = self._with(seen.loss)
        if self.first is None or self.lowest is None or len(losses) < WINDOW:
            return None
        level = median(losses)
        rise = level - self.lowest
        if rise <= max(0.5 * (self.first - self.lowest), 0.2 * abs(self.lowest), 2 * self.noise):
            return None
        message = f"the level of the loss is {level:.4g}, up from {self.lowest:.4g}, its lowest"
        return Finding("divergence", message, {"level": level, "lowest_level": self.lowest, "first_loss": self.first})

    def accept(self, seen: Observation) -> None:
        """Let a healthy step into the baseline."""
        self.losses = self._with(seen.loss)
        self.first = seen.loss if self.first is None else self.first
        if len(self.losses) == WINDOW:
            level = median(self.losses)
            if self.lowest is None or level < self.lowest:
                self.lowest, self.noise = level, max(self.losses) - min(self.losses)

    def start_afresh(self) -> None:
        """Judge the level from here on."""
        self.__init__()  # type: ignore[misc]

    def _with(self, loss: float | None) -> list[float]:
        return (self.losses if loss is None else [*self.losses, loss])[-WINDOW:]


class StallRule:
    r"""Some depths get no gradient any more, while the loss may still look like everybody's.

    A block's share is its gradient norm over the largest of its stack. Against its own share in the first three steps:

    .. math:: q_b(t) = \frac{g_b(t)}{\max_c g_c(t)} \Big/ \max_{s < 3} \frac{g_b(s)}{\max_c g_c(s)}

    A stall is when at least an eighth of the blocks (one at the least) has q below 10^-1.5 in four of the last five
    steps, so that blocks which are dropped at random do not count.
    Blocks without a gradient at the start (frozen, unused) do not count; a block that starts at nearly nothing and
    grows (ReZero) has q above 1. A run whose loss fell to less than 30 % of its first one has learnt, and is no stall.

    Measured: an 18-layer post-norm toy at learning rate 3e-3 is named at steps 4 to 27 in eight of eight seeds; healthy
    runs of 6, 18, 24 and 48 blocks never went below 10^-1.1.
    """

    DEAD, SUSPICIOUS = -1.5, -1.1
    """Decades below the share at the start."""
    STEPS = 5

    def __init__(self) -> None:
        self.steps = 0
        self.first_loss: float | None = None
        self.start: list[list[float]] = []
        self.depths: list[float] = []
        self.losses: list[float] = []

    def judge(self, seen: Observation) -> Finding | None:
        """Take the step in, and say whether the run has stalled. Every step counts, also the stalled ones."""
        shares = [[norm / (max(stack) or 1.0) for norm in stack] for stack in seen.stacks]
        if [len(stack) for stack in shares] != [len(stack) for stack in self.start]:
            self.start_afresh()  # something was frozen or unfrozen: other blocks, other shares
            self.start = shares
        if self.steps < 3:
            self.start = [
                [max(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(self.start, shares, strict=True)
            ]
        self.steps += 1
        if seen.loss is not None:
            self.first_loss = seen.loss if self.first_loss is None else self.first_loss
            self.losses = [*self.losses, seen.loss][-self.STEPS :]
        self.depths = [*self.depths, self._depth(shares)][-self.STEPS :]
        return self.finding()

    def finding(self) -> Finding | None:
        """Return the stall that the steps so far amount to, or None."""
        if self.level() > self.DEAD or self._has_learnt():
            return None
        message = f"some depths get 1/{10 ** -self.level():.0f} of the share of the gradient that they started with"
        evidence = {"decades": self.level(), "loss": self.losses[-1] if self.losses else math.nan}
        return Finding("stall", message, evidence | ({"first_loss": self.first_loss} if self.first_loss else {}))

    def level(self) -> float:
        """Decades by which the weak blocks have fallen, in four of five steps at least; 0 while there are fewer."""
        return sorted(self.depths)[-2] if len(self.depths) == self.STEPS else 0.0

    def is_suspicious(self) -> bool:
        """Whether a snapshot taken now might be of a dying run."""
        return self.level() < self.SUSPICIOUS and not self._has_learnt()

    def start_afresh(self) -> None:
        """Take the next three steps as the start."""
        self.__init__()  # type: ignore[misc]

    def _has_learnt(self) -> bool:
        return bool(
            self.losses and self.first_loss and self.first_loss > 0 and median(self.losses) < 0.3 * self.first_loss
        )

    def _depth(self, shares: Sequence[Sequence[float]]) -> float:
        worst = 0.0
        for now, start in zip(shares, self.start, strict=True):
            falls = sorted(share / first for share, first in zip(now, start, strict=True) if first > 1e-6)
            if len(falls) > 1:
                worst = min(worst, math.log10(max(falls[math.ceil(len(falls) / 8) - 1], 1e-30)))
        return worst


def state_of(rule: object) -> dict[str, Any]:
    """A rule's state as plain data, for a checkpoint."""
    return copy.deepcopy(vars(rule))


def load_state(rule: object, state: dict[str, Any]) -> None:
    """Put a state back; the caller's data is copied."""
    vars(rule).update(copy.deepcopy(state))


def _text(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.4g}"


class Watch:
    """Asks every rule about a step, the surest cause first.

    Attributes:
        spike: one value far above all recent ones.
        divergence: a level that goes back up.
        stall: depths that get no gradient any more.
        scores: share of steps beyond 6 standard deviations, of "loss" and of "grad_norm".

    Example:
        >>> watch = Watch()
        >>> watch.find(Observation(loss=float("inf"), grad_norm=1.0)).cause
        'non_finite'
    """

    def __init__(self) -> None:
        self.spike, self.divergence, self.stall = SpikeRule(), DivergenceRule(), StallRule()
        self.scores = {"loss": SpikeScore(), "grad_norm": SpikeScore()}

    def find(self, seen: Observation) -> Finding | None:
        """What is wrong with this step, if anything is."""
        for name, value in (("loss", seen.loss), ("grad_norm", seen.grad_norm)):
            if value is not None:
                self.scores[name].update(value)
        found = find_non_finite(seen)
        if found is not None:
            return found
        stall = self.stall.judge(seen)  # takes every step in, also one that another rule names
        return self.spike.judge(seen) or self.divergence.judge(seen) or stall

    def accept(self, seen: Observation) -> None:
        """Let a healthy step into the baselines."""
        self.spike.accept(seen)
        self.divergence.accept(seen)

    def new_level(self) -> None:
        """Take the losses from here on as the baseline."""
        self.spike.start_afresh()
        self.divergence.start_afresh()

    def start_afresh(self) -> None:
        """Forget the course that the run has left."""
        self.new_level()
        self.stall.start_afresh()

    def state_dict(self) -> dict[str, Any]:
        """State of all rules, plain."""
        return {
            "rules": {name: state_of(getattr(self, name)) for name in ("spike", "divergence", "stall")},
            "scores": {name: state_of(score) for name, score in self.scores.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood."""
        for name, rule in state["rules"].items():
            load_state(getattr(self, name), rule)
        for name, score in state["scores"].items():
            load_state(self.scores[name], score)
