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


def names(network, norms):
    return [name for name, p in network.named_parameters() if any(p is measured for measured in norms.parameters)]


def test_is_asked_every_step_and_walks_the_network_only_for_changes(network):
    optimizer = SGD(nn.Sequential(*network).parameters(), lr=0.1)
    trained = TrainedParameters(network)
    network.walks = 0
    norms = [trained.norms(optimizer) for _ in range(3)]
    assert network.walks == 1
    assert norms[0] is norms[1] is norms[2]
    assert names(network, norms[0]) == ["0.weight", "0.bias", "1.weight"]


def test_freezing_unfreezing_and_another_group_are_changes(network):
    optimizer = SGD(network[0].parameters(), lr=0.1)
    trained = TrainedParameters(network)
    assert names(network, trained.norms(optimizer)) == ["0.weight", "0.bias"]
    network[0].weight.requires_grad_(False)
    frozen = trained.norms(optimizer)
    assert names(network, frozen) == ["0.bias"]
    assert trained.norms(optimizer) is frozen
    network[0].weight.requires_grad_(True)
    assert names(network, trained.norms(optimizer)) == ["0.weight", "0.bias"]
    optimizer.add_param_group({"params": [network[1].weight]})
    assert names(network, trained.norms(optimizer)) == ["0.weight", "0.bias", "1.weight"]


def test_another_tensor_in_the_place_of_a_parameter_is_a_change(network):
    optimizer, trained = SGD(network[1].parameters(), lr=0.1), TrainedParameters(network)
    trained.norms(optimizer)
    network[1].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(1, 3))
    assert trained.norms(optimizer).parameters == [network[1].weight]


def test_tied_weights_are_one_and_a_stranger_has_no_name(network):
    network[0], stranger = network[1], nn.Parameter(torch.ones(1))
    norms = TrainedParameters(network).norms(SGD([*network.parameters(), stranger], lr=0.1))
    assert [id(parameter) for parameter in norms.parameters] == [id(network[0].weight)]


def out_of_order():
    network = nn.Module()
    network.ln_f = nn.LayerNorm(4)
    network.head = nn.Linear(4, 5)
    network.h = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2))
    network.tokens = nn.Embedding(5, 4)
    return network


def test_groups_stand_in_depth_order_whatever_the_order_in_which_they_were_registered():
    network = out_of_order()
    norms = TrainedParameters(network).norms(SGD(network.parameters(), lr=0.1))
    assert norms.groups == ("embedding", "block_00", "block_01", "final_norm", "head")
    assert norms.parameters[0] is network.tokens.weight


def test_a_parameter_that_was_added_later_is_measured_as_other():
    network = out_of_order()
    trained = TrainedParameters(network)
    network.late = nn.Parameter(torch.ones(2))
    norms = trained.norms(SGD(network.parameters(), lr=0.1))
    assert norms.groups[-1] == "other"
    assert norms.parameters[-1] is network.late
