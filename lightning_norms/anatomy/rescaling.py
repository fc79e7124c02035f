"""Scale the matrices that a rule names, once in the life of the weights: the module is marked afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lightning_norms.anatomy.copies import find_equal_copies
from lightning_norms.anatomy.writers import Matrix, residual_writers, scale_, value_path
from lightning_norms.rescale_rules import RescaleRule

MARK = "residual_rescaled"
"""Attribute of a module whose weights contain the factors."""


def check_rule(owner: str, rule: object) -> None:
    """Raise a TypeError for what is no rescale rule."""
    if not isinstance(rule, RescaleRule):
        raise TypeError(f"{owner}: rule must be a RescaleRule such as GPT2Rescale(), got {rule!r}")


def matrices_of(
    rule: RescaleRule, module: nn.Module, pattern: str | None = None, value_pattern: str | None = None
) -> tuple[Matrix, ...]:
    """The matrices that a rule scales: the residual writers, or the whole value path."""
    return value_path(module, pattern, value_pattern) if rule.whole_value_path else residual_writers(module, pattern)


@torch.no_grad()
def rescale(matrices: Sequence[Matrix], rule: RescaleRule, holders: Iterable[object] = ()) -> list[float]:
    """Multiply the trainable ones of the matrices by the rule's factors; return the factors.

    What ``holders`` keep as a copy of them, a teacher or a moving average, stays a copy.
    """
    trainable = [matrix for matrix in matrices if matrix.parameter.requires_grad]
    factors = [rule.gain(matrix.layer, matrix.layers) for matrix in trainable]
    pairs = find_equal_copies(matrices, holders, factors)
    for matrix, factor in zip(trainable, factors, strict=True):
        scale_(matrix, factor)
    for copied, original in pairs:
        copied.copy_(original)
    return factors


def is_rescaled(module: nn.Module) -> bool:
    """Whether the weights of this module contain the factors already."""
    return bool(getattr(module, MARK, False))


def mark_rescaled(module: nn.Module) -> None:
    """Note on the module that its weights contain the factors."""
    setattr(module, MARK, True)
