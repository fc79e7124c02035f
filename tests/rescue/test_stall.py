"""No gradient at all is absence, not weakness: stacks and blocks that a batch does not use are not sick."""

import random

import pytest

from lightning_norms.measuring.observation import Observation
from lightning_norms.rescue.stall import StallRule

HEALTHY = (1.0,) * 8
ABSENT = (0.0,) * 8
WEAK = (1e-4, *(1.0,) * 7)


def causes(steps, loss=3.0):
    """The steps, each the gradient norms of every stack, at which a stall is named."""
    rule = StallRule()
    return [step for step, stacks in enumerate(steps) if rule.judge(Observation(loss, 1.0, stacks=tuple(stacks)))]


@pytest.mark.parametrize("period", [2, 3, 8])
def test_towers_in_turns_are_healthy(period):
    assert causes([(HEALTHY, ABSENT) if n % period == 0 else (ABSENT, HEALTHY) for n in range(80)]) == []


def test_one_tower_after_the_other_is_healthy():
    assert causes([(HEALTHY, ABSENT)] * 20 + [(ABSENT, HEALTHY)] * 40 + [(HEALTHY, ABSENT)] * 10) == []


def test_a_tower_that_is_used_every_eighth_step_is_named_by_the_fourth_weak_one():
    """Three steps as its start, then four weak ones: its steps are 0, 8, 16, ..."""
    steps = [((WEAK if n > 16 else HEALTHY), ABSENT) if n % 8 == 0 else (ABSENT, HEALTHY) for n in range(60)]
    assert causes(steps) == [48, 56]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_layer_drop_is_healthy(share, seed):
    draw = random.Random(seed)
    steps = [(tuple(0.0 if draw.random() < share else draw.uniform(0.5, 1.5) for _ in range(12)),) for _ in range(300)]
    assert causes(steps) == []


def test_weak_blocks_are_named_beside_dropped_ones():
    draw = random.Random(0)
    steps = [tuple(0.0 if draw.random() < 0.3 else 1.0 for _ in range(12)) for _ in range(20)]
    dying = [(tuple(norm * (1e-3 if n >= 5 and place < 6 else 1.0) for place, norm in enumerate(stack)),) for n, stack in enumerate(steps)]  # noqa: E501  # fmt: skip
    assert causes(dying)[0] in (8, 9, 10)


def test_a_decoder_whose_encoder_joins_later():
    assert causes([(ABSENT, HEALTHY)] * 10 + [(HEALTHY, HEALTHY)] * 10) == []
    joined = [(ABSENT, HEALTHY)] * 10 + [(HEALTHY, HEALTHY)] * 3 + [(WEAK, HEALTHY)] * 5
    assert causes(joined)[0] == 16
