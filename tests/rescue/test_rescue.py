"""What is decided about every step, from plain numbers and without a Trainer."""

import math

import pytest
import torch

from lightning_norms.measuring.observation import Observation
from lightning_norms.rescue.ladder import Limits
from lightning_norms.rescue.rescue import Rescue

HEALTHY, BAD = Observation(3.0, 1.0), Observation(None, math.nan, non_finite=1)
BOTH = {"rollback": 20, "restart": 0}


def rescue(**options):
    limits = {name: options.pop(name) for name in [*options] if name.startswith("max_")}
    return Rescue(Limits(**limits), **options)


def step(rescue, observation, ways_back=BOTH, **options):
    """One trip: observe, decide, and where the run goes back, say so."""
    decision = rescue.decide(rescue.observe(observation, **options), ways_back)
    if decision.action in ("rollback", "restart"):
        rescue.go_back(decision.action)
    return decision


def actions(rescue, observations, **options):
    return [step(rescue, observation, **options).action for observation in observations]


def test_one_bad_step_is_one_incident_and_a_healthy_one_ends_it():
    subject = rescue()
    first, second = step(subject, BAD), step(subject, BAD)
    assert (first.action, first.step, first.is_new, first.finding.cause) == ("skip", 0, True, "non_finite")
    assert (second.action, second.is_new, subject.is_healthy) == ("skip", False, False)
    assert step(subject, HEALTHY).action == "accept"
    assert subject.is_healthy
    assert step(subject, BAD).is_new


def test_what_a_decision_tells():
    subject = rescue(max_skips=0)
    actions(subject, [HEALTHY] * 20)
    decision = step(subject, Observation(30.0, 9.0))
    event = decision.event()
    assert (event.step, event.cause, event.action, event.factor) == (20, "divergence", "rollback", 0.5)
    assert event.evidence["loss"] == 30.0
    assert event.message == (
        "LRFallback, step 20: divergence: the loss, 30, is above 3.3, the limit from the last 16 steps;"
        " rolled back to step 20, learning rate x 0.5."
    )


def test_the_end_is_told_with_all_that_was_tried():
    subject = rescue(max_skips=1, max_rollbacks=1, max_restarts=1)
    decisions = [step(subject, BAD) for _ in range(6)]
    assert [decision.action for decision in decisions] == ["skip", "rollback", "skip", "restart", "skip", "stop"]
    words = decisions[-1].last_words([decision.event() for decision in decisions])
    assert words.startswith("the run is not healthy (non_finite: loss unknown, gradient norm nan), and nothing is left")
    assert all(decision.event().message in words for decision in decisions)


def test_only_what_is_at_hand_is_gone_back_to():
    assert actions(rescue(max_skips=0), [BAD] * 2, ways_back={"restart": 0}) == ["restart"] * 2
    assert actions(rescue(max_skips=0), [BAD], ways_back={}) == ["stop"]


def test_after_a_rollback_the_baselines_start_anew():
    subject = rescue(max_skips=0)
    actions(subject, [HEALTHY] * 20)
    assert actions(subject, [Observation(30.0, 9.0)] * 5) == ["rollback"] + ["accept"] * 4


def test_nothing_is_done_about_steps_that_say_nothing():
    subject = rescue()
    assert actions(subject, [Observation(None, 0.0)] * 3) == ["leave"] * 3
    assert actions(subject, [BAD] * 21, has_scaler=True) == ["leave"] * 20 + ["skip"]
    assert (subject.state.steps, subject.ladder.skips) == (24, 1)


def test_they_end_no_incident_either():
    subject = rescue()
    actions(subject, [BAD, Observation(None, 0.0)])
    assert not step(subject, BAD).is_new


def test_a_dry_run_only_reports_and_takes_a_level_that_stays_as_the_new_one():
    subject = rescue(dry_run=True)
    actions(subject, [HEALTHY] * 20)
    decisions = [step(subject, Observation(30.0, 9.0)) for _ in range(6)]
    assert [decision.action for decision in decisions] == ["report"] * 4 + ["accept"] * 2
    assert [decision.is_new for decision in decisions] == [True] + [False] * 5
    assert (subject.ladder.skips, subject.ladder.factor) == (0, 1.0)


def test_bad_weights_are_never_skipped():
    subject = rescue(max_rollbacks=1, max_restarts=0)
    first, second = (subject.decide_on_bad_weights(BOTH) for _ in range(2))
    assert (first.action, first.finding.cause, first.back_to) == ("rollback", "non_finite", 20)
    assert second.action == "stop"


def test_the_factor_climbs_after_a_restart_and_recovers():
    subject = rescue(max_skips=0, max_rollbacks=0, restart_warmup_steps=4, recovery_steps=2)
    assert [subject.factor(clock) for clock in (0, 9)] == [1.0, 1.0]
    step(subject, BAD)
    assert [subject.factor(clock) for clock in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert subject.factor(0, ramp=False) == 0.5
    assert [step(subject, HEALTHY).factor for _ in range(3)] == [0.75, 1.0, 1.0]


@pytest.mark.parametrize("name", ["restart_warmup_steps", "recovery_steps"])
def test_senseless_arguments_are_refused(name):
    with pytest.raises(ValueError, match=f"LRFallback: {name} must be a whole number of at least"):
        rescue(**{name: -1})


def test_a_resumed_run_decides_as_the_one_that_went_on(tmp_path):
    first, second = rescue(recovery_steps=30), rescue(recovery_steps=30)
    story = [HEALTHY] * 20 + [Observation(30.0, 9.0)] * 5 + [HEALTHY, BAD]
    actions(first, story)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert first.state_dict() == second.state_dict()
    for observation in [BAD, HEALTHY, *story]:
        assert repr(step(first, observation)) == repr(step(second, observation))
    assert first.state_dict() == second.state_dict()


def test_the_state_does_not_grow():
    subject = rescue()
    noise = [Observation(3.0 + 0.01 * (number % 7), 1.0, stacks=((0.5, 1.0),)) for number in range(600)]
    actions(subject, noise[:300])
    size = len(repr(subject.state_dict()))
    actions(subject, noise[300:])
    assert len(repr(subject.state_dict())) < 1.05 * size
