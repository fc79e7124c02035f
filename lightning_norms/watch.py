"""All rules over one run: what is wrong with a step, what a healthy one adds, and their state."""

from __future__ import annotations

from typing import Any

from lightning_norms.rescue.rules import (
    DivergenceRule,
    Finding,
    Observation,
    SpikeRule,
    SpikeScore,
    StallRule,
    find_non_finite,
    load_state,
    state_of,
)


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
