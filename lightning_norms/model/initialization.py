r"""The initial values of every tensor, in one table.

All matrices are normal with mean 0 and this standard deviation:

====================  =============  ==================  ====================================
tensor                Normal(std)    GPT2(std)           Xavier(embedding_std)
====================  =============  ==================  ====================================
embedding, positions  std            std                 embedding_std
block matrix          std            std                 sqrt(2 / (fan_in + fan_out))
block writer          std            std / sqrt(2L)      sqrt(2 / (fan_in + fan_out))
head, if not tied     std            std                 width^(-1/2)
====================  =============  ==================  ====================================

Value-path matrices (values, writers, up and gate) are then multiplied by ``placement.gain(site)``: 1 for most,
DeepNorm's beta; queries and keys by ``placement.query_key_gain(site)``: 1 for all but DS-Init. Biases start at 0, norms
at gain 1 and bias 0. ``tests/model/test_initialization.py`` holds the code to this table.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.model.residual import Placement, Site
from lightning_norms.rescale_rules import GPT2Rescale


@dataclass(frozen=True)
class Initialization(ABC):
    """A column of the table: the standard deviation of each kind of matrix."""

    @abstractmethod
    def embedding(self) -> float:
        """Standard deviation of token and position embeddings."""

    @abstractmethod
    def head(self, width: int) -> float:
        """Standard deviation of a head that is not tied to the embedding."""

    @abstractmethod
    def matrix(self, fan_in: int, fan_out: int, writes: bool, layers: int) -> float:
        """Standard deviation of a block's matrix, which ``writes`` into the stream of ``layers`` blocks or does not."""


@dataclass(frozen=True)
class Normal(Initialization):
    """One standard deviation for every matrix: GPT's and BERT's 0.02.

    Args:
        std: standard deviation of every matrix.

    Source: Radford et al. 2018 (GPT), code.
    """

    std: float = 0.02

    def __post_init__(self) -> None:
        _check_std("std", self.std)

    @override
    def embedding(self) -> float:
        return self.std

    @override
    def head(self, width: int) -> float:
        return self.std

    @override
    def matrix(self, fan_in: int, fan_out: int, writes: bool, layers: int) -> float:
        return self.std


@dataclass(frozen=True)
class GPT2(Normal):
    """:class:`Normal`, with matrices that write into the residual stream smaller by sqrt(2L).

    Source: Radford et al. 2019, section 2.3, where N is the number of residual layers, 2L; OpenAI's released code does
    not do it, Hugging Face's does.
    """

    @override
    def matrix(self, fan_in: int, fan_out: int, writes: bool, layers: int) -> float:
        return self.std * GPT2Rescale().gain(1, layers) if writes else self.std


@dataclass(frozen=True)
class Xavier(Initialization):
    """A variance that keeps the size of activations and gradients; DeepNorm's constants are made for it.

    Args:
        embedding_std: standard deviation of embeddings, and of a head that is tied to them.

    Source: Glorot, Bengio 2010 (normal flavour, gain 1); Wang et al. 2022, arXiv:2203.00555.
    """

    embedding_std: float = 0.02

    def __post_init__(self) -> None:
        _check_std("embedding_std", self.embedding_std)

    @override
    def embedding(self) -> float:
        return self.embedding_std

    @override
    def head(self, width: int) -> float:
        return float(width**-0.5)  # logits of variance 1 on a normalised stream

    @override
    def matrix(self, fan_in: int, fan_out: int, writes: bool, layers: int) -> float:
        return float((2 / (fan_in + fan_out)) ** 0.5)


@torch.no_grad()
def initialize_sublayer(
    sublayer: nn.Module, site: Site, recipe: Initialization, placement: Placement, by_name: bool = False
) -> None:
    """Fill a sublayer's matrices by the table. Draws do not depend on the placement: its gain is multiplied on after.

    Args:
        sublayer: module with attributes ``writer`` (a matrix) and ``value_path`` (matrices).
        site: where the sublayer stands.
        recipe: column of the table.
        placement: placement whose gains apply.
        by_name: pass :func:`draw` a name for each matrix.
    """
    for name, matrix in sublayer.named_modules():
        if not isinstance(matrix, nn.Linear):
            continue
        fan_out, fan_in = matrix.weight.shape
        std = recipe.matrix(fan_in, fan_out, matrix is sublayer.writer, site.layers)
        draw(matrix.weight, std, f"{site.kind} {site.layer} {name}" if by_name else None)
        on_value_path = any(matrix is member for member in sublayer.value_path)  # type: ignore[union-attr]
        matrix.weight.mul_(placement.gain(site) if on_value_path else placement.query_key_gain(site))
        if matrix.bias is not None:
            nn.init.zeros_(matrix.bias)


def draw(weight: Tensor, std: float, name: str | None = None) -> None:
    """Fill a tensor with normal numbers of mean 0.

    Args:
        weight: tensor to fill.
        std: standard deviation.
        name: None takes the next numbers of torch's generator. With a name the numbers depend on the seed, the name and
            the shape alone: two models that differ elsewhere start with the same numbers here.

    Example:
        >>> first, second = torch.empty(2, 2), torch.empty(2, 2)
        >>> draw(first, 1.0, "head")
        >>> draw(second, 2.0, "head")
        >>> torch.equal(second, 2.0 * first)
        True
    """
    generator = None
    if name is not None and weight.device.type != "meta":
        digest = hashlib.sha256(f"{torch.initial_seed()} {name} {tuple(weight.shape)}".encode()).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest[:7], "big"))
    nn.init.normal_(weight, std=std, generator=generator)


def _check_std(name: str, std: float) -> None:
    if not 0 <= std < float("inf"):
        raise ValueError(f"{name} is {std!r}, but a standard deviation is a finite number >= 0, for instance 0.02.")
