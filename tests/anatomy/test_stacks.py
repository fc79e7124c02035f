"""Blocks that share weights, stages, and what else stands around a stack."""

import pytest
from torch import nn

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.stacks import find_stacks
from tests.stand_ins import Block


def test_one_block_at_twelve_depths_is_one_group_of_twelve_layers():
    shared = Block(4)
    net = nn.Sequential()
    net.layers = nn.ModuleList([shared] * 12)
    (stack,) = find_stacks(net)
    assert (len(stack.blocks), stack.layers) == (1, 12)
    assert DepthMap.of(net).groups == ("block_00",)
    assert "run as 12 layers" in describe(net)


def test_blocks_shared_in_turn_stand_at_their_lowest_depth():
    first, second = Block(4), Block(4)
    net = nn.Sequential()
    net.layers = nn.ModuleList([first, second, first, second])
    (stack,) = find_stacks(net)
    assert [block.index for block in stack.blocks] == [0, 1]
    assert stack.layers == 4
    assert DepthMap.of(net).groups == ("block_00", "block_01")


@pytest.mark.parametrize("depths", [(2, 3), (1, 1, 2)])
def test_stages_are_counted_through(depths):
    net = nn.Sequential()
    net.stages = nn.ModuleList()
    for depth in depths:
        stage = nn.Module()
        stage.blocks = nn.ModuleList(Block(4) for _ in range(depth))
        stage.merge = nn.Linear(4, 4)
        net.stages.append(stage)
    depth = DepthMap.of(net)
    assert depth.groups == (*(f"block_{i:02d}" for i in range(sum(depths))), "other")
    assert depth.group_of(f"stages.1.blocks.{depths[1] - 1}.norm_1.weight") == f"block_{depths[0] + depths[1] - 1:02d}"
    assert depth.group_of("stages.0.merge.weight") == "other"


def test_experts_in_a_block_are_no_stages():
    block = Block(4)
    block.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(5))
    net = nn.Sequential()
    net.layers = nn.ModuleList([block, Block(4)])
    assert [stack.path for stack in find_stacks(net)] == ["layers"]
