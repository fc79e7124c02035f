"""Rules on scripted sequences: what they name, when, and what they must never name."""

import math
import random

import pytest

from lightning_norms.measuring.observation import Observation
from lightning_norms.measuring.spike_score import SpikeScore
from lightning_norms.rescue.rules import (
    WINDOW,
    DivergenceRule,
    SpikeRule,
    StallRule,
    Watch,
    find_non_finite,
)


def watch(losses, norms=None, rule=None):
    """Steps at which the spike rule fires; flagged values stay out, as in a run that skips."""
    rule = rule or SpikeRule()
    fired = []
    for step, loss in enumerate(losses):
        seen = Observation(loss, norms[step] if norms else 1.0)
        if rule.judge(seen):
            fired.append(step)
        else:
            rule.accept(seen)
    return fired


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_is_named(loss):
    assert find_non_finite(Observation(loss, 1.0)).cause == "non_finite"
    assert find_non_finite(Observation(1.0, loss)).cause == "non_finite"
    assert find_non_finite(Observation(1.0, 1.0, non_finite=1)).cause == "non_finite"
    assert find_non_finite(Observation(1.0, 1.0)) is None
    assert find_non_finite(Observation(None, 1.0)) is None


def test_a_gradient_whose_square_is_infinite_is_a_spike_from_the_first_step_on():
    found = Watch().find(Observation(3.0, 1e20))
    assert (found.cause, found.evidence["grad_norm"]) == ("spike", 1e20)
    assert Watch().find(Observation(3.0, 1e15)) is None


def test_five_percent_noise_never_fires():
    """Acceptance: 300 steps, 100 seeds."""
    for seed in range(100):
        noise = random.Random(seed)
        assert watch([3.0 * noise.uniform(0.95, 1.05) for _ in range(300)]) == []


@pytest.mark.parametrize("level", [0.0, -1.0, -100.0, 1e-6])
def test_losses_that_are_negative_or_near_zero_never_fire(level):
    for seed in range(100):
        noise = random.Random(seed)
        losses = [level + noise.gauss(0, 0.05) for _ in range(300)]
        norms = [abs(noise.gauss(1, 0.1)) for _ in range(300)]
        assert watch(losses, norms) == []


def test_a_falling_loss_never_fires():
    for seed in range(20):
        noise = random.Random(seed)
        assert watch([3.2 + 2.4 * math.exp(-step / 20) + noise.gauss(0, 0.1) for step in range(300)]) == []


@pytest.mark.parametrize("step", [1, 5, 30, 70, 200])
def test_a_threefold_loss_is_named_at_its_step(step):
    """Acceptance: injected at steps 1, 5, 30, 70, 200 of a run that comes down from ln 256."""
    for seed in range(20):
        noise = random.Random(seed)
        losses = [3.2 + 2.4 * math.exp(-s / 20) + noise.gauss(0, 0.1) for s in range(300)]
        norms = [(1 + math.exp(-s / 5)) * noise.uniform(0.9, 1.1) for s in range(300)]
        losses[step] *= 3
        norms[step] *= 3
        assert watch(losses, norms) == [step]


def test_a_tenfold_gradient_norm_is_named_and_a_fivefold_is_not():
    for factor, fired in ((12.0, [40]), (5.0, [])):
        norms = [1.0 + 0.2 * (step % 3) for step in range(60)]
        norms[40] = factor * 1.4
        assert watch([3.0] * 60, norms) == fired


def test_flagged_values_stay_out_of_the_baseline():
    """One value of 9 in the baseline would let the next through."""
    losses = [3.6 + 0.01 * (step % 5) for step in range(30)] + [9.0] * 3 + [3.6] * 3
    assert watch(losses) == [30, 31, 32]


def test_a_new_baseline_accepts_a_level_shift():
    rule = SpikeRule()
    watch([3.6] * 30, rule=rule)
    rule.start_afresh()
    assert watch([9.0] * 30, rule=rule) == []


def test_divergence_is_named_when_half_of_the_way_is_lost_and_not_before():
    rule, fired = DivergenceRule(), []
    losses = [5.5 - 2.5 * min(1.0, step / 60) for step in range(100)]  # 5.5 down to 3.0
    losses += [3.0 + 0.05 * step for step in range(60)]  # and up again: half of the way is lost at 4.25
    for step, loss in enumerate(losses):
        if rule.judge(Observation(loss, 1.0)):
            fired.append(step)
        rule.accept(Observation(loss, 1.0))
    assert fired
    first = fired[0]
    assert losses[first - WINDOW // 2] == pytest.approx(4.25, abs=0.1)  # the median of 16 is half a window late


def test_noise_on_a_plateau_is_no_divergence():
    for seed in range(100):
        noise, rule = random.Random(seed), DivergenceRule()
        for _ in range(300):
            seen = Observation(3.0 * noise.uniform(0.9, 1.1), 1.0)
            assert rule.judge(seen) is None
            rule.accept(seen)


def stall_step(profile, losses=None, steps=120):
    """The step at which the rule names a stall, or None."""
    rule = StallRule()
    for step in range(steps):
        loss = losses(step) if losses else 3.4
        if rule.judge(Observation(loss, 1.0, stacks=(tuple(profile(step)),))):
            return step
    return None


def test_a_bottom_that_fades_is_named_five_steps_after_it_crosses():
    """q of the lower blocks is 10^(-step/10), so below 10^-1.5 from step 15 on; four of five steps are at 18."""
    assert stall_step(lambda step: [10 ** (-step / 10)] * 4 + [1.0] * 4) == 18


@pytest.mark.parametrize(
    "profile",
    [
        lambda step: [1.0 * 10 ** (-step / 30)] * 8,  # everything falls alike: converging
        lambda step: [0.0] * 4 + [1.0] * 4,  # the lower half is frozen or unused
        lambda step: [1e-9 * (step + 1) ** 3] * 7 + [1.0],  # ReZero: starts at nothing and grows
        lambda step: [0.3] * 7 + [1.0],  # uneven, but so from the start
        lambda step: [1.0, 1.0 if step % 2 else 0.0, 1.0, 1.0],  # a block that is dropped every other step
        lambda step: [0.1 if step > 10 else 1.0] * 7 + [1.0],  # a tenth is not dead
        lambda step: [1.0],  # one block has nobody to be compared with
        lambda step: [],
    ],
)
def test_healthy_profiles_are_no_stall(profile):
    assert stall_step(profile) is None


def test_a_run_that_has_learnt_is_no_stall():
    fading = lambda step: [10 ** (-step / 10)] * 4 + [1.0] * 4  # noqa: E731
    assert stall_step(fading, lambda step: 3.4 if step < 3 else 0.5) is None
    assert stall_step(fading, lambda step: 3.4 if step < 3 else 1.2) == 18


def test_unfreezing_starts_the_comparison_anew():
    assert stall_step(lambda step: [1.0] * 8 if step < 50 else [1e-4] * 4 + [1.0] * 8) is None


def test_stacks_are_judged_apart():
    """An encoder that gets a thousandth of the decoder's gradient, from the start to the end, is healthy."""
    rule = StallRule()
    for _ in range(60):
        stacks = ((1e-3, 1e-3), (1.0, 1.0))
        assert rule.judge(Observation(3.4, 1.0, stacks=stacks)) is None
    for step in range(60, 90):  # noqa: B007
        found = rule.judge(Observation(3.4, 1.0, stacks=((1e-7, 1e-3), (1.0, 1.0))))
        if found:
            break
    assert found.cause == "stall"
    assert step == 63


def test_spike_score_counts_what_is_beyond_six_deviations():
    score = SpikeScore()
    for step in range(328):
        score.update(100.0 if step in (150, 250) else math.nan if step == 300 else float(step % 2))
    assert score.value() == pytest.approx(3 / 200)


def plain(state):
    """All values that a nested state holds."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, (dict, list)):
            yield from plain(value)
        else:
            yield value


def test_state_round_trip_is_plain_and_a_copy():
    first, second = Watch(), Watch()
    for step in range(40):
        observation = Observation(3.0 + 0.1 * math.sin(step), 1.0, stacks=((0.5, 1.0),))
        assert first.find(observation) is None
        first.accept(observation)
    first.find(Observation(math.nan, 1.0, non_finite=1), has_scaler=True)
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.state_dict() == state != Watch().state_dict()
    for observation in [Observation(9.0, 1.0, stacks=((1e-4, 1.0),))] * 6:
        assert first.find(observation) == second.find(observation) is not None
    assert second.state_dict() == first.state_dict() != state
    assert {type(value) for value in plain(state)} <= {int, float, type(None)}


def test_an_overflow_is_left_to_the_scaler_twenty_times():
    watch, overflow = Watch(), Observation(None, math.inf, non_finite=1)
    assert [watch.find(overflow, has_scaler=True).cause for _ in range(22)] == ["overflow"] * 20 + ["non_finite"] * 2
    assert watch.find(Observation(1.0, 1.0), has_scaler=True) is None
    assert watch.find(overflow, has_scaler=True).is_harmless
    assert not watch.find(overflow).is_harmless


def test_a_step_without_loss_and_gradient_is_absent_and_leaves_no_trace():
    watch, absent = Watch(), Observation(None, 0.0, stacks=((0.0, 0.0),))
    before = watch.state_dict()
    assert watch.find(absent).cause == "absent"
    assert watch.state_dict() == before


def test_parameters_that_change_start_the_comparison_anew():
    watch = Watch()
    for step in range(12):
        weak = 1.0 if step < 6 else 1e-4
        observation = Observation(3.4, 1.0, stacks=((weak, 1.0),), parameters_changed=step == 6)
        assert watch.find(observation) is None
