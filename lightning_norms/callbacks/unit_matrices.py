"""Keep the vectors of every matrix at length 1, which the placement nGPT needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.anatomy.sharding import reshard, weight_keeper
from lightning_norms.anatomy.writers import output_dimension, residual_writers
from lightning_norms.checks import check_pattern
from lightning_norms.learning_rate import ActsAfterSteps


class UnitMatrices(ActsAfterSteps):
    r"""Divides the vectors that meet the residual stream by their length, before training and after every step.

    ::

        reads from the stream, embeddings, head    every row has length 1
        writes into the stream                     every column has length 1

    It acts on the weights of ``nn.Linear``, ``nn.Embedding`` and Hugging Face's ``Conv1D``; gains, biases and position
    tables that are bare parameters stay as they are. Use it with weight decay 0 and no warmup (both in the paper).

    Args:
        pattern: regular expression for the parameter names of the writers, where they are not recognised without it.

    Raises:
        ValueError: if ``pattern`` is no regular expression; when training starts, if there is no writer, or under
            DeepSpeed or FSDP1.

    Example:
        >>> callback = UnitMatrices(pattern=r"(o_proj|down_proj)\.weight")

    Source: Loshchilov et al. 2024 (nGPT), arXiv:2410.01131; directions as in NVIDIA's code.
    """

    def __init__(self, pattern: str | None = None) -> None:
        super().__init__()
        check_pattern("UnitMatrices", "pattern", pattern)
        self.pattern = pattern

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keeper = weight_keeper(trainer.strategy)
        if keeper is not None:
            raise ValueError(
                f"UnitMatrices: {keeper} keeps the weights in flat pieces, where a matrix has no rows: train with ddp "
                "or FSDP2 (ModelParallelStrategy)."
            )
        reshard(pl_module)
        matrices = unit_matrices(pl_module, self.pattern)
        normalise(matrices)
        self.begin(trainer, pl_module, lambda: normalise(matrices), "the matrices do not keep length 1")


def unit_matrices(module: nn.Module, pattern: str | None = None) -> dict[Tensor, int]:
    """Every trained matrix once, with the dimension along which its vectors lie."""
    writers = {id(matrix.parameter) for matrix in residual_writers(module, pattern)}
    matrices: dict[Tensor, int] = {}
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding) or type(part).__name__ == "Conv1D":
            weight: Any = part.weight
            outputs = output_dimension(part)
            if weight.requires_grad:
                matrices.setdefault(weight, outputs if id(weight) in writers else 1 - outputs)
    return matrices


@torch.no_grad()
def normalise(matrices: Mapping[Tensor, int]) -> None:
    """Divide the vectors by their lengths in place; lengths are computed in float32."""
    for weight, along in matrices.items():
        length = torch.linalg.vector_norm(weight, dim=along, keepdim=True, dtype=torch.float32)
        weight.div_(length.clamp(min=1e-12).to(weight.dtype))
