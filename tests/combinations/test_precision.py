"""Every precision: the same learning rates and event, true norms, the rescale once, and no trace of the monitor."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.callbacks.fallback_runs import Watch, assert_same, what
from tests.combinations.four import assert_norms, assert_rates, assert_rescaled, learner, run, warm, weights


def scaled():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024))]}


PRECISIONS = {
    "32": (dict, torch.float32),
    "bf16-mixed": (lambda: {"precision": "bf16-mixed"}, torch.float32),
    "bf16-true": (lambda: {"precision": "bf16-true"}, torch.bfloat16),
    "16-mixed": (scaled, torch.float32),
    "64-true": (lambda: {"precision": "64-true"}, torch.float64),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_four_in_every_precision(precision, tmp_path):
    """A loss that jumps at step 20: back to the snapshot of step 18 bit for bit, and half the learning rate after."""
    options, dtype = PRECISIONS[precision]
    module, watch = learner({20: "huge"}), Watch(18, 20)
    before = weights(module)
    four = run(tmp_path, module, watch, **options())
    assert_rescaled(before, four.naive.start, dtype=dtype)
    assert what(four.fallback) == [(20, "divergence", "rollback")]
    assert_same(watch.before[18], watch.after[20])
    assert_rates(module.trainer.optimizers[0].trace, [warm(step, cut_at=20) for step in range(23)])
    assert_norms(four.monitor, four.naive.norms)
    assert all(p.dtype == dtype for p in module.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_monitor_leaves_no_trace_in_any_precision(precision, tmp_path):
    """Weights after 24 steps, the rollback included, are equal bit for bit with and without it."""
    modules = []
    for monitored in (True, False):
        modules.append(learner({20: "huge"}))
        run(tmp_path, modules[-1], monitored=monitored, **PRECISIONS[precision][0]())
    assert_same(weights(modules[0]), weights(modules[1]))
