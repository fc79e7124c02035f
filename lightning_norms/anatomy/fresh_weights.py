"""Whether weights are still at their init, and what an init already contains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_high

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.depth import is_norm
from lightning_norms.anatomy.fused_qkv import KEY, QUERY, VALUE
from lightning_norms.anatomy.sharding import to_full
from lightning_norms.anatomy.training_traces import trace_of_training
from lightning_norms.anatomy.writers import Matrix, output_dimension
from lightning_norms.rescale_rules import RescaleRule

CONSTANTS = ("weight", "gain", "gamma", "scale", "bias", "beta", "shift")


@dataclass(frozen=True)
class _Ratio:
    """Spread of a matrix / spread of its untouched peers."""

    matrix: Matrix
    value: float
    same_shape: bool


def looks_trained(module: nn.Module) -> bool:
    """Whether the weights of a module are no longer those of an init."""
    return evidence_of_training(module) is not None


@torch.no_grad()
def evidence_of_training(module: nn.Module) -> str | None:
    """What says that a module has been trained: its norms, else its matrices and biases; None if nothing does."""
    constants = (
        to_full(parameter)
        for part in module.modules()
        if is_norm(part)
        for name, parameter in part.named_parameters(recurse=False)
        if name in CONSTANTS and parameter.numel()
    )
    # Every rank looks at every norm, since gathering a sharded one is a collective.
    if any([bool(constant.min() != constant.max()) for constant in constants]):  # noqa: C419
        return "a norm's gain or bias is no longer one constant"
    return trace_of_training(module)


@torch.no_grad()
def already_scaled(matrices: Sequence[Matrix], rule: RescaleRule) -> bool:
    """Whether the init of ``matrices`` already contains the rule's factor, as Hugging Face's GPT-2 does.

    Compares every matrix with others in its block that the rule leaves alone (a fused value third with its query
    third): the ratio of their standard deviations is the factor if the init contains it, and 1 if not.
    """
    scaled = {id(matrix.parameter) for matrix in matrices}
    # An init may scale the writers for a reason of its own, so for DeepNorm the value matrices are the better witness.
    witnesses = [matrix for matrix in matrices if not matrix.writer] or matrices
    ratios = [ratio for matrix in witnesses if (ratio := _ratio_to_peers(matrix, scaled))]
    # Xavier depends on both sides of a matrix, so a comparison with the very same shape counts before all others.
    ratios = [ratio for ratio in ratios if ratio.same_shape] or ratios
    if not ratios:
        return False
    logs = [math.log(ratio.value) for ratio in ratios]
    factors = [math.log(rule.gain(ratio.matrix.layer, ratio.matrix.layers)) for ratio in ratios]
    miss = fmean(abs(log - factor) for log, factor in zip(logs, factors, strict=True))
    return miss < min(0.15, 0.25 * fmean(map(abs, logs)))


def _ratio_to_peers(matrix: Matrix, scaled: set[int]) -> _Ratio | None:
    weight, fused = matrix.parameter, matrix.fused
    if weight.ndim != 2:
        return None  # stacked experts; or a flat shard of FSDP1, which has no shape to go by
    if fused:
        spread = _spread(_take(matrix, fused.rows(VALUE)))
        peers = same = [_take(matrix, fused.rows(QUERY if fused.sizes[QUERY] else KEY))]
    else:
        spread, peers = _spread(weight), _peers(matrix, scaled)
        same = [peer for peer in peers if peer.shape == weight.shape]
    reference = median_high(map(_spread, same or peers)) if peers else 0.0
    return _Ratio(matrix, spread / reference, bool(same)) if spread > 0 and reference > 0 else None


def _take(matrix: Matrix, rows: Tensor) -> Tensor:
    whole = to_full(matrix.parameter)
    return whole.index_select(output_dimension(matrix.owner), rows.to(whole.device))


def _peers(matrix: Matrix, scaled: set[int]) -> list[Tensor]:
    """Matrices of the same fan-in in the same block that are not to be scaled."""
    fan_in = matrix.parameter.shape[1 - output_dimension(matrix.owner)]
    return [
        other
        for owner in matrix.block.modules()
        for other in owner.parameters(recurse=False)
        if other.ndim == 2 and id(other) not in scaled and other.shape[1 - output_dimension(owner)] == fan_in
    ]


def _spread(matrix: Tensor) -> float:
    return float(to_full(matrix).float().std())
