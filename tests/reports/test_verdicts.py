"""Short runs whose end is known, and the word that each of them must get."""

import math

import pytest

from lightning_norms.depth_history import Profile
from lightning_norms.reports.diagnosis import Trial, TrialEvent, Verdict
from lightning_norms.reports.verdicts import has_learnt, is_dead, judge, level

NAN = math.nan


def trial(losses, events=(), stalled=0, blocks=()):
    profile = Profile(tuple(f"block_{i:02d}" for i in range(len(blocks))), (0,), tuple((value,) for value in blocks))
    found = tuple(TrialEvent(step, cause, "said") for step, cause in events)
    return Trial(
        "as given", "", {}, 0, len(losses), True, tuple(losses), gradients=profile, events=found, stalled_steps=stalled
    )


def falling(start, end, steps=60):
    return [end + (start - end) * math.exp(-step / 8) for step in range(steps)]


CASES = [
    # as the measured runs: dead post-norm, its healthy pre-norm twin, whose loss is the same at step 60
    ("dead post-norm", trial(falling(6.0, 3.2), [(6, "stall")], stalled=54), 3.17, Verdict.STALLS),
    ("healthy twin", trial(falling(6.0, 3.2)), 3.17, Verdict.TRAINS),
    (
        "dead before it reaches the floor",
        trial(falling(6.0, 3.2, 16), [(6, "stall")], stalled=10),
        3.17,
        Verdict.STALLS,
    ),
    ("weak depths for a moment", trial(falling(6.0, 2.4), [(20, "stall")]), 3.17, Verdict.TRAINS),
    ("weak depths, but it has learnt", trial(falling(6.0, 2.4), [(6, "stall")], stalled=54), 3.17, Verdict.TRAINS),
    ("weak only at the end", trial(falling(6.0, 3.2), [(57, "stall")], stalled=3), 3.17, Verdict.UNDECIDED),
    ("labels unknown, no gradient", trial(falling(6.0, 3.2), [(6, "stall")], stalled=54), None, Verdict.STALLS),
    ("NaN", trial([5.0, 4.0, NAN], [(2, "non_finite")]), 3.17, Verdict.NON_FINITE),
    ("goes up and stays", trial([5.0, 4.0, 3.0] + [9.0] * 20, [(3, "spike")]), 3.17, Verdict.DIVERGES),
    ("up from the first step", trial([3.0] + [40.0] * 20), 2.3, Verdict.DIVERGES),
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
    ("a loss below zero", trial(falling(1.0, -4.0)), None, Verdict.TRAINS),
    ("no loss at all", trial([NAN, NAN]), None, Verdict.UNDECIDED),
]


@pytest.mark.parametrize(("short_run", "constant", "verdict"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_the_word_for_a_run_whose_end_is_known(short_run, constant, verdict):
    assert judge(short_run, constant)[0] is verdict


def test_a_start_above_knowing_nothing_does_not_make_the_rest_easy():
    """A broken init starts at 60; 16 is a fall, but no learning where knowing nothing costs 2.4."""
    short_run = trial(falling(60.0, 16.0))
    assert judge(short_run, 2.3)[0] is Verdict.TRAINS
    assert judge(short_run, 2.3, 2.4)[0] is Verdict.UNDECIDED


def test_the_reason_says_the_numbers():
    reason = judge(trial(falling(6.0, 3.2), [(6, "stall")], stalled=54), 3.17)[1]
    assert "54 steps" in reason
    assert "3.17" in reason
    assert "+0.03" in reason
    assert "every depth kept" in judge(trial(falling(6.0, 2.4), blocks=(1.0, 2.0)), 3.17)[1]
    assert "the others learn alone" in judge(trial(falling(6.0, 2.4), stalled=54), 3.17)[1]


def test_ten_steps_without_a_gradient_are_dead_and_nine_are_not():
    losses = falling(6.0, 3.2)
    assert is_dead(losses, 10, 3.17)
    assert not is_dead(losses, 9, 3.17)
    assert not is_dead(falling(6.0, 2.4), 60, 3.17)


def test_learnt_is_clearly_below_a_constant_prediction():
    assert has_learnt([2.9] * 20, 3.17)
    assert not has_learnt([3.1] * 20, 3.17)  # 2 per cent: a constant that fits these batches by chance
    assert not has_learnt([2.9] * 20, None)
    assert level([9.0] * 20 + [1.0] * 10) == 1.0
