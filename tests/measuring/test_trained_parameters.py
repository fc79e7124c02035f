"""Which parameters an optimizer trains, and when that is looked up again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_norms.measuring.trained_parameters import TrainedParameters


class Counted(nn.Sequential):
    """Counts how often its parameters are listed."""

    walks = 0

    def named_parameters(self, *args, **options):
        self.walks += 1
        return super().named_parameters(*args, **options)


@pytest.fixture
def network():
    return Counted(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))


def names(trained):
    return [name for name, _ in trained.named()]


def test_is_asked_every_step_and_walks_the_network_only_for_names(network):
    optimizer = SGD(nn.Sequential(*network).parameters(), lr=0.1)
    trained = TrainedParameters(network)
    assert [trained.have_changed(optimizer) for _ in range(3)] == [True, False, False]
    assert network.walks == 0
    assert names(trained) == ["0.weight", "0.bias", "1.weight"]
    assert network.walks == 1


def test_freezing_unfreezing_and_another_group_are_changes(network):
    optimizer = SGD(network[0].parameters(), lr=0.1)
    trained = TrainedParameters(network)
    assert trained.have_changed(optimizer)
    assert names(trained) == ["0.weight", "0.bias"]
    network[0].weight.requires_grad_(False)
    assert trained.have_changed(optimizer)
    assert names(trained) == ["0.bias"]
    assert not trained.have_changed(optimizer)
    network[0].weight.requires_grad_(True)
    assert trained.have_changed(optimizer)
    assert names(trained) == ["0.weight", "0.bias"]
    optimizer.add_param_group({"params": [network[1].weight]})
    assert trained.have_changed(optimizer)
    assert names(trained) == ["0.weight", "0.bias", "1.weight"]


def test_another_tensor_in_the_place_of_a_parameter_is_a_change(network):
    optimizer, trained = SGD(network[1].parameters(), lr=0.1), TrainedParameters(network)
    assert trained.have_changed(optimizer)
    network[1].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(1, 3))
    assert trained.have_changed(optimizer)
    assert [parameter for _, parameter in trained.named()] == [network[1].weight]


def test_tied_weights_are_one_and_a_stranger_has_no_name(network):
    network[0], stranger = network[1], nn.Parameter(torch.ones(1))
    trained = TrainedParameters(network)
    assert trained.have_changed(SGD([*network.parameters(), stranger], lr=0.1))
    assert names(trained) == ["0.weight"]
