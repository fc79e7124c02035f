"""What to do about every optimizer step: observe -> decide, on plain numbers and without a Trainer.

::

    observation -> observe: which cause? -> decide: which action? -> (elsewhere) act
                   none                     accept
                   absent, overflow         leave
                   high loss                compare: go back, take the step, or go on at a new level
                   any other                report in a dry run, else what the ladder says: skip, rollback, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_norms.checks import check_whole
from lightning_norms.measuring.observation import Observation
from lightning_norms.metrics import FALLBACK, SPIKE_SCORE
from lightning_norms.rescue.counterfactual import Comparison
from lightning_norms.rescue.doubt import GO_BACK, NEW_LEVEL, UNKNOWN, Compare, Doubt
from lightning_norms.rescue.events import Event
from lightning_norms.rescue.finding import Finding
from lightning_norms.rescue.ladder import Ladder, Limits
from lightning_norms.rescue.rules import Watch

STATE_OUT_OF_SIGHT = (
    "weights and buffers have just been put back and are finite, so the likely cause is the batch, or state that is"
    " neither weight nor buffer, such as a memory in an attribute of the module: register_buffer keeps it in sight"
)


BAD_BATCHES = 100
"""Batches in a row without a finite loss, whatever the weights, after which the run is given up."""
SOON = 100
"""Steps within which going back a second time cuts the learning rate, even if the data were to blame."""


class FallbackExhaustedError(RuntimeError):
    """Everything was tried, and the run is still not healthy. The message is the report."""


@dataclass(kw_only=True)
class State:
    """What decisions depend on, besides the baselines of the rules and the counts of the ladder."""

    steps: int = 0
    """Optimizer steps observed."""
    quiet_since: int = 0
    """Steps observed at the last rollback or restart."""
    restarted: bool = False
    """Whether the run has started again from step 0."""
    incident: str | None = None
    """Cause and action that the run is in the middle of; None after a healthy step."""
    reported: int = 0
    """Steps in a row that a dry run only reported."""
    bad_batches: int = 0
    """Batches in a row whose loss is not finite on any weights."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done about one optimizer step, and why.

    Args:
        action: "accept" a healthy step, "leave" one that says nothing, "take" one whose data are unusual, "go_on" at a
            new level of the loss, "report", "skip", "rollback", "restart", "stop".
        step: the optimizer step, counted from 0.
        factor: factor on the learning rate from here on.
        finding: what was wrong; None for "accept".
        back_to: the step that the run goes back to, if it does.
        is_new: whether it is an event: steps that are skipped in a row are one.
        trusts_weights: whether the weights before this step are as good as the snapshot's, so that they replace it.
    """

    action: str
    step: int
    factor: float
    finding: Finding | None = None
    back_to: int | None = None
    is_new: bool = False
    trusts_weights: bool = False

    def event(self) -> Event:
        """Return the event that tells people of this decision."""
        assert self.finding is not None  # there is nothing to tell of a healthy step
        consequence = {
            "skip": "the step is skipped",
            "rollback": f"rolled back to step {self.back_to}, learning rate x {self.factor:.4g}",
            "restart": f"starting again from step 0, learning rate x {self.factor:.4g}, with a fresh warmup",
            "go_on": "the data or the loss changed, so this is the new level, and nothing else is done",
            "stop": "nothing is left to try",
            "report": "dry run: nothing is done",
        }[self.action]
        cause = self.finding.cause
        message = f"LRFallback, step {self.step}: {cause}: {self.finding.message}; {consequence}."
        return Event(self.step, cause, self.action, {**self.finding.evidence}, self.factor, message)

    def last_words(self, events: Sequence[Event]) -> str:
        """Return the report of a run that is given up, after these events."""
        assert self.finding is not None
        tried = "\n".join(f"  {event.message}" for event in events)
        reason = f"{self.finding.cause}: {self.finding.message}"
        return f"the run is not healthy ({reason}), and nothing is left to try:\n{tried}"


class Rescue:
    """Decides about every optimizer step of a run.

    Call :meth:`observe` and :meth:`decide` once for each step, and :meth:`go_back` at a rollback or restart.

    Args:
        limits: how often each action may be taken.
        recovery_steps: quiet steps over which the factor climbs back to 1 in a straight line; None for never.
        restart_warmup_steps: length of the warmup after a restart.
        dry_run: only report.

    Example:
        >>> rescue = Rescue(Limits())
        >>> finding = rescue.observe(Observation(loss=float("nan"), grad_norm=1.0))
        >>> rescue.decide(finding, {"rollback": 0, "restart": 0}).action
        'skip'
    """

    def __init__(
        self,
        limits: Limits,
        recovery_steps: int | None = None,
        restart_warmup_steps: int = 100,
        dry_run: bool = False,
    ) -> None:
        check_whole("LRFallback", "restart_warmup_steps", restart_warmup_steps, 0)
        if recovery_steps is not None:
            check_whole("LRFallback", "recovery_steps", recovery_steps, 1)
        self.recovery_steps, self.restart_warmup_steps, self.dry_run = recovery_steps, restart_warmup_steps, dry_run
        self.watch, self.ladder, self.state, self.doubt = Watch(), Ladder(limits), State(), Doubt()

    @property
    def is_healthy(self) -> bool:
        """Whether a snapshot that is taken now is one to go back to."""
        return self.state.incident is None and not self.doubt.steps and not self.watch.stall.is_suspicious()

    def observe(self, observation: Observation, has_scaler: bool = False) -> Finding | None:
        """Return what is wrong with a step before it is taken; a healthy one enters the baselines."""
        self.state.steps += 1
        finding = self.watch.find(observation, has_scaler)
        if finding is None:
            self.watch.accept(observation)
        elif finding.cause == "non_finite" and self._has_just_gone_back:
            finding = replace(finding, message=f"{finding.message}; {STATE_OUT_OF_SIGHT}")
        return finding

    def decide(
        self, finding: Finding | None, ways_back: Mapping[str, int], compare: Compare = lambda: None
    ) -> Decision:
        """Return what to do about the observed step, counted as done.

        Args:
            finding: what :meth:`observe` returned.
            ways_back: steps that can be gone back to, by action: "rollback", "restart".
            compare: losses of the present batch on the present weights and the snapshot's; None if it cannot be told.
        """
        if finding is None:
            return self._accept()
        if finding.is_harmless:
            return self._now("leave", finding=finding)
        if self.dry_run:
            return self._report(finding)
        if finding.doubtful:
            return self._decide_in_doubt(finding, ways_back, compare)
        if finding.cause == "non_finite" and not math.isfinite(finding.evidence["loss"]):
            return self._decide_on_bad_loss(finding, ways_back, compare)
        if finding.cause == "spike" and self._is_skipped_out:
            return self._decide_on_gradients(finding, ways_back, compare)
        return self._climb(finding, ways_back)

    def decide_on_bad_weights(self, ways_back: Mapping[str, int]) -> Decision:
        """Return what to do about weights that are not finite, found between two steps: to skip is no cure."""
        finding = Finding("non_finite", "the weights themselves, found before they were saved")
        return self._decision(self.ladder.climb("divergence", ways_back), finding, ways_back)

    def _decide_in_doubt(self, finding: Finding, ways_back: Mapping[str, int], compare: Compare) -> Decision:
        is_grave = self.watch.is_grave(finding)
        verdict, comparison = self.doubt.weigh(finding, compare, self.watch.lowest, is_grave)
        if verdict == GO_BACK:
            return self._go_back(finding, ways_back, comparison)
        if verdict == UNKNOWN and is_grave:
            return self._climb(finding, ways_back)
        if verdict == NEW_LEVEL or finding.cause == "divergence":
            return self._new_level(finding, comparison)
        return self._now("take", finding=finding, trusts_weights=self.doubt.began_with_data and self.doubt.steps == 1)

    def _decide_on_bad_loss(self, finding: Finding, ways_back: Mapping[str, int], compare: Compare) -> Decision:
        comparison = compare() if self.state.bad_batches == 0 or self._is_skipped_out else None
        if comparison is not None and comparison.helps(None):
            return self._go_back(finding, ways_back, comparison)
        if comparison is None and not self.state.bad_batches:
            return self._climb(finding, ways_back)
        self.state.bad_batches += 1
        message = f"{finding.message}, whatever the weights"
        action = "skip" if self.state.bad_batches <= BAD_BATCHES else "stop"
        self.ladder.skips += action == "skip"
        return self._decision(action, replace(finding, message=message), ways_back)

    def _decide_on_gradients(self, finding: Finding, ways_back: Mapping[str, int], compare: Compare) -> Decision:
        """Large gradients that stay: alone they are no reason to go back."""
        comparison = compare()
        if comparison is not None and comparison.helps(self.watch.lowest):
            return self._go_back(finding, ways_back, comparison)
        return self._new_level(finding, comparison)

    def _climb(self, finding: Finding, ways_back: Mapping[str, int], cut: bool = True) -> Decision:
        action = self.ladder.climb(finding.cause, ways_back, cut)
        if finding.cause == "spike" and action != "skip":
            finding = replace(finding, cause="divergence")  # a spike that stays
        return self._decision(action, finding, ways_back)

    def _go_back(self, finding: Finding, ways_back: Mapping[str, int], comparison: Comparison | None) -> Decision:
        """Roll back, because the comparison says that it helps; the first time that data did it, at the same rate."""
        assert comparison is not None
        was_soon = self.ladder.rollbacks > 0 and self.state.steps - self.state.quiet_since <= SOON
        cause = finding.cause if finding.cause == "non_finite" else "divergence"
        more = {"loss_now": comparison.present, "loss_before": comparison.before}
        told = replace(finding, message=f"{finding.message}; {comparison.words}", evidence=finding.evidence | more)
        decision = self._climb(replace(told, cause="divergence"), ways_back, not self.doubt.began_with_data or was_soon)
        return replace(decision, finding=replace(told, cause=cause))

    def _new_level(self, finding: Finding, comparison: Comparison | None) -> Decision:
        self.watch.new_level()
        self.doubt.end()
        self.ladder.step_taken()
        if comparison is not None:
            finding = replace(finding, message=f"{finding.message}; {comparison.words}")
        decision = self._decision("go_on", finding, {})
        self.state.incident = None
        return decision

    def go_back(self, action: str) -> None:
        """Judge the run afresh from here on: it is put back to a snapshot by a "rollback" or a "restart"."""
        self.watch.start_afresh()
        self.doubt.end()
        self.state.bad_batches = 0
        self.state.quiet_since = self.state.steps
        self.state.restarted |= action == "restart"

    def factor(self, clock: int, ramp: bool = True) -> float:
        """Return the factor on the learning rate, ``clock`` steps after the start or the last restart.

        After a restart it climbs in a straight line, unless (``ramp=False``) the run's own warmup climbs already.
        """
        if not ramp or not self.state.restarted:
            return self.ladder.factor
        return self.ladder.factor * min(1.0, (clock + 1) / max(1, self.restart_warmup_steps))

    def metrics(self, factor: float) -> dict[str, float]:
        """Return the numbers for loggers: counts, the present ``factor``, and the spike scores."""
        values = {FALLBACK.of(name): float(getattr(self.ladder, name)) for name in ("skips", "rollbacks", "restarts")}
        values[FALLBACK.of("factor")] = factor
        return values | {SPIKE_SCORE.of(name): score.value() for name, score in self.watch.scores.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return counts, factor, baselines, and whether the run is healthy, plain."""
        parts = {"ladder": self.ladder.state_dict(), "watch": self.watch.state_dict(), "doubt": self.doubt.state_dict()}
        return {**asdict(self.state), "healthy": self.is_healthy, **parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a run stood; other keys are ignored."""
        self.state = State(**{name: state[name] for name in asdict(self.state) if name in state})
        self.ladder.load_state_dict(state["ladder"])
        self.watch.load_state_dict(state["watch"])
        self.doubt.load_state_dict(state.get("doubt", {}))

    @property
    def _is_skipped_out(self) -> bool:
        return self.ladder.skips_in_a_row >= self.ladder.limits.max_skips

    @property
    def _has_just_gone_back(self) -> bool:
        has_gone_back = self.ladder.rollbacks + self.ladder.restarts > 0
        return has_gone_back and self.state.steps == self.state.quiet_since + 1

    def _accept(self) -> Decision:
        state, ladder = self.state, self.ladder
        ladder.step_taken()
        self.doubt.end()
        state.incident, state.reported, state.bad_batches = None, 0, 0
        if self.recovery_steps is not None:
            ladder.recover(self.recovery_steps - (state.steps - state.quiet_since) + 1)
        return self._now("accept")

    def _report(self, finding: Finding) -> Decision:
        self.state.reported += 1
        if self.state.reported > self.ladder.limits.max_skips:  # a level that stays is the new level
            self.watch.new_level()
        return self._decision("report", finding, {})

    def _decision(self, action: str, finding: Finding, ways_back: Mapping[str, int]) -> Decision:
        incident = f"{finding.cause}/{action}"
        goes_on = incident == self.state.incident and action in ("skip", "report")
        self.state.incident = incident
        return self._now(action, finding=finding, back_to=ways_back.get(action), is_new=not goes_on)

    def _now(self, action: str, **more: Any) -> Decision:
        return Decision(action=action, step=self.state.steps - 1, factor=self.ladder.factor, **more)
