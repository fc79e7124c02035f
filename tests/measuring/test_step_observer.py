"""One optimizer step in numbers, without a Trainer."""

import math
from types import SimpleNamespace

import pytest
import torch

from lightning_norms.measuring import step_observer
from lightning_norms.measuring.step_observer import StepObserver
from tests.stand_ins import Module, seeded

TRAINER = SimpleNamespace(
    world_size=1, accumulate_grad_batches=1, precision_plugin=None, strategy=SimpleNamespace(model=None)
)


def observe(fill, losses=(2.0,)):
    """The observation of a step for which ``fill`` has set the gradients."""
    module = seeded(Module)
    fill(module.decoder)
    observer = StepObserver(module)
    for loss in losses:
        observer.add_loss(TRAINER, torch.tensor(loss), automatic=True)
    return observer.observe(TRAINER, module.configure_optimizers())


def every_gradient(value):
    def fill(decoder):
        for parameter in decoder.parameters():
            parameter.grad = torch.full_like(parameter, value)

    return fill


@pytest.mark.parametrize("size", [1e20, 1.0, 1e-24])
def test_a_gradient_of_any_size_has_its_norm(size):
    count = sum(parameter.numel() for parameter in seeded(Module).parameters())
    observation = observe(every_gradient(size))
    assert observation.grad_norm == pytest.approx(size * math.sqrt(count), rel=1e-5)
    assert observation.non_finite == 0
    assert all(0 < norm < math.inf for norm in observation.stacks[0])


def test_the_second_look_is_only_for_what_float32_cannot_hold(monkeypatch):
    looks = []
    measure = step_observer.GroupNorms.wide_shares
    monkeypatch.setattr(step_observer.GroupNorms, "wide_shares", lambda *given: looks.append(given) or measure(*given))
    for size in (1e15, 1.0, 1e-15, math.nan):
        observe(every_gradient(size))
    assert looks == []
    assert math.isinf(observe(every_gradient(math.inf)).grad_norm)
    assert len(looks) == 1


def test_no_gradient_at_all_is_nothing():
    assert observe(lambda decoder: None).grad_norm == 0.0
    assert observe(every_gradient(0.0)).grad_norm == 0.0
