"""Runs with a known fault: the right word, the cause by its name, and no false sentence."""

import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.zoo.running import make_trainer
from benchmarks.zoo.zoo import ALL
from lightning_norms import diagnose
from lightning_norms.reports.diagnosis.data import Verdict
from tests.diagnosing.test_modules_that_fit import data, trainer

WIDTH = 8


class Stack(LightningModule):
    """Transformer blocks that predict the next token."""

    def __init__(self, blocks=2, loss=F.cross_entropy, rate=1e-2, causal=True, detach=False):
        super().__init__()
        kind = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.body = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, **kind) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        self.loss, self.rate, self.causal, self.detach = loss, rate, causal, detach

    def training_step(self, batch, batch_idx):
        x = self.body(batch[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        x = x.detach() if self.detach else x
        return self.loss(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def names(result):
    return {cause.name for cause in result.causes}


@pytest.mark.parametrize(
    ("options", "cause", "words"),
    [
        ({"rate": 0.0}, "learning rate 0", "the learning rate is 0 in all 30 steps"),
        ({"loss": lambda o, y: 3.0 + 0.0 * o.sum()}, "loss without gradient", "the gradient is exactly 0 in all 30"),
        ({"detach": True}, "blocks cut off", "no block received a gradient in any step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_that_need_no_more_steps_are_named(tmp_path, options, cause, words):
    result = diagnose(seeded(lambda: Stack(**options)), data(), trainer(tmp_path), steps=30)
    assert result.verdict is Verdict.STALLS
    assert cause in names(result)
    assert words in result.trials[0].reason


@pytest.mark.parametrize("causal", [True, False])
def test_a_missing_causal_mask_is_named_and_a_mask_is_not(tmp_path, causal):
    result = diagnose(seeded(lambda: Stack(causal=causal)), data(), trainer(tmp_path), trials=False)
    assert ("no causal mask" in names(result)) == (not causal)
    assert any("causal mask is missing" in line for line in result.summary) == (not causal)


def test_some_copies_among_the_layers_are_counted(tmp_path):
    module = seeded(lambda: Stack(5))
    module.layers[3].load_state_dict(module.layers[1].state_dict())
    result = diagnose(module, data(), trainer(tmp_path), trials=False)
    (cause,) = [cause for cause in result.causes if cause.name == "identical blocks"]
    assert cause.sentence.startswith("2 of 5 blocks start with identical weights")


def test_thirty_convolutions_without_a_norm(tmp_path):
    class Pictures(Stack):
        def __init__(self):
            super().__init__(0)
            self.body = nn.Conv2d(1, 8, 3, padding=1)
            self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(30))
            self.head = nn.Linear(8 * 16, 8)

        def training_step(self, batch, batch_idx):
            x = self.body(batch)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x.flatten(1)), (4 * batch.mean((1, 2, 3)) + 4).long().clamp(0, 7))

    pictures = torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    result = diagnose(seeded(Pictures), DataLoader(pictures, batch_size=8), trainer(tmp_path), steps=30)
    assert result.verdict is Verdict.STALLS
    assert "no gradient from the start" in names(result)
    text = " ".join(result.summary)
    assert not re.search(r"\b[Nn]orm", text)  # no norm is spoken of where there is none
    assert not any("norm" in claim.popular for claim in result.claims)


def test_a_small_loss_keeps_its_digits_and_the_eps_of_the_norms_is_printed(tmp_path):
    module = seeded(lambda: Stack(loss=lambda o, y: 1e-4 * F.cross_entropy(o, y)))
    text = " ".join(diagnose(module, data(), trainer(tmp_path), trials=False).summary)
    assert "The first loss is 0.0002" in text
    assert "ln 8" not in text  # uniform predictions do not cost that under this loss
    assert "4 LayerNorm with eps 1e-05" in text


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shift", [-2.0, 0.0])
def test_the_verdict_does_not_depend_on_scale_and_shift_of_the_loss(tmp_path, scale, shift):
    def loss(outputs, target):
        return scale * (F.cross_entropy(outputs, target) + shift)

    rows = torch.arange(8).repeat(8, 1)
    tokens = (rows + torch.arange(8)[:, None]) % 8
    module = seeded(lambda: Stack(1, loss))
    result = diagnose(module, DataLoader(tokens.repeat(4, 1), batch_size=8), trainer(tmp_path), steps=30)
    assert result.verdict is Verdict.TRAINS, result.summary
    assert result.look.constant_loss == pytest.approx(scale * (2.079 + shift), rel=0.05)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("regression, SGD, rate 3", Verdict.NON_FINITE),  # NaN within steps of a spike
        ("wrong sign of the loss", Verdict.DIVERGES),  # it falls without end
    ],
)
def test_dead_kinds_of_the_zoo_are_not_called_healthy_or_undecided(name, verdict, tmp_path):
    (kind,) = [kind for kind in ALL if kind.name == name]
    result = diagnose(*kind.build(0), make_trainer(kind, 600, tmp_path), steps=30)
    assert result.verdict is verdict
