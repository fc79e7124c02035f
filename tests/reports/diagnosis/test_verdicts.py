"""Short runs whose end is known, and the word that each of them must get."""

import math
from dataclasses import replace

import pytest

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.diagnosis.data import Trial, TrialEvent, Verdict
from lightning_norms.reports.diagnosis.progress import has_arrived, has_learnt, is_dead, level
from lightning_norms.reports.diagnosis.verdicts import judge, settle

NAN = math.nan


def trial(losses, events=(), stalled=0, blocks=(), constant=3.17):
    profile = Profile(tuple(f"block_{i:02d}" for i in range(len(blocks))), (0,), tuple((value,) for value in blocks))
    found = tuple(TrialEvent(step, cause, "said") for step, cause in events)
    excess = () if constant is None else tuple(loss - constant for loss in losses)
    shown = {"losses": tuple(losses), "excess": excess, "gradients": profile, "events": found}
    return Trial(name="as given", seed=0, planned_steps=len(losses), stalled_steps=stalled, **shown)


def falling(start, end, steps=60):
    return [end + (start - end) * math.exp(-step / 8) for step in range(steps)]


CASES = [
    # as the measured runs: dead post-norm, its healthy pre-norm twin, whose loss is the same at step 60
    ("dead post-norm", trial(falling(6.0, 3.2), [(6, "stall")], stalled=54), 3.17, Verdict.STALLS),
    ("healthy twin", trial(falling(6.0, 3.1)), 3.17, Verdict.TRAINS),
    ("on its way", trial(falling(6.0, 3.2, 25)), 3.17, Verdict.TRAINS),
    ("flat at the constant, after a spike", trial(falling(18.0, 3.2, 150), [(2, "spike")]), 3.17, Verdict.SPIKES),
    ("flat at the constant", trial(falling(6.0, 3.2, 150)), 3.17, Verdict.UNDECIDED),
    (
        "dead before it reaches the floor",
        trial(falling(6.0, 3.2, 16), [(6, "stall")], stalled=10),
        3.17,
        Verdict.STALLS,
    ),
    ("weak depths for a moment", trial(falling(6.0, 2.4), [(20, "stall")]), 3.17, Verdict.TRAINS),
    ("weak depths, but it has learnt", trial(falling(6.0, 2.4), [(6, "stall")], stalled=54), 3.17, Verdict.TRAINS),
    ("weak only at the end", trial(falling(6.0, 3.2), [(57, "stall")], stalled=3), 3.17, Verdict.UNDECIDED),
    (
        "labels unknown, no gradient",
        trial(falling(6.0, 3.2), [(6, "stall")], stalled=54, constant=None),
        None,
        Verdict.STALLS,
    ),
    ("NaN", trial([5.0, 4.0, NAN], [(2, "non_finite")]), 3.17, Verdict.NON_FINITE),
    ("goes up and stays", trial([5.0, 4.0, 3.0] + [9.0] * 20, [(3, "spike")]), 3.17, Verdict.DIVERGES),
    ("up from the first step", trial([3.0] + [40.0] * 20, constant=2.3), 2.3, Verdict.DIVERGES),
    (
        "one spike that passed",
        trial([*falling(6, 2.4, 30), 9.0, *falling(4, 2.4, 30)], [(30, "spike")]),
        3.17,
        Verdict.TRAINS,
    ),
    (
        "spike after spike",
        trial([*falling(6, 3.2, 40)], [(9, "spike"), (19, "spike"), (29, "spike")]),
        3.17,
        Verdict.SPIKES,
    ),
    ("flat", trial([5.5, 5.51, 5.49, 5.5] * 10), 3.17, Verdict.UNDECIDED),
    ("too few steps", trial(falling(6.0, 3.2, 6)), 3.17, Verdict.UNDECIDED),
    ("a loss below zero", trial(falling(1.0, -4.0), constant=None), None, Verdict.TRAINS),
    ("no loss at all", trial([NAN, NAN]), None, Verdict.UNDECIDED),
]


@pytest.mark.parametrize(("short_run", "constant", "verdict"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_the_word_for_a_run_whose_end_is_known(short_run, constant, verdict):
    assert judge(short_run, constant).verdict is verdict


def test_a_start_above_knowing_nothing_does_not_make_the_rest_easy():
    """A broken init starts at 60; 16 is a fall, but no learning where knowing nothing costs 2.4."""
    short_run = trial(falling(60.0, 16.0), constant=2.3)
    assert judge(short_run, 2.3).verdict is Verdict.TRAINS
    assert judge(short_run, 2.3, 2.4).verdict is Verdict.UNDECIDED


def test_the_reason_says_the_numbers():
    reason = judge(trial(falling(6.0, 3.2), [(6, "stall")], stalled=54), 3.17).reason
    assert "for the last 54 steps some blocks received no gradient" in reason
    assert "3.203, is no better than that of a constant prediction, 3.17" in reason
    assert "every block kept" in judge(trial(falling(6.0, 2.4), blocks=(1.0, 2.0)), 3.17).reason
    assert "the others learn alone" in judge(trial(falling(6.0, 2.4), stalled=54), 3.17).reason
    assert (
        "(steps 9, 19, 29, 39, ...)"
        in judge(trial(falling(6, 3.2), [(step, "spike") for step in (9, 19, 29, 39, 49)]), 3.17).reason
    )


def test_the_first_rule_that_applies_decides():
    """A run that is non-finite, dead and spiking at once gets the verdict of the highest row of the table."""
    events = [(9, "spike"), (19, "spike"), (29, "spike")]
    everything = trial(falling(6.0, 3.2), [*events, (50, "non_finite")], stalled=54)
    assert judge(everything, 3.17).verdict is Verdict.NON_FINITE
    assert judge(trial(falling(6.0, 3.2), events, stalled=54), 3.17).verdict is Verdict.STALLS
    assert judge(trial(falling(6.0, 3.2), events), 3.17).verdict is Verdict.SPIKES


def test_numbers_that_are_not_finite_at_the_end_are_judged_too():
    short_run = trial([5.0, 4.0, math.inf, -math.inf, 3.0] * 3)
    assert judge(short_run, 3.17).verdict in set(Verdict)


def test_ten_steps_without_a_gradient_are_dead_and_nine_are_not():
    excess = [loss - 3.17 for loss in falling(6.0, 3.2)]
    assert is_dead(excess, 10, 3.17)
    assert not is_dead(excess, 9, 3.17)
    assert not is_dead([loss - 3.17 for loss in falling(6.0, 2.4)], 60, 3.17)


def test_learnt_is_below_a_constant_prediction_by_more_than_chance():
    assert has_learnt([-0.1] * 20, 3.17)
    assert not has_learnt([-0.02] * 20, 3.17)  # within 1 per cent of the constant's loss
    assert not has_learnt([-0.1, 0.5, -0.7, 0.4, -0.6] * 4, 3.17)  # below on average, and not by three standard errors
    assert not has_learnt([-0.1] * 20, None)
    assert level([9.0] * 20 + [1.0] * 10) == 1.0


def test_flat_and_near_the_constant_has_arrived_and_a_slow_fall_has_not():
    flat = [2.0] * 20 + [0.03, 0.02] * 30
    assert has_arrived(flat, 2.4, 3.17)
    assert not has_arrived([2.0] * 20 + [0.3 - 0.004 * step for step in range(60)], 2.4, 3.17)
    assert not has_arrived([2.0] * 20 + [0.9] * 60, 2.4, 3.17)  # flat, but far away: it may be on a plateau
    assert not has_arrived(flat[:50], 2.4, 3.17)  # too few steps to call them flat


def test_a_plateau_is_death_if_another_run_has_learnt_from_the_same_batches():
    flat, better = trial(falling(6.0, 3.2, 150)), trial(falling(6.0, 2.5, 150))
    flat = judge(flat, 3.17)
    assert (flat.verdict, flat.plateau) == (Verdict.UNDECIDED, True)
    assert flat.reason.endswith("which may be a plateau")
    assert settle(flat, [flat], 3.17) is flat
    dead = settle(flat, [flat, better], 3.17)
    assert (dead.verdict, dead.plateau) == (Verdict.STALLS, False)
    assert dead.reason.endswith(", while as given came 0.67 below it on the same batches")
    slow = replace(flat, plateau=False)  # the sentence does not matter
    assert settle(slow, [better], 3.17) is slow


def test_a_loss_that_rises_is_not_said_to_have_moved_a_little():
    rising = judge(trial([1.0 + 0.01 * i for i in range(10)], constant=None), None)
    assert rising.verdict is Verdict.UNDECIDED
    assert rising.reason.startswith("the loss did not fall in 10 steps")


def test_a_noisy_rise_far_above_the_start_is_a_divergence():
    rising = [1.05, 0.9, 1.3, 4.0, 20.0, *[100.0, 700.0, 300.0, 120.0, 900.0, 410.0] * 3]
    assert judge(trial(rising, constant=1.0), 1.0).verdict is Verdict.DIVERGES
    spike = [*falling(3.0, 1.0, 30), *[1.0, 9.0, 1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 9.5, 1.0]]
    assert judge(trial(spike, constant=2.0), 2.0).verdict is not Verdict.DIVERGES


def test_a_block_without_gradient_is_not_said_to_have_kept_it():
    run = judge(trial(falling(6.0, 2.4), blocks=(5.7e-6, 1.0)), 3.17)
    assert run.verdict is Verdict.TRAINS
    assert run.reason.endswith("but block_00 receives only 5.7e-06 of the largest gradient of its stack")
    detached = judge(trial(falling(6.0, 2.4), blocks=(0.0, 0.0)), 3.17)
    assert detached.reason.endswith("but no block received a gradient: the other parts learn alone")
    assert judge(trial(falling(3.2, 3.17), blocks=(0.0, 0.0)), 3.17).verdict is Verdict.STALLS
    flat = judge(trial([3.17, 3.18] * 30, blocks=(2e-12, 1.0)), 3.17)
    assert flat.verdict is Verdict.STALLS
    assert "from the first step on block_00 receives 2e-12" in flat.reason


def test_the_margin_follows_the_scale_of_the_loss_and_not_its_shift():
    assert not has_learnt([-0.1] * 20, 1003.17)
    assert has_learnt([-0.1] * 20, 1003.17, 3.17)
    assert not has_learnt([-0.02] * 20, 0.0, 3.17)


def test_batches_without_a_label_have_no_loss_to_rise_from():
    """Their loss and gradient are exactly 0; the others' loss falls."""
    losses = [0.0 if step % 4 == 0 else loss for step, loss in enumerate(falling(3.5, 2.9))]
    norms = [0.0 if step % 4 == 0 else 1.0 for step in range(len(losses))]
    mixed = replace(trial(losses, constant=None), grad_norms=tuple(norms))
    assert judge(mixed).verdict is Verdict.TRAINS
    assert judge(replace(mixed, grad_norms=())).verdict is Verdict.DIVERGES  # nothing tells them apart


def test_a_loss_of_several_optimizers_may_rise():
    game = trial([0.85 + 0.01 * step for step in range(60)], constant=None)
    assert judge(game).verdict is Verdict.DIVERGES
    assert judge(replace(game, optimizers=2)).verdict is Verdict.UNDECIDED
