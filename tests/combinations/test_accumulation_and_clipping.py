"""Accumulation and clipping: steps are optimizer steps, norms are those of the whole window and before clipping."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_norms.callbacks.lr_fallback import LRFallback
from tests.callbacks.fallback_runs import Watch, assert_same, what
from tests.combinations.four import assert_norms, assert_rates, learner, run, warm, weights

JUMP = [(20, "divergence", "rollback")]


def taken(module):
    return module.trainer.optimizers[0]


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}], ids=["no clipping", "by norm", "by value"])  # noqa: E501  # fmt: skip
@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_four(accumulate, clip, tmp_path):
    """The same event at the same optimizer step, the closed form of the learning rate, and norms before clipping."""
    module, watch = learner({20: "huge"}), Watch(18, 20)
    four = run(tmp_path, module, watch, accumulate_grad_batches=accumulate, **clip)
    assert what(four.fallback) == JUMP
    assert_same(watch.before[18], watch.after[20])
    assert_rates(taken(module).trace, [warm(step, cut_at=20) for step in range(23)])
    assert_norms(four.monitor, four.naive.norms)
    raw, used = [norms["total"] for norms in four.naive.norms], taken(module).sizes
    raw = [norm for step, norm in enumerate(raw) if step != 20]
    if not clip:
        assert used == pytest.approx(raw, rel=1e-6)
    elif "gradient_clip_algorithm" in clip:
        assert max(taken(module).largest) == pytest.approx(0.001)
        assert min(raw) > max(used)
    else:
        assert used == pytest.approx([min(norm, 0.05) for norm in raw], rel=1e-4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_monitor_leaves_no_trace(accumulate, tmp_path):
    modules = [learner({20: "huge"}) for _ in range(2)]
    for module, monitored in zip(modules, (True, False), strict=True):
        run(tmp_path, module, monitored=monitored, accumulate_grad_batches=accumulate, gradient_clip_val=0.05)
    assert_same(weights(modules[0]), weights(modules[1]))


def test_an_accumulation_that_changes_in_mid_run(tmp_path):
    """Case 27: 16 batches an epoch, four a step in the first epoch and one after it: steps 0-3, then 4, 5, ...

    No event although the loss that Lightning hands over goes up fourfold, the warmup goes on step by step, and every
    norm is that of its own window.
    """
    module = learner()
    four = run(tmp_path, module, before=[GradientAccumulationScheduler({0: 4, 1: 1})], max_steps=20)
    assert len(module.losses) == 16 + 16
    assert what(four.fallback) == []
    assert four.fallback.rescue.state.steps == 20
    assert_rates(taken(module).trace, [warm(step) for step in range(20)])
    assert_norms(four.monitor, four.naive.norms)


def test_a_bad_micro_batch_is_one_step_for_all_four(tmp_path):
    """NaN in the window of step 5: one skip, of which the warmup does not count the step, and the monitor shows it."""
    module = learner({5: "nan"})
    fallback = LRFallback(snapshot_every_n_steps=6)
    four = run(tmp_path, module, fallback=fallback, accumulate_grad_batches=3, max_steps=12)
    assert what(fallback) == [(5, "non_finite", "skip")]
    assert_rates(taken(module).trace, [warm(step) for step in range(11)])
    assert four.warmup.state_dict() == {"steps": [11]}
    totals = four.monitor.history.state_dict()
    column = totals["values"][:, totals["columns"].index("grad_norm/total")]
    assert torch.isnan(column).nonzero().flatten().tolist() == [5]
