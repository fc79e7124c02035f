"""LBFGS evaluates several losses inside one step: what that means to each callback."""

import re

import pytest
import torch

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.combinations.four import BASE, Naive, assert_rescaled, learner, weights
from tests.stand_ins import trainer


class Watched(torch.optim.LBFGS):
    """Writes down the learning rate of each of its steps."""

    def __init__(self, params, lr=BASE):
        super().__init__(params, lr=lr, max_iter=3)
        self.trace = []

    def step(self, closure):
        self.trace.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def lbfgs():
    module = learner()
    module.make_optimizer = Watched
    return module


def test_warmup_counts_steps_and_the_monitor_evaluations(tmp_path):
    """Four steps of three evaluations: base x 1/4, 2/4, ...; a row for each batch, with the norms of its last one."""
    module, naive = lbfgs(), Naive()
    before, monitor = weights(module), DepthMonitor(every_n_steps=1, table=False, picture=False)
    trainer(tmp_path, naive, ResidualRescale(), Warmup(LinearWarmup(4)), monitor).fit(module)
    assert module.trainer.optimizers[0].trace == pytest.approx([BASE * each / 4 for each in (1, 2, 3, 4)])
    assert_rescaled(before, naive.start)
    assert monitor.state_dict()["counts"] == [12]
    history = monitor.history.state_dict()
    for group in ("block_01", "total"):
        column = history["values"][:, history["columns"].index(f"grad_norm/{group}")]
        assert column.tolist() == pytest.approx([each[group] for each in naive.norms[2::3]], rel=1e-5)


def test_the_fallback_refuses_it(tmp_path):
    sentence = "LRFallback cannot judge LBFGS, which evaluates several losses inside one step."
    module = learner()
    module.make_optimizer = torch.optim.LBFGS
    with pytest.raises(ValueError, match=re.escape(sentence)):
        trainer(tmp_path, LRFallback()).fit(module)
    assert module.losses == []
