"""The learning rates that the optimizer uses after a rollback, a restart, and while the factor climbs back."""

import pytest
import torch

from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import Faulty, fit, what
from tests.callbacks.test_warmup import SCHEDULERS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*", "ignore:Warmup takes .* optimizer steps, but"
)


def rates(folder, scheduler, bad, *callbacks, accumulate=1, steps=14, **options):
    module = Faulty(SCHEDULERS[scheduler], accumulate)
    module.bad = bad
    fallback = LRFallback(max_skips=0, **options)
    fit(folder, module, *callbacks, fallback=fallback, steps=steps, accumulate_grad_batches=accumulate)
    return module.optimizer.trace, fallback


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_cut_holds_under_any_scheduler(scheduler, accumulate, tmp_path):
    """Case 23: from the rollback at step 6 on, every rate of both groups is half of the planned one; then a quarter."""
    plan, _ = rates(tmp_path, scheduler, (), accumulate=accumulate)
    trace, fallback = rates(tmp_path, scheduler, (6, 10), accumulate=accumulate)
    assert what(fallback) == [(6, "non_finite", "rollback"), (10, "non_finite", "rollback")]
    cuts = [1.0] * 6 + [0.5] * 4 + [0.25] * 4  # the skipped steps show the cut too
    expected = [[rate * cut for rate in planned] for planned, cut in zip(plan, cuts, strict=True)]
    torch.testing.assert_close(torch.tensor(trace).double(), torch.tensor(expected).double(), rtol=1e-12, atol=0)


def test_halved_at_step_four_of_a_ten_step_warmup(tmp_path):
    """Case 23: the skipped step is no step of the warmup."""
    trace, _ = rates(tmp_path, "none", (4,), Warmup(LinearWarmup(10)), steps=11)
    expected = [0.1, 0.2, 0.3, 0.4, 0.25, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
    assert [groups[0] / 0.1 for groups in trace] == pytest.approx(expected, rel=1e-12)


def test_two_fallbacks_are_a_quarter_down_to_the_floor(tmp_path):
    """Case 24: 1e-3 becomes 5e-4, then 2.5e-4; a third would be below the floor and stops."""
    trace, _ = rates(tmp_path, "none", (4, 8), lowest_factor=0.2)
    assert [trace[step][0] / 0.1 for step in (3, 5, 9)] == pytest.approx([1, 0.5, 0.25], rel=1e-12)
    with pytest.raises(FallbackExhaustedError):
        rates(tmp_path, "none", (4, 8, 12), lowest_factor=0.2)


@pytest.mark.parametrize("warmed_up", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_restart_climbs_anew_on_top_of_any_scheduler(scheduler, warmed_up, tmp_path):
    """The trace is plan x cut x ramp, from 1/4 of it on and never 0; a step that is skipped does not climb."""
    plan, _ = rates(tmp_path, scheduler, ())
    callbacks = [Warmup(LinearWarmup(4))] if warmed_up else []
    trace, fallback = rates(tmp_path, scheduler, (6, 8), *callbacks, max_rollbacks=0, restart_warmup_steps=4, cut=0.3)
    assert [action for *_, action in what(fallback)] == ["restart"] * 2
    warmup = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0] if warmed_up else [1.0] * 6
    factors = [*warmup, None, 0.3 * 0.25, None, *(0.09 * ramp for ramp in (0.25, 0.5, 0.75, 1.0, 1.0))]
    for step, factor in enumerate(factors):
        if factor is not None:
            assert trace[step] == pytest.approx([factor * rate for rate in plan[step]], rel=1e-12)


def test_a_step_that_is_skipped_in_the_ramp_does_not_climb(tmp_path):
    """Step 6 is skipped, 7 restarts, 8 has 1/4, 9 is skipped, 10 has 2/4."""
    module, fallback = Faulty(), LRFallback(max_skips=1, max_rollbacks=0, restart_warmup_steps=4)
    module.bad = (6, 7, 9)
    fit(tmp_path, module, fallback=fallback, steps=14)
    assert [action for *_, action in what(fallback)] == ["skip", "restart", "skip"]
    used = [groups[0] / 0.1 for step, groups in enumerate(module.optimizer.trace) if step not in module.bad]
    assert used == pytest.approx([1] * 6 + [0.125, 0.25, 0.375, 0.5, 0.5], rel=1e-12)


def test_the_factor_climbs_back_in_a_straight_line(tmp_path):
    """Half at step 4; 4 quiet steps later it is 1 again."""
    trace, fallback = rates(tmp_path, "none", (4,), recovery_steps=4)
    assert [groups[0] / 0.1 for groups in trace[4:]] == pytest.approx(
        [0.5, 0.625, 0.75, 0.875, 1, 1, 1, 1, 1, 1], rel=1e-12
    )
    assert fallback.rescue.ladder.factor == 1.0
