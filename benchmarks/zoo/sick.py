"""Sick runs: at a constant's loss after 600 steps, diverged, or trained with a bug that the loss does not show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from benchmarks.zoo.dense import classifier, points, regressor, table
from benchmarks.zoo.kinds import DEAD, Jump, Kind, Learner, adam, generator, loader
from benchmarks.zoo.language import sentences
from benchmarks.zoo.losses import Affine, Weighted, classes, classes_summed, one_hot_bits, squares
from benchmarks.zoo.nets import SYMBOLS, EncoderStack, Transformer, mlp
from benchmarks.zoo.recurrent import Recurrent, series
from benchmarks.zoo.tasks import chain, labels
from benchmarks.zoo.vision import album, plain_cnn


def clean(seed: int) -> Any:
    """Sentences without noise, eight a batch."""
    return loader(*chain(seed, noise=0.0), seed=seed, batch=8)


def post18() -> EncoderStack:
    """Eighteen post-norm blocks from Xavier's init."""
    return EncoderStack(18, xavier=True)


def post_norm(name: str, loss: Any) -> Kind:
    """Post-norm 18 at 6e-3 without warmup (at 3e-3 some seeds come loose after step 500), under a loss."""
    return Kind(f"post-norm 18, {name}", lambda: Learner(post18(), loss, adam(6e-3)), clean, DEAD, "stall by depth")


class Detached(nn.Module):
    """Blocks whose output is detached, so that only the head learns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network.head(self.network.features(tokens).detach())
        return logits


def parity(seed: int) -> Any:
    """Random bits; the label is the parity of the last three."""
    bits = torch.randint(0, 2, (4000, 16), generator=generator(seed))
    target = (bits + bits.roll(1, 1) + bits.roll(2, 1)) % 2
    target[:, :2] = -100
    return loader(bits, target, seed=seed)


def constant(outputs: Tensor, _: Any) -> Tensor:
    """A loss that depends on nothing."""
    return 3.0 + 0.0 * outputs.mean()


class WrongSign(Learner):
    """Maximizes the loss."""

    def __init__(self) -> None:
        super().__init__(classifier(), Affine(classes, -1.0))

    def measure(self) -> tuple[float, float]:
        """Cross-entropy of new data, and that of a guess."""
        batch = labels(7, count=500)
        with torch.no_grad():
            return float(classes(self.network(batch[0]), batch)), 2.303


def deep_cnn() -> nn.Sequential:
    """Thirty convolutions without a norm or a skip path."""
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU()]
    for _ in range(30):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def never_on() -> nn.Sequential:
    """ReLUs that are off for every input."""
    network = classifier()
    nn.init.constant_(network[2].bias, -30.0)
    return network


def only_bias() -> nn.Sequential:
    """Everything is frozen but the bias of the head."""
    network = classifier().requires_grad_(False)
    network[-1].bias.requires_grad_(True)
    return network


def tiny_start() -> nn.Sequential:
    """Eight layers whose weights start ten thousand times too small."""
    network = mlp(16, *[32] * 8, 10, activation=nn.Tanh)
    with torch.no_grad():
        for weight in network.parameters():
            weight *= 1e-4
    return network


class LastState(nn.Module):
    """A plain RNN that answers after the last step."""

    def __init__(self, gain: float, nonlinearity: str) -> None:
        super().__init__()
        self.cell = nn.RNN(4, 24, nonlinearity=nonlinearity, batch_first=True)
        self.head = nn.Linear(24, 4)
        with torch.no_grad():
            self.cell.weight_hh_l0.copy_(gain * torch.eye(24))

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(x)[0][:, -1])
        return logits


def first_symbol(seed: int) -> Any:
    """Forty noisy frames; the label is in the first."""
    rng = generator(seed)
    label = torch.randint(4, (2000,), generator=rng)
    x = torch.randn(2000, 40, 4, generator=rng)
    x[:, 0] = F.one_hot(label, 4).float()
    return loader(x, label, seed=seed)


class Half(nn.Module):
    """Scores that are computed in float16 and are too large for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        squared = (300 * self.body(x)).square().half().float()
        logits: Tensor = self.head(squared / 90000)
        return logits


def shuffled(seed: int) -> Any:
    """Labels that have nothing to do with the inputs, and new ones in every batch."""
    x, y = labels(seed, count=16000)
    return loader(x, y[torch.randperm(len(y), generator=generator(seed + 5))], seed=seed)


def raised(name: str, network: Callable[[], nn.Module], loss: Any, rate: float, data: Any) -> tuple[Kind, ...]:
    """A healthy run whose learning rate is 20 or 300 times as high from step 150 on."""

    def kind(factor: int) -> Kind:
        def build() -> Learner:
            return Learner(network(), loss, adam(rate), partial(LambdaLR, lr_lambda=Jump(factor)))

        return Kind(f"{name}, rate x{factor} from step 150", build, data, DEAD, "divergence")

    return kind(20), kind(300)


def dead(name: str, network: Callable[[], nn.Module], tag: str, data: Any = points, **more: Any) -> Kind:
    """Cross-entropy and Adam at 2e-3, unless another optimizer is given."""
    optimizer = more.pop("optimizer", adam(2e-3))
    loss = more.pop("loss", classes)
    return Kind(name, lambda: Learner(network(), loss, optimizer), data, DEAD, tag, **more)


KINDS = (
    post_norm("cross-entropy", classes),
    post_norm("class weights", Weighted(SYMBOLS)),
    post_norm("binary cross-entropy", one_hot_bits),
    post_norm("loss x0.5", Affine(classes, 0.5)),
    post_norm("loss x0.1", Affine(classes, 0.1)),
    post_norm("loss - 2", Affine(classes, 1.0, -2.0)),
    post_norm("summed", classes_summed),
    dead("post-norm 24, Xavier", lambda: EncoderStack(24, xavier=True), "stall by depth", clean, optimizer=adam(3e-3)),
    dead("pre-norm, rate 1", lambda: Transformer(3), "rate", clean, optimizer=adam(1.0)),
    dead("regression, SGD, rate 3", regressor, "divergence", table, optimizer=partial(SGD, lr=3.0), loss=squares),
    dead("rate 0", classifier, "rate", optimizer=adam(0.0)),
    dead("constant loss", classifier, "no gradient", loss=constant),
    dead("blocks detached", lambda: Detached(Transformer(2, symbols=2)), "no gradient in the blocks", parity),
    dead("30 convolutions without a norm", deep_cnn, "vanishing gradient", album),
    dead("deep sigmoid MLP", lambda: mlp(16, *[32] * 16, 10, activation=nn.Sigmoid), "vanishing gradient"),
    dead("labels shuffled", classifier, "no signal", shuffled),
    dead("ReLUs that are always off", never_on, "no gradient"),
    Kind("wrong sign of the loss", WrongSign, points, DEAD, "loss falls without end"),
    dead("frozen but for the bias of the head", only_bias, "frozen"),
    dead("clipping at 1e-11", classifier, "clipping", trainer=lambda: {"gradient_clip_val": 1e-11}),
    dead("weight decay 10", classifier, "weights shrink", optimizer=adam(1e-2, weight_decay=10.0)),
    dead("rate 1, beta2 0.5", classifier, "rate", optimizer=adam(1.0, betas=(0.9, 0.5))),
    dead("RNN that forgets", lambda: LastState(0.3, "tanh"), "vanishing gradient", first_symbol),
    dead("RNN that explodes", lambda: LastState(1.8, "relu"), "exploding gradient", first_symbol, optimizer=adam(3e-2)),
    dead("float16 overflow", Half, "overflow"),
    dead("weights start 1e-4 too small", tiny_start, "vanishing gradient", optimizer=partial(SGD, lr=0.1)),
    *raised("decoder", lambda: Transformer(3), classes, 2e-2, sentences),
    *raised("MLP", classifier, classes, 2e-2, points),
    *raised("CNN", lambda: plain_cnn(norm=False), classes, 1e-2, album),
    *raised("LSTM", lambda: Recurrent(nn.LSTM), squares, 5e-2, series),
)
