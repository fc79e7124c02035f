"""Healthy networks that look at pictures, and those that describe or draw them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.zoo.kinds import Kind, Learner, adam, generator, in_order, loader, slices
from benchmarks.zoo.losses import classes, focal, matching, smoothed, triplets
from benchmarks.zoo.nets import Block, Residual, mlp
from benchmarks.zoo.tasks import pictures


def album(seed: int) -> Any:
    """Batches of pictures and labels."""
    return loader(*pictures(seed), seed=seed)


def plain_cnn(*, norm: bool) -> nn.Sequential:
    """Three convolutions, with or without batch norm, and a linear head."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 16, 2), (16, 32, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1)]
        layers += [nn.BatchNorm2d(after)] if norm else []
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def resnet() -> nn.Sequential:
    """Four residual blocks of two convolutions with batch norm."""

    def branch() -> nn.Module:
        halves = (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        others = (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        return Residual(nn.Sequential(*halves, nn.ReLU(), *others))

    blocks = [layer for _ in range(4) for layer in (branch(), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Patches(nn.Module):
    """Pictures to sixteen tokens of width 32, with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, 32, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, 32))

    @override
    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.cut(images).flatten(2).transpose(1, 2) + self.positions
        return tokens


class MeanHead(nn.Module):
    """Norm, the mean over the tokens, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(tokens).mean(1))
        return logits


class MixerBlock(nn.Module):
    """One MLP over the tokens, one over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.tokens = mlp(16, 32, 16, activation=nn.GELU)
        self.features = mlp(32, 64, 32, activation=nn.GELU)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.norm_2(x))


def vision_transformer() -> nn.Sequential:
    """Three pre-norm blocks over patches."""
    return nn.Sequential(Patches(), *(Block(32, causal=False) for _ in range(3)), MeanHead())


def mixer() -> nn.Sequential:
    """Three MLP-Mixer blocks over patches."""
    return nn.Sequential(Patches(), *(MixerBlock() for _ in range(3)), MeanHead())


def autoencoder() -> nn.Sequential:
    """Pictures through eight numbers and back."""
    return nn.Sequential(nn.Flatten(), *mlp(64, 64, 8), nn.ReLU(), *mlp(8, 64, 64), nn.Unflatten(1, (1, 8, 8)))


def redraw(outputs: Tensor, batch: Any) -> Tensor:
    """Squared error to the picture itself."""
    return F.mse_loss(outputs, batch[0])


class Variational(nn.Module):
    """Pictures to a distribution of four numbers, a sample of it, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 8), mlp(4, 64, 64)

    @override
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_std = self.encoder(images.flatten(1)).chunk(2, -1)
        sample = mean + log_std.exp() * torch.randn_like(mean)
        return self.decoder(sample).view_as(images), mean, log_std


def evidence(outputs: tuple[Tensor, Tensor, Tensor], batch: Any) -> Tensor:
    """Reconstruction error in nats at unit noise, and the distance to the prior."""
    drawn, mean, log_std = outputs
    error = 0.5 * (drawn - batch[0]).square().flatten(1).sum(1)
    distance = 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum(1)
    return (error + distance).mean()


class TwoTowers(nn.Module):
    """A picture and its caption (the class and a random word) to one space."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Flatten(), *mlp(64, 64, 16))
        self.words = nn.Sequential(nn.EmbeddingBag(20, 32), nn.Linear(32, 16))

    @override
    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.picture(pair[0]), self.words(pair[1])


def captioned(seed: int) -> Any:
    """Pictures with captions of two words."""
    images, label = pictures(seed)
    captions = torch.stack([label, 10 + label.roll(1)], 1)
    return in_order([((image, words),) for image, words in slices(images, captions)])


def views(seed: int) -> Any:
    """Two noisy views of each picture."""
    images, _ = pictures(seed, classes=64, noise=0.0)
    noise = [0.5 * torch.randn(images.shape, generator=generator(seed + n)) for n in (1, 2)]
    return in_order([((one, two),) for one, two in slices(images + noise[0], images + noise[1])])


def triples(seed: int) -> Any:
    """Anchor, a picture of its class, one of another."""
    images, label = pictures(seed)
    images = images[torch.argsort(label)]
    order = torch.randperm(len(images), generator=generator(seed))
    parts = (images, images.roll(1, 0), images.roll(len(images) // 2, 0))
    return in_order([(batch,) for batch in slices(*(part[order] for part in parts))])


class SharedEncoder(nn.Module):
    """One network for every view."""

    def __init__(self, outputs: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), *mlp(64, 64, outputs))

    @override
    def forward(self, images: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([self.encoder(image) for image in images])


class Turns(Learner):
    """Two classifiers in one module; a batch uses one of them, and the other has no gradient."""

    @override
    def outputs(self, batch: Any) -> Any:
        return self.network[batch[2]](batch[0])


def towers(every: int) -> Any:
    """Batches of which one in ``every`` belongs to the second tower."""

    def data(seed: int) -> Any:
        batches = slices(*pictures(seed))
        return in_order([(x, y, int(n % every == every - 1)) for n, (x, y) in enumerate(batches)])

    return data


def both() -> nn.ModuleList:
    """A small ViT and a Mixer."""
    return nn.ModuleList([vision_transformer(), mixer()])


KINDS = (
    Kind("CNN", lambda: Learner(plain_cnn(norm=False), classes, adam(3e-3)), album),
    Kind("CNN, batch norm", lambda: Learner(plain_cnn(norm=True), classes), album, tag="buffers"),
    Kind("residual CNN", lambda: Learner(resnet(), classes), album, tag="buffers"),
    Kind("ViT", lambda: Learner(vision_transformer(), classes, adam(2e-3)), album),
    Kind("MLP-Mixer", lambda: Learner(mixer(), classes, adam(2e-3)), album),
    Kind("CNN, label smoothing", lambda: Learner(plain_cnn(norm=True), smoothed), album),
    Kind("CNN, focal loss", lambda: Learner(plain_cnn(norm=True), focal), album),
    Kind("autoencoder", lambda: Learner(autoencoder(), redraw, adam(2e-3)), album),
    Kind(
        "variational autoencoder", lambda: Learner(Variational(), evidence, adam(2e-3)), album, tag="loss of about 40"
    ),
    Kind("CLIP", lambda: Learner(TwoTowers(), matching, adam(2e-3)), captioned, tag="contrastive"),
    Kind("SimCLR", lambda: Learner(SharedEncoder(), matching, adam(2e-3)), views, tag="contrastive"),
    Kind("triplets", lambda: Learner(SharedEncoder(), triplets, adam(2e-3)), triples, tag="loss reaches 0"),
    Kind("two towers in turns", lambda: Turns(both(), classes, adam(2e-3)), towers(2), tag="parts without a gradient"),
    Kind(
        "second tower in one batch of eight",
        lambda: Turns(both(), classes, adam(2e-3)),
        towers(8),
        tag="parts without a gradient",
    ),
)
