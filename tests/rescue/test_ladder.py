"""Which rung follows which, and that every ladder ends."""

import pytest

from lightning_norms.rescue.ladder import Ladder, Limits


def climb(ladder, cause, times=1, ways_back=("rollback", "restart")):
    return [ladder.climb(cause, ways_back) for _ in range(times)]


@pytest.mark.parametrize("cause", ["non_finite", "spike"])
def test_skips_then_rollback(cause):
    ladder = Ladder(Limits(max_skips=3))
    assert climb(ladder, cause, 4) == ["skip", "skip", "skip", "rollback"]
    assert (ladder.factor, ladder.skips, ladder.rollbacks) == (0.5, 3, 1)


def test_a_good_step_between_resets_the_skips():
    ladder = Ladder(Limits(max_skips=2))
    assert climb(ladder, "spike", 2) == ["skip"] * 2
    ladder.step_taken()
    assert climb(ladder, "spike", 3) == ["skip", "skip", "rollback"]


def test_stall_restarts_and_falls_back_to_rollback_once_the_start_is_gone():
    assert climb(Ladder(Limits()), "stall") == ["restart"]
    assert climb(Ladder(Limits()), "stall", ways_back=["rollback"]) == ["rollback"]
    assert climb(Ladder(Limits()), "stall", ways_back=[]) == ["stop"]


def test_cuts_multiply():
    """Case 24: two fallbacks at 0.5 are 0.25."""
    ladder = Ladder(Limits(cut=0.5))
    climb(ladder, "divergence", 2)
    assert ladder.factor == 0.25


def test_every_ladder_ends():
    """Case 26: something bad at every step stops after the caps."""
    limits = Limits(max_skips=2, max_rollbacks=2, max_restarts=1)
    assert climb(Ladder(limits), "non_finite", 12) == [
        "skip", "skip", "rollback", "skip", "skip", "rollback", "skip", "skip", "restart", "skip", "skip", "stop",
    ]  # fmt: skip
    assert climb(Ladder(Limits(cut=0.05, lowest_factor=0.01)), "divergence", 2) == ["rollback", "stop"]


def test_zero_turns_a_rung_off():
    assert climb(Ladder(Limits(max_skips=0)), "spike") == ["rollback"]
    assert climb(Ladder(Limits(max_skips=0, max_rollbacks=0)), "spike") == ["restart"]
    assert climb(Ladder(Limits(max_skips=0, max_rollbacks=0, max_restarts=0)), "spike") == ["stop"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("cut", 0.0), ("cut", 1.0), ("cut", float("nan")), ("cut", None), ("lowest_factor", -1), ("max_skips", -1),
     ("max_rollbacks", 1.5), ("max_restarts", None), ("max_skips", True)],
)  # fmt: skip
def test_senseless_limits_are_refused(name, value):
    with pytest.raises(ValueError, match=f"LRFallback: {name} must be a"):
        Limits(**{name: value})


def test_state_round_trip():
    first, second = Ladder(Limits()), Ladder(Limits(cut=0.1))
    climb(first, "spike", 5)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.limits.cut == 0.1  # a changed argument counts, a restored count stays
