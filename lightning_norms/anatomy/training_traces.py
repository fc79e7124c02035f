"""What training leaves in weights that no norm's gain shows: in networks whose norms have neither gain nor bias.

A fresh matrix holds independent numbers, whatever their distribution. Its largest singular value is then known from its
size (Johnstone 2001), and an update of low rank stands out of it. Fresh biases are constants, torch's uniform numbers,
or normal numbers of one spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.matrices import all_projections
from lightning_norms.anatomy.names import unwrap
from lightning_norms.anatomy.sharding import to_full
from lightning_norms.anatomy.stacks import find_stacks
from lightning_norms.anatomy.sublayers import find_sublayers

BLOCKS = 6  # blocks of a stack that are looked at, evenly over depth
EXACT = 256  # matrices with a smaller side get their singular value exactly, others by power iteration
POWER_STEPS = 12
ONE_EDGE, ALL_EDGES = 4.0, 2.5  # in standard deviations; measured at init: at most 0.6 and -0.2
EDGE_MEAN, EDGE_DEVIATION = -1.2065, 1.268  # of the Tracy-Widom distribution
FEWEST = 64  # numbers in biases on which a verdict stands


@dataclass(frozen=True)
class Weights:
    """One matrix, and the bias of the module that holds it."""

    values: Tensor
    bias: Tensor | None


@torch.no_grad()
def trace_of_training(module: nn.Module) -> str | None:
    """What says that the blocks of ``module`` have been trained, in words; None if nothing does."""
    weights = list(_sample(module))
    edges = torch.tensor([edge for matrix in weights if (edge := edge_score(matrix.values)) is not None])
    total = (edges - EDGE_MEAN).sum() / (EDGE_DEVIATION * max(1, len(edges)) ** 0.5)
    if len(edges) and (edges.max() > ONE_EDGE or total > ALL_EDGES):
        return "the matrices of its blocks have directions that independent numbers do not have"
    if not are_fresh_biases([matrix for matrix in weights if matrix.bias is not None]):
        return "the biases of its blocks are neither constant nor those of an init"
    return None


def edge_score(matrix: Tensor) -> float | None:
    """How far the largest singular value is above that of independent numbers; None for a constant or narrow matrix."""
    matrix = matrix.flatten(1) - matrix.mean()
    if min(matrix.shape) < 4 or not matrix.std() > 0:
        return None
    for dimension in (1, 0):  # parts of a fused matrix may have spreads of their own
        matrix = matrix / matrix.square().mean(dimension, keepdim=True).sqrt().clamp_min(1e-30)
    first, second = ((side - 0.5) ** 0.5 for side in matrix.shape)
    width = (first + second) * (1 / first + 1 / second) ** (1 / 3)
    return float((_largest_singular_value(matrix) ** 2 - (first + second) ** 2) / width)


def _largest_singular_value(matrix: Tensor) -> Tensor:
    if min(matrix.shape) <= EXACT:
        exact: Tensor = torch.linalg.matrix_norm(matrix, 2)
        return exact
    vectors = torch.randn(matrix.shape[1], 4, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(POWER_STEPS):
        vectors = torch.linalg.qr(matrix.T @ (matrix @ vectors)).Q
    largest: Tensor = torch.linalg.matrix_norm(matrix @ vectors, 2)
    return largest


def are_fresh_biases(weights: Sequence[Weights]) -> bool:
    """Whether biases are what inits give: constants, uniform within 1 / sqrt(fan-in) as torch's, or of one spread."""
    moved = [
        (m.bias, m.values[0].numel() ** 0.5) for m in weights if m.bias is not None and m.bias.min() != m.bias.max()
    ]
    if sum(bias.numel() for bias, _ in moved) < FEWEST:
        return True
    relative = torch.cat([bias * root for bias, root in moved])
    is_torchs = (3 * relative.square().mean() - 1).abs() < 5 * (0.8 / relative.numel()) ** 0.5
    return bool(relative.abs().max() <= 1.01 and is_torchs) or _have_one_spread([bias for bias, _ in moved])


def _have_one_spread(biases: Sequence[Tensor]) -> bool:
    """Whether all biases come from one normal distribution, as in a ViT of JAX, whose biases have a spread of 1e-6."""
    values = torch.cat(list(biases))
    deviation, count = values.square().mean().sqrt(), values.numel()
    tails = float((values / deviation).pow(4).mean())
    spreads = torch.tensor([float((bias / deviation).square().mean()) for bias in biases])
    sizes = torch.tensor([bias.numel() for bias in biases])
    misses = ((spreads - 1).square() * sizes / max(0.5, tails - 1)).mean()
    is_usual = bool(deviation < 1e-4 or (deviation / 0.02 - 1).abs() < 0.05)  # 20 steps of Adam may also look normal
    return is_usual and abs(tails - 3) < 4 * (24 / count) ** 0.5 and bool(misses < 1 + 5 * (2 / len(biases)) ** 0.5)


def _sample(module: nn.Module) -> Iterator[Weights]:
    """Matrices in the sublayers of some blocks, or all where none is recognised, and trained Linears around them."""
    stacks = find_stacks(module)
    inside = {id(part) for stack in stacks for block in stack.blocks for part in block.module.modules()}
    for stack in stacks:
        for block in stack.blocks[:: max(1, -(-len(stack.blocks) // BLOCKS))]:
            inner = unwrap(block.module)
            owners = {id(p): part for part in inner.modules() for p in part.parameters(recurse=False)}
            claimed = [m for sublayer in find_sublayers(inner) for m in (*sublayer.readers, sublayer.writer)]
            for matrix in claimed or all_projections(inner):
                if matrix.inputs:
                    yield from _weights(owners[id(matrix.parameter)], matrix.parameter)
    for part in module.modules():
        if isinstance(part, nn.Linear) and id(part) not in inside and part.weight.requires_grad:
            yield from _weights(part, part.weight)


def _weights(owner: nn.Module, parameter: Tensor) -> Iterator[Weights]:
    values, bias = to_full(parameter.detach()).float(), getattr(owner, "bias", None)
    if values.ndim > 1 and not values.is_meta:  # no flat shard of FSDP1
        yield Weights(values, to_full(bias.detach()).float().flatten() if isinstance(bias, Tensor) else None)
