"""A stack without residual branches has nothing to scale; only what is certain counts."""

import pytest
import torch
from torch import nn

from lightning_norms.anatomy.writers import residual_writers


class Convolutions(nn.Module):
    def __init__(self, skip):
        super().__init__()
        self.first, self.second, self.skip = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), skip

    def forward(self, x):
        self.kept = torch.relu(self.second(torch.relu(self.first(x))))
        return x + self.kept if self.skip else self.kept


class Net(nn.Module):
    def __init__(self, blocks, skip):
        super().__init__()
        self.stem, self.blocks, self.head, self.skip = nn.Conv2d(3, 4, 1), blocks, nn.Conv2d(4, 2, 1), skip

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x) if self.skip else block(x)
        return self.head(x)


class UnreadableNet(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x)


def mlps():
    return [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(15)]


PLAIN = [
    nn.Sequential(*(Convolutions(False) for _ in range(15))),
    nn.Sequential(*mlps()),
    Net(nn.ModuleList(Convolutions(False) for _ in range(15)), skip=False),
    Net(nn.ModuleList(mlps()), skip=False),
    UnreadableNet(nn.Sequential(*mlps()), skip=False),
]
RESIDUAL = [
    nn.Sequential(*(Convolutions(True) for _ in range(15))),
    Net(nn.ModuleList(Convolutions(True) for _ in range(15)), skip=False),
    Net(nn.ModuleList(mlps()), skip=True),
    UnreadableNet(nn.ModuleList(mlps()), skip=True),
]


@pytest.mark.parametrize("net", PLAIN)
def test_a_plain_stack_is_an_error(net):
    with pytest.raises(ValueError, match=r"(?s)blocks of .* have no residual branches.*give pattern=.*15 x"):
        residual_writers(net)
    assert not any(hasattr(block, "kept") for block in net.modules())
    assert len(residual_writers(net, r"(second|\.2)\.weight")) == 15


@pytest.mark.parametrize("net", RESIDUAL)
def test_a_residual_stack_is_none(net):
    assert len(residual_writers(net)) == 15
