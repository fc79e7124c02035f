"""Weights in half precision that a lowered learning rate does not move any more."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.learning_rate import factors_of
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import Learner, what
from tests.stand_ins import trainer

TOO_SMALL = "the lowered learning rate"


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if TOO_SMALL in str(warning.message)]


@pytest.mark.parametrize(("precision", "expected"), [("bf16-true", 1), ("bf16-mixed", 0), ("32-true", 0)])
def test_a_cut_after_which_bfloat16_weights_stand_still_is_said_once(precision, expected, tmp_path):
    fallback = LRFallback(cut=0.001, lowest_factor=1e-4, max_skips=0)
    module = Learner({8: "nan"})
    run = trainer(tmp_path, fallback, max_steps=16, precision=precision)
    sentences = said(lambda: run.fit(module))
    assert what(fallback) == [(8, "non_finite", "rollback")]
    assert len(sentences) == expected
    if expected:
        assert "1e-05, is too small for bfloat16 weights" in sentences[0]
        assert "bf16-mixed" in sentences[0]


def test_a_warmup_that_rises_says_nothing(tmp_path):
    run = trainer(tmp_path, Warmup(LinearWarmup(1000)), max_steps=4, precision="bf16-true")
    sentences = said(lambda: run.fit(Learner()))
    assert sentences == []


def test_a_cut_that_leaves_weights_moving_says_nothing_and_a_deeper_one_is_said_once():
    weight = nn.Parameter(torch.full((64,), 0.02, dtype=torch.bfloat16))
    optimizer, factor = AdamW([weight], lr=1e-2, weight_decay=0.0), [0.5]
    factors_of(optimizer).set("fallback", lambda clock: factor[0])

    def step():
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    assert said(step) == []
    factor[0] = 1e-5
    (sentence,) = said(step)
    assert "0.0% of them moved" in sentence
    assert said(step) == []
    factor[0] = 1e-6
    assert said(step) == []


def test_weights_without_a_gradient_are_not_counted():
    used, idle = (nn.Parameter(torch.full((4096,), 0.02, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = AdamW([used, idle], lr=1e-2)
    factors_of(optimizer).set("fallback", lambda clock: 0.5)
    used.grad, idle.grad = torch.zeros_like(used), torch.zeros_like(idle)
    used.grad[:16] = 1.0
    assert said(optimizer.step) == []
