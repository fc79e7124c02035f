"""What goes wrong in a run, recognised from plain numbers before the step that would do the damage.

Four causes, each with a rule of its own and its evidence::

    non_finite   a loss or a gradient that is NaN or infinite
    spike        one gradient norm ten times the largest of 256 steps, or one loss far above all recent ones
    divergence   the median loss gives back half of the progress it had made
    stall        no spike and no NaN: some blocks receive no gradient any more (see :mod:`.stall`)

Two more are harmless: ``absent``, a step without loss and gradient, and ``overflow``, a non-finite step that a
GradScaler skips by itself. Rules hold little state, all plain data. What they flag never enters their baseline,
unless it is accepted after all. A high loss is doubtful: other data would look the same (:mod:`.counterfactual`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from statistics import median
from typing import Any

from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.spike_score import SpikeScore
from lightning_norms.rescue.finding import Finding
from lightning_norms.rescue.stall import StallRule

WINDOW = 16
"""Accepted losses that a baseline is made of. Before it is full, the rule for early steps holds."""
NORMS, FIRST_NORMS = 256, 3
"""Accepted gradient norms that a limit is made of, and how many it needs: long, so that rare large ones are known."""
SCALER_PATIENCE = 20
"""Non-finite steps in a row that a GradScaler may need to find its scale."""


def find_non_finite(observation: Observation) -> Finding | None:
    """Report NaN and infinity, which every comparison with a limit would let through."""
    loss, grad_norm = observation.loss, observation.grad_norm
    if not observation.non_finite and math.isfinite(grad_norm) and (loss is None or math.isfinite(loss)):
        return None
    text = "unknown" if loss is None else f"{loss:.4g}"
    evidence = {"loss": math.nan if loss is None else loss, "grad_norm": grad_norm}
    return Finding("non_finite", f"loss {text}, gradient norm {grad_norm:.4g}", evidence)


class SpikeRule:
    r"""One value far above all recent ones.

    With the last 16 accepted losses, a loss is a spike if it is above

    .. math:: \max + \max(1.5 \cdot \text{range},\ 6 \sigma,\ 0.1 \, |\text{median}|,\ 0.1 \cdot \text{progress})

    where sigma is 1.4826 x the median absolute deviation, and progress = first loss - lowest median.
    The rule is shift-invariant but for one term, so it holds for losses that are negative or near zero. Before there
    are 16, a loss must be above the largest so far by its size and by three times the range so far, *and* the gradient
    norm 1.5 times the last one (1.6 times in the first three steps, which have no range to go by).

    A gradient norm is a spike above 10 x the largest of the last 256: of 138,000 steps of healthy runs, heavy tails and
    batches of one sample among them, none (``benchmarks/zoo``).
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.first: float | None = None
        self.lowest: float | None = None

    def judge(self, observation: Observation) -> Finding | None:
        """Return a finding, or None; changes nothing."""
        return self._judge_gradient(observation.grad_norm) or self._judge_loss(observation.loss, observation.grad_norm)

    def _loss_limit(self) -> float:
        largest, spread = max(self.losses), max(self.losses) - min(self.losses)
        if self._is_early():
            return largest + max(abs(largest), 3 * spread)
        middle = median(self.losses)
        sigma = 1.4826 * median(abs(loss - middle) for loss in self.losses)
        progress = 0.0 if self.first is None or self.lowest is None else max(0.0, self.first - self.lowest)
        return largest + max(1.5 * spread, 6 * sigma, 0.1 * abs(middle), 0.1 * progress)

    def accept(self, observation: Observation) -> None:
        """Let a healthy step into the baseline."""
        loss = observation.loss
        self.norms = [*self.norms, observation.grad_norm][-NORMS:]
        if loss is not None:
            self.losses = [*self.losses, loss][-WINDOW:]
            self.first = loss if self.first is None else self.first
            if not self._is_early():
                level = median(self.losses)
                self.lowest = level if self.lowest is None else min(self.lowest, level)

    def start_afresh(self) -> None:
        """Forget the baseline, after a rollback or where a new level is accepted. The progress stays."""
        self.losses, self.norms = [], []

    def _is_early(self) -> bool:
        return len(self.losses) < WINDOW

    def _judge_loss(self, loss: float | None, grad_norm: float) -> Finding | None:
        if loss is None or not self.losses or not loss > (limit := self._loss_limit()):
            return None
        if self._is_early() and not grad_norm > (1.5 if len(self.losses) >= 3 else 1.6) * self.norms[-1]:
            return None
        message = f"the loss, {loss:.4g}, is above {limit:.4g}, the limit from the last {len(self.losses)} steps"
        evidence = {"loss": loss, "limit": limit, "grad_norm": grad_norm}
        return Finding("spike", message, evidence, doubtful=True)

    def _judge_gradient(self, grad_norm: float) -> Finding | None:
        limit = 10 * max(self.norms, default=0.0)
        if len(self.norms) < FIRST_NORMS or not grad_norm > limit > 0:
            return None
        count = len(self.norms)
        message = f"the gradient norm, {grad_norm:.4g}, is above {limit:.4g}, ten times the largest of {count} steps"
        return Finding("spike", message, {"grad_norm": grad_norm, "limit": limit})


class DivergenceRule:
    """The level of the loss, the median of 16 accepted steps, goes back up and stays.

    Flagged if the level is above the lowest one by more than half of the progress (first loss - lowest level), by more
    than 20 % of the lowest, and by more than twice the range that 16 losses had at the lowest.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first: float | None = None
        self.lowest: float | None = None
        self.noise = 0.0

    def judge(self, observation: Observation) -> Finding | None:
        """Return a finding, or None; changes nothing."""
        losses = self._with(observation.loss)
        if self.first is None or self.lowest is None or len(losses) < WINDOW:
            return None
        level = median(losses)
        rise, progress = level - self.lowest, self.first - self.lowest
        if rise <= max(0.5 * progress, 0.2 * abs(self.lowest), 2 * self.noise):
            return None
        message = f"the median loss is {level:.4g}, up from {self.lowest:.4g} at its lowest"
        evidence = {"level": level, "lowest_level": self.lowest, "first_loss": self.first}
        return Finding("divergence", message, evidence, doubtful=True)

    def accept(self, observation: Observation) -> None:
        """Let a healthy step into the baseline."""
        self.losses = self._with(observation.loss)
        self.first = observation.loss if self.first is None else self.first
        if len(self.losses) == WINDOW:
            level = median(self.losses)
            if self.lowest is None or level < self.lowest:
                self.lowest, self.noise = level, max(self.losses) - min(self.losses)

    def start_afresh(self) -> None:
        """Judge the level from here on."""
        self.__init__()  # type: ignore[misc]

    def _with(self, loss: float | None) -> list[float]:
        return (self.losses if loss is None else [*self.losses, loss])[-WINDOW:]


class Watch:
    """Asks every rule about a step, the surest cause first.

    Call :meth:`find` once for every step, and :meth:`accept` for those in which nothing was found.

    Attributes:
        spike, divergence, stall: the rules.
        scores: share of steps beyond 6 standard deviations, of "loss" and of "grad_norm".
        overflows: non-finite steps in a row under a GradScaler.

    Example:
        >>> watch = Watch()
        >>> watch.find(Observation(loss=float("inf"), grad_norm=1.0)).cause
        'non_finite'
        >>> watch.find(Observation(loss=float("inf"), grad_norm=1.0), has_scaler=True).cause
        'overflow'
    """

    def __init__(self) -> None:
        self.spike, self.divergence, self.stall = SpikeRule(), DivergenceRule(), StallRule()
        self.scores = {"loss": SpikeScore(), "grad_norm": SpikeScore()}
        self.overflows = 0

    def find(self, observation: Observation, has_scaler: bool = False) -> Finding | None:
        """Return what is wrong with this step, or None; ``has_scaler`` says that a GradScaler may skip it by itself."""
        if observation.parameters_changed:
            self.stall.start_afresh()  # other gradients, other shares
        non_finite = find_non_finite(observation)
        self.overflows = self.overflows + 1 if non_finite and has_scaler else 0
        if non_finite and 0 < self.overflows <= SCALER_PATIENCE:
            return replace(non_finite, cause="overflow")
        if observation.loss is None and not observation.grad_norm:
            return Finding("absent", "the step has no loss and no gradient")
        for name, value in (("loss", observation.loss), ("grad_norm", observation.grad_norm)):
            if value is not None:
                self.scores[name].update(value)
        if non_finite:
            return non_finite
        stall = self.stall.judge(observation)  # takes every step in, also one that another rule names
        return self.spike.judge(observation) or self.divergence.judge(observation) or stall

    def accept(self, observation: Observation) -> None:
        """Let a healthy step into the baselines."""
        self.spike.accept(observation)
        self.divergence.accept(observation)

    @property
    def lowest(self) -> float | None:
        """The best level of the loss so far; None while there is none."""
        levels = [level for level in (self.spike.lowest, self.divergence.lowest) if level is not None]
        return min(levels, default=None)

    def is_grave(self, finding: Finding) -> bool:
        """Whether a rise of the loss loses more than half of the progress again, above where the run began."""
        first, lowest = self.spike.first, self.lowest
        value = finding.evidence.get("loss", finding.evidence.get("level"))
        if first is None or value is None:
            return True
        progress = 0.0 if lowest is None else max(0.0, first - lowest)
        return value > first + 0.5 * progress

    def new_level(self) -> None:
        """Take the losses from here on as the baseline."""
        self.spike.start_afresh()
        self.divergence.start_afresh()

    def start_afresh(self) -> None:
        """Forget the course that the run has left."""
        self.new_level()
        self.stall.start_afresh()
        self.overflows = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all rules, plain: a copy."""
        parts = {name: copy.deepcopy(vars(part)) for name, part in self._parts().items()}
        return {**parts, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stood; the caller's data is copied."""
        for name, part in self._parts().items():
            vars(part).update(copy.deepcopy(state[name]))
        self.overflows = state["overflows"]

    def _parts(self) -> dict[str, object]:
        scores = {f"{name}_score": score for name, score in self.scores.items()}
        return {"spike": self.spike, "divergence": self.divergence, "stall": self.stall, **scores}
