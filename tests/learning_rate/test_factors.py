"""Factors on a bare torch optimizer: on only while it steps, whatever else happens to it meanwhile."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, lr_scheduler

from lightning_norms.learning_rate import HideFactors, effective_learning_rates, factors_of


def make(kind=SGD, groups=2, **options):
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)]
    for group in groups:
        group["params"][0].grad = torch.ones(1)
    return kind(groups, **{"lr": 0.1, **options})


class Recording(SGD):
    """Writes down the learning rates that its update uses; may do more with them."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.inside = []

    def step(self, closure=None):
        if closure is not None:
            closure()
        self.inside.append(rates(self))
        super().step()


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def half(step):
    return 0.5


def test_one_for_each_optimizer_whoever_asks():
    optimizer, other = make(), make()
    assert factors_of(optimizer) is factors_of(optimizer)
    assert factors_of(optimizer) is not factors_of(other)
    from lightning.pytorch.core.optimizer import LightningOptimizer

    assert factors_of(LightningOptimizer(optimizer)) is factors_of(optimizer)


def test_an_optimizer_with_an_inner_one_is_not_mistaken_for_lightnings_wrapper():
    class Lookahead(SGD):
        pass

    optimizer = make(Lookahead)
    optimizer._optimizer = make()
    assert factors_of(optimizer) is not factors_of(optimizer._optimizer)


def test_on_in_the_step_and_off_after_it():
    optimizer = make(Recording)
    inside, closures = optimizer.inside, []
    before = rates(optimizer)
    factors = factors_of(optimizer)
    factors.set("warmup", lambda step: (step + 1) / 4)
    factors.set("fallback", half)
    assert factors.used() == []
    optimizer.step(lambda: closures.append(rates(optimizer)))
    optimizer.step(closure=lambda: closures.append(rates(optimizer)))
    assert inside == [[0.1 * 0.125] * 2, [0.1 * 0.25] * 2]
    assert closures == [before, before]
    assert all(now is then for now, then in zip(rates(optimizer), before, strict=True))
    assert factors.used() == inside[-1]
    assert factors.clock == factors.taken == 2
    weight = optimizer.param_groups[0]["params"][0].item()
    assert weight == pytest.approx(1 - 0.1 * 0.375)


def test_removal_takes_the_hooks_off_with_the_last_factor():
    optimizer = make(Recording)
    factors = factors_of(optimizer)
    factors.set("warmup", half)
    factors.set("fallback", half)
    factors.remove("warmup")
    factors.remove("never there")
    assert factors_of(optimizer) is factors
    optimizer.step()
    factors.remove("fallback")
    optimizer.step()
    assert optimizer.inside == [[0.05] * 2, [0.1] * 2]
    hooks = [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    assert len(hooks) >= 4
    assert not any(hooks)


def test_factor_changed_within_the_step_counts_for_it():
    optimizer = make(Recording)
    factors = factors_of(optimizer)
    now = [1.0]
    factors.set("warmup", lambda step: 1.0)

    def closure():
        factors.set("fallback", lambda step: now[0])
        now[0] = 0.25
        factors.refresh()
        assert rates(optimizer) == [0.1, 0.1]

    optimizer.step(closure)
    assert factors.used() == [0.025, 0.025] == optimizer.inside[0]
    factors.show()
    now[0] = 0.5
    factors.refresh()
    assert rates(optimizer) == [0.05, 0.05]
    factors.hide()
    factors.set("fallback", half)  # between steps nothing may show
    factors.refresh()
    assert rates(optimizer) == [0.1, 0.1]


def test_clock_may_start_afresh_and_taken_does_not():
    optimizer = make()
    factors = factors_of(optimizer)
    factors.set("warmup", lambda step: (step + 1) / 4)
    for _ in range(3):
        optimizer.step()
    factors.clock = 0
    optimizer.step()
    assert factors.used() == [0.025] * 2
    assert (factors.clock, factors.taken) == (1, 4)


def test_exception_is_healed_by_the_next_step_or_hide():
    optimizer = make(Recording)
    factors = factors_of(optimizer)
    factors.set("warmup", half)

    def fail():
        raise RuntimeError

    for _ in range(3):
        with pytest.raises(RuntimeError):
            optimizer.step(fail)
    optimizer.step()
    assert optimizer.inside == [[0.05, 0.05]]
    assert rates(optimizer) == [0.1, 0.1]
    assert factors.taken == 1
    with pytest.raises(RuntimeError):
        optimizer.step(fail)
    factors.hide()
    assert rates(optimizer) == [0.1, 0.1]
    factors.set("fallback", half)
    assert rates(optimizer) == [0.1, 0.1]


def test_show_and_hide():
    optimizer = make(Recording)
    before = rates(optimizer)
    factors = factors_of(optimizer)
    factors.set("warmup", half)
    factors.show()
    factors.show()
    assert rates(optimizer) == [0.05, 0.05]
    optimizer.step()
    assert optimizer.inside == [[0.05, 0.05]]
    factors.show()
    HideFactors().on_train_batch_start(SimpleNamespace(optimizers=[optimizer, make()]), None, None, 0)
    assert all(now is then for now, then in zip(rates(optimizer), before, strict=True))


def test_a_rate_that_user_code_writes_in_between_stays():
    optimizer = make()
    factors = factors_of(optimizer)
    factors.set("warmup", half)
    factors.show()
    optimizer.param_groups[0]["lr"] = 0.7
    factors.hide()
    assert rates(optimizer) == [0.7, 0.1]
    optimizer.step()
    assert factors.used() == [0.35, 0.05]


def test_factor_one_does_not_even_change_the_object():
    optimizer = make(Recording)
    factors_of(optimizer).set("warmup", lambda step: 1.0)
    before = rates(optimizer)
    optimizer.step()
    assert all(now is then for now, then in zip(optimizer.inside[0], before, strict=True))


def test_a_group_that_is_added_later():
    optimizer = make()
    factors = factors_of(optimizer)
    factors.set("warmup", half)
    optimizer.step(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.3}))
    assert rates(optimizer) == [0.1, 0.1, 0.3]
    assert factors.used() == [0.05, 0.05, 0.15]


def test_state_dict_taken_inside_the_step_is_clean():
    optimizer = make(AdamW)
    factors_of(optimizer).set("warmup", half)
    states = []
    optimizer.step(lambda: states.append(copy.deepcopy(optimizer.state_dict())))
    factors_of(optimizer).show()
    states.append(optimizer.state_dict())
    assert rates(optimizer) == [0.05, 0.05]
    assert [group["lr"] for state in states for group in state["param_groups"]] == [0.1] * 4


@pytest.mark.parametrize("inside", [True, False])
def test_load_state_dict_never_brings_an_old_rate_back(inside):
    optimizer = make(AdamW)
    saved = copy.deepcopy(optimizer.state_dict())
    factors = factors_of(optimizer)
    factors.set("fallback", half)
    for group in optimizer.param_groups:
        group["lr"] = 0.08
    if inside:
        optimizer.step(lambda: optimizer.load_state_dict(saved))
        assert factors.used() == [0.05, 0.05]
    else:
        optimizer.load_state_dict(saved)
    assert rates(optimizer) == [0.1, 0.1]
    factors.set("fallback", lambda step: 0.25)  # a second fallback multiplies again
    optimizer.step()
    assert factors.used() == [0.025, 0.025]


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD])
def test_a_subclass_that_calls_its_parents_step_counts_once(kind):
    make(kind).step()  # from now on the parent's step() has hooks of its own

    class Child(kind):
        def step(self, closure=None):
            return super().step(closure)

    optimizer = make(Child)
    factors = factors_of(optimizer)
    factors.set("warmup", lambda step: (step + 1) / 4)
    for _ in range(3):
        optimizer.step()
    assert factors.used() == pytest.approx([0.075] * 2)
    assert factors.clock == factors.taken == 3


def test_tensor_rate_is_not_touched_in_place_nor_shared():
    rate = torch.tensor(0.1)
    optimizer = make(AdamW, lr=rate, foreach=False)
    factors = factors_of(optimizer)
    factors.set("warmup", lambda step: (step + 1) / 4)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    used = []
    for _ in range(4):
        before = rates(optimizer)
        optimizer.step()
        assert all(now is then for now, then in zip(rates(optimizer), before, strict=True))
        scheduler.step()  # fills the tensors in place
        used.append(factors.used()[0])
    assert used == pytest.approx([0.1 * 0.5**k * (k + 1) / 4 for k in range(4)], rel=1e-6)


def test_used_is_no_view_of_a_tensor_that_a_scheduler_fills():
    optimizer = make(AdamW, lr=torch.tensor(0.1), foreach=False)
    factors = factors_of(optimizer)
    factors.set("warmup", lambda step: 1.0)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert factors.used() == pytest.approx([0.1] * 2)


def test_lbfgs_counts_one_step():
    optimizer = make(LBFGS, groups=1, max_iter=5)
    weight = optimizer.param_groups[0]["params"][0]
    factors = factors_of(optimizer)
    factors.set("warmup", half)

    def closure():
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert factors.taken == 1
    assert factors.used() == [0.05]


def test_optimizer_is_not_kept_alive():
    optimizer = make()
    factors_of(optimizer).set("warmup", half)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_what_cannot_be_scaled_is_refused():
    with pytest.raises(TypeError, match=r"needs a torch.optim.Optimizer with step hooks; got dict"):
        factors_of({})
    optimizer = make()
    optimizer.param_groups[1]["lr"] = None
    with pytest.raises(TypeError, match=r"group 1 of SGD has lr=None"):
        factors_of(optimizer)


def test_names():
    one, two = make(groups=2), make(groups=1)
    for optimizer in (one, two):
        factors_of(optimizer).set("warmup", half)
        optimizer.step()
    assert effective_learning_rates([one]) == {"learning_rate/effective/0": 0.05, "learning_rate/effective/1": 0.05}
    assert list(effective_learning_rates([one, two])) == [
        "learning_rate/effective/optimizer0/0",
        "learning_rate/effective/optimizer0/1",
        "learning_rate/effective/optimizer1/0",
    ]
    for group, name in zip(one.param_groups, ("decay", "no_decay"), strict=True):
        group["name"] = name
    assert list(effective_learning_rates([one])) == [
        "learning_rate/effective/decay",
        "learning_rate/effective/no_decay",
    ]
    one.param_groups[1]["name"] = "decay"
    assert list(effective_learning_rates([one])) == ["learning_rate/effective/0", "learning_rate/effective/1"]
