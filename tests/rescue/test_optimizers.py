"""A skip changes nothing and everything goes back, whatever the optimizer keeps and wherever it keeps it."""

import pytest
import torch
from torch import nn

from benchmarks.optimizers import CHECKS, OPTIMIZERS, Lookahead, Sharp, TwoStepSAM, check
from lightning_norms.rescue.optimizer_parts import (
    counters,
    moves_within_step,
    train_mode,
    unreachable_state,
    with_inner,
)
from lightning_norms.rescue.snapshot import Snapshot

REFUSED = {
    "SAM, closure": "cannot judge TwoStepSAM",
    "SAM under another name": "cannot judge Sharp",
    "torch LBFGS": "cannot judge LBFGS",
    "pytorch_optimizer Lookahead of AdamW": "step hooks",
}
FAST = ("schedulefree AdamW", "8-bit moments, counts in groups", "Lookahead by hand, a list", *REFUSED)
kinds = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in OPTIMIZERS]


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.filterwarnings("ignore")
def test_equal_bit_for_bit_or_one_sentence(kind):
    answers = check(OPTIMIZERS[kind])
    if kind in REFUSED:
        assert all(REFUSED[kind] in answer for answer in answers.values()), answers
    else:
        assert answers == dict.fromkeys(CHECKS, "equal")


def test_wrapped_optimizers_in_any_attribute_are_seen_once():
    parameters = [nn.Parameter(torch.zeros(2))]
    outer, inner, other = (torch.optim.SGD(parameters, lr=0.1) for _ in range(3))
    outer.parts, inner.twin, other.outer = [inner, inner], other, outer
    assert with_inner([outer, other]) == [outer, inner, other]


def test_counters_are_what_an_optimizer_keeps_and_not_what_people_set():
    optimizer = Lookahead([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.param_groups[0].update(k=3, weight_sum=torch.tensor(2.0), momentum=0.9, note="text")
    optimizer.trace = [0.1, 0.1]  # a history for people
    assert {(group, name) for group, name, _ in counters(optimizer) if name not in optimizer.optimizer.defaults} == {
        ("0", "k"),
        ("0", "weight_sum"),
        ("", "calls"),
        ("", "slow"),
    }
    assert list(counters(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))) == []


def test_sharpness_aware_ones_are_known_by_class_or_by_their_two_steps():
    parameters = [nn.Parameter(torch.zeros(2))]
    assert moves_within_step(TwoStepSAM(parameters, lr=0.1))
    assert moves_within_step(Sharp(parameters, lr=0.1))  # its base has the name
    assert not moves_within_step(Lookahead(parameters, lr=0.1))


def test_modes_are_those_of_schedule_free_optimizers_only():
    import schedulefree

    optimizer = schedulefree.SGDScheduleFree([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.train()
    assert train_mode(optimizer) is True
    optimizer.eval()
    assert train_mode(optimizer) is False
    assert train_mode(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)) is None


def test_state_that_only_the_optimizer_reaches_is_named():
    hidden = {"moment": torch.ones(2)}

    class Hiding(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "hidden": hidden}

    optimizer = Hiding([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert unreachable_state(optimizer, []) == ["hidden"]
    assert unreachable_state(optimizer, [hidden]) == []


def test_a_cache_by_parameter_comes_back_empty_and_filled_under_the_same_keys():
    """As SaRA keeps the indices of its masks."""

    class Caching(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.cache = {}

    module = nn.Linear(2, 2)
    optimizer = Caching(module.parameters())
    start = Snapshot.take(module, [optimizer])
    optimizer.cache[module.weight] = torch.ones(2)
    later = Snapshot.take(module, [optimizer])
    optimizer.cache = {module.weight: torch.zeros(2), module.bias: torch.zeros(2)}
    later.restore(module, [optimizer])
    (key,) = optimizer.cache
    assert key is module.weight
    assert optimizer.cache[module.weight].tolist() == [1.0, 1.0]
    start.restore(module, [optimizer])
    assert optimizer.cache == {}
