"""The tasks: token chains, teacher networks, small pictures. A seed draws samples; the task itself stays."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.zoo.kinds import TEACHER, generator
from benchmarks.zoo.nets import LENGTH, SYMBOLS

COUNT = 4000


def chain(
    seed: int, *, noise: float = 0.1, count: int = COUNT, length: int = LENGTH, step: tuple[int, int] = (5, 3)
) -> tuple[Tensor, Tensor]:
    """Sequences x -> (5x + 3) mod 32 with random tokens among them: inputs and next tokens ``[count, length]``."""
    rng = generator(seed)
    tokens = [torch.randint(SYMBOLS, (count,), generator=rng)]
    for _ in range(length):
        following = (step[0] * tokens[-1] + step[1]) % SYMBOLS
        random = torch.randint(SYMBOLS, (count,), generator=rng)
        tokens.append(torch.where(torch.rand(count, generator=rng) < noise, random, following))
    sequence = torch.stack(tokens, 1)
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def masked_chain(seed: int, *, share: float = 0.3, count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Sequences with some tokens replaced by 0; the labels are -100 elsewhere."""
    tokens, _ = chain(seed, noise=0.0, count=count)
    hidden = torch.rand(tokens.shape, generator=generator(seed + 1)) < share
    return tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100)


def teacher(
    seed: int, *, count: int = COUNT, inputs: int = 8, outputs: int = 1, task: int = 0
) -> tuple[Tensor, Tensor]:
    """Gaussian inputs and what a fixed random network of two layers makes of them, at unit variance."""
    fixed = generator(TEACHER + task)
    first, second = torch.randn(inputs, 32, generator=fixed), torch.randn(32, outputs, generator=fixed)
    x = torch.randn(count, inputs, generator=generator(seed))
    return x, torch.tanh(x @ first / inputs**0.5) @ second / 3.0


def noisy_teacher(seed: int, noise: float = 0.3, count: int = COUNT, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """The same with Gaussian noise on the targets."""
    x, y = teacher(seed, count=count, outputs=outputs)
    return x, y + noise * torch.randn(y.shape, generator=generator(seed + 1))


def labels(seed: int, *, classes: int = 10, inputs: int = 16, count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Points around fixed centres, two for each class."""
    rng = generator(seed)
    centres = 1.5 * torch.randn(2 * classes, inputs, generator=generator(TEACHER))
    centre = torch.randint(2 * classes, (count,), generator=rng)
    return centres[centre] + torch.randn(count, inputs, generator=rng), centre % classes


def pictures(
    seed: int, *, classes: int = 10, size: int = 8, noise: float = 0.7, count: int = 2000
) -> tuple[Tensor, Tensor]:
    """Smooth patterns, one a class, shifted by up to one pixel, with noise: ``[count, 1, size, size]``."""
    rng = generator(seed)
    coarse = torch.randn(classes, 1, size // 2, size // 2, generator=generator(TEACHER))
    patterns = 1.5 * F.interpolate(coarse, scale_factor=2, mode="bilinear")
    label = torch.randint(classes, (count,), generator=rng)
    shifts = torch.randint(-1, 2, (count,), generator=rng)
    shifted = torch.stack([patterns.roll(shift, -1) for shift in (-1, 0, 1)])
    images = shifted[shifts + 1, label]
    return images + noise * torch.randn(images.shape, generator=rng), label


def waves(seed: int, *, count: int = 2000, length: int = 20) -> tuple[Tensor, Tensor]:
    """Noisy sine waves of random pitch and phase, and their next values: ``[count, length, 1]``."""
    rng = generator(seed)
    pitch = 0.3 + 0.7 * torch.rand(count, 1, generator=rng)
    phase = 6.28 * torch.rand(count, 1, generator=rng)
    wave = torch.sin(pitch * torch.arange(length + 1) + phase)
    wave = (wave + 0.1 * torch.randn(wave.shape, generator=rng)).unsqueeze(-1)
    return wave[:, :-1], wave[:, 1:]
