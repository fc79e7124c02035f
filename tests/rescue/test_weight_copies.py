"""Copies of the weights that people keep by hand are recognised by their shapes, and nothing else is."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_norms.rescue.averages import frozen_twins
from lightning_norms.rescue.snapshot import Snapshot
from lightning_norms.rescue.weight_copies import find_copies
from tests.stand_ins import seeded


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))


class Shadow:
    def __init__(self, tensors):
        self.decay, self.num_updates, self.tensors, self.name = 0.9, 3, tensors, "shadow"


def copies_of(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def in_a_list(module):
    module.kept = copies_of(module)
    return module.kept


def in_an_object(module):
    module.ema = Shadow(copies_of(module))
    return module.ema.tensors


def in_a_dictionary(module):
    module.kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return list(module.kept.values())


def in_a_module_out_of_sight(module):
    teacher = copy.deepcopy(module)
    module.kept = [teacher]
    return [parameter.detach() for parameter in teacher.parameters()]


def in_one_vector(module):
    module.flat = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    return [module.flat]


def weights_only_in_a_tuple(module):
    module.kept = tuple(parameter.detach().clone() for parameter in module.parameters() if parameter.ndim == 2)
    return list(module.kept)


def beside_its_weight(module):
    module[0].shadow_weight = module[0].weight.detach().clone()
    return [module[0].shadow_weight]


FORMS = [
    in_a_list,
    in_an_object,
    in_a_dictionary,
    in_a_module_out_of_sight,
    in_one_vector,
    weights_only_in_a_tuple,
    beside_its_weight,
]


@pytest.mark.parametrize("keep", FORMS, ids=lambda keep: keep.__name__)
@pytest.mark.parametrize("in_callback", [False, True], ids=["module", "callback"])
def test_comes_back_in_place(keep, in_callback):
    if in_callback and keep is beside_its_weight:
        pytest.skip("a callback has no weight beside it")
    module, owner = net(), Callback()
    tensors = keep(module)
    if in_callback:
        name = next(name for name in ("kept", "ema", "flat") if name in vars(module))
        setattr(owner, name, vars(module).pop(name))
    there = [tensor.clone() for tensor in tensors]
    snapshot = Snapshot.take(module, [], owners=[owner])
    for tensor in tensors:
        tensor.add_(1)
    snapshot.restore(module, [], owners=[owner])
    assert all(map(torch.equal, tensors, there))


def test_the_count_of_an_averaging_object_comes_back_and_a_step_of_a_callback_stays():
    module, owner = net(), Callback()
    module.ema, owner.kept, owner.step = Shadow(copies_of(module)), copies_of(module), 5
    snapshot = Snapshot.take(module, [], owners=[owner])
    module.ema.num_updates, owner.step = 9, 6
    snapshot.restore(module, [], owners=[owner])
    assert (module.ema.num_updates, owner.step) == (3, 6)


def test_what_is_no_copy_is_left_alone():
    module = net()
    module.weights = list(module.parameters())  # the weights themselves
    module.memory = torch.zeros(6, 4)  # one tensor that happens to fit
    module.batches = [torch.zeros(6, 4)] * 1000
    module.others = [torch.zeros(4), torch.zeros(6, 4)]  # bias of the second layer before the first matrix
    module.numbers = [torch.zeros(6, 4, dtype=torch.long), torch.zeros(6, dtype=torch.long)]
    module.graph = [2 * parameter for parameter in module.parameters()]
    assert list(find_copies(module, [], dict(module.named_parameters()))) == []


def test_a_frozen_teacher_is_a_twin_and_frozen_layers_are_not():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))})
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.student["layers"][0].requires_grad_(False)

    names = frozen_twins(dict(Pair().named_parameters()))
    assert names == {f"teacher.layers.{layer}.{name}" for layer in (1, 2) for name in ("weight", "bias")}


def test_extra_state_of_a_module_comes_back():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.history = [1.0]

        def get_extra_state(self):
            return self.history

        def set_extra_state(self, state):
            self.history = state

    module = nn.Sequential(Scaled())
    snapshot = Snapshot.take(module, [])
    module[0].history.append(2.0)
    for _ in range(2):
        snapshot.restore(module, [])
        assert module[0].history == [1.0]
        module[0].history.append(3.0)
