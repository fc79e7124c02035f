"""Whether weights are still at their init, and what an init already contains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.depth import is_norm
from lightning_norms.anatomy.fused_qkv import KEY, QUERY, VALUE
from lightning_norms.anatomy.writers import Matrix, output_dimension
from lightning_norms.rescale_rules import RescaleRule

CONSTANTS = ("weight", "gain", "gamma", "scale", "bias", "beta", "shift")


@torch.no_grad()
def looks_trained(module: nn.Module) -> bool:
    """Whether some norm's gain or bias is no longer one constant, as it is in every published init.

    Example:
        >>> norm = nn.LayerNorm(4)
        >>> looks_trained(norm)
        False
        >>> norm.bias.data[0] = 1e-3
        >>> looks_trained(norm)
        True
    """
    for part in module.modules():
        if is_norm(part):
            for name, parameter in part.named_parameters(recurse=False):
                whole = _whole(parameter)
                if name in CONSTANTS and whole.numel() and bool(whole.min() != whole.max()):
                    return True
    return False


@torch.no_grad()
def already_scaled(matrices: Sequence[Matrix], rule: RescaleRule) -> bool:
    """Whether the init already contains the rule's factor, as Hugging Face's GPT-2 does.

    Compares every matrix with others in its block that the rule leaves alone (a fused value third with its query
    third): the ratio of their standard deviations is the factor if it is in, and 1 if it is not.

    Args:
        matrices: what the rule would scale.
        rule: whose factor is looked for.
    """
    chosen = {id(matrix.parameter) for matrix in matrices}
    # An init may scale the writers for a reason of its own, so for DeepNorm the value matrices are the better witness.
    witnesses = [matrix for matrix in matrices if not matrix.writer] or matrices
    seen = [(matrix, *ratio) for matrix in witnesses if (ratio := _ratio_to_peers(matrix, chosen))]
    # Xavier depends on both sides of a matrix, so a comparison with the very same shape counts before all others.
    seen = [each for each in seen if each[2]] or seen
    if not seen:
        return False
    logs = [(math.log(ratio), math.log(rule.gain(matrix.layer, matrix.layers))) for matrix, ratio, _ in seen]
    miss = sum(abs(ratio - factor) for ratio, factor in logs) / len(logs)
    distance = sum(abs(ratio) for ratio, _ in logs) / len(logs)
    return miss < min(0.15, 0.25 * distance)


def _ratio_to_peers(matrix: Matrix, chosen: set[int]) -> tuple[float, bool] | None:
    """Standard deviation against that of untouched peers, and whether these have the same shape."""
    if matrix.parameter.ndim != 2:
        return None  # stacked experts; or a flat shard of FSDP1, which has no shape to go by
    if matrix.fused:
        value, query = (
            _part(matrix, matrix.fused.rows(part)) for part in (VALUE, QUERY if matrix.fused.sizes[0] else KEY)
        )
        spread, peers, same = _spread(value), [query], [query]
    else:
        spread, peers = _spread(matrix.parameter), list(_peers(matrix, chosen))
        same = [other for other in peers if other.shape == matrix.parameter.shape]
    reference = median_high(map(_spread, same or peers)) if peers else 0.0
    return (spread / reference, bool(same)) if spread > 0 and reference > 0 else None


def _part(matrix: Matrix, rows: Tensor) -> Tensor:
    whole = _whole(matrix.parameter)
    return whole.index_select(output_dimension(matrix.owner), rows.to(whole.device))


def _peers(matrix: Matrix, chosen: set[int]) -> list[Tensor]:
    """Matrices of the same fan-in in the same block that are not to be scaled."""
    fan_in = matrix.parameter.shape[1 - output_dimension(matrix.owner)]
    peers: list[Tensor] = []
    for name, other in matrix.block.named_parameters():
        owner = matrix.block.get_submodule(name.rpartition(".")[0])
        if other.ndim == 2 and id(other) not in chosen and other.shape[1 - output_dimension(owner)] == fan_in:
            peers.append(other)
    return peers


def _spread(matrix: Tensor) -> float:
    return float(_whole(matrix).float().std())


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
