"""Keep the vectors of every matrix at length 1, which the placement nGPT needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_norms.anatomy.sharding import reshard, weight_keeper
from lightning_norms.anatomy.writers import output_dimension, residual_writers
from lightning_norms.checks import check_pattern


class UnitMatrices(Callback):
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
        self._hooks = ExitStack()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()
        keeper = weight_keeper(trainer.strategy)
        if keeper is not None:
            raise ValueError(
                f"UnitMatrices: {keeper} keeps the weights in flat pieces, where a matrix has no rows: train with ddp "
                "or FSDP2 (ModelParallelStrategy)."
            )
        reshard(pl_module)
        matrices = unit_matrices(pl_module, self.pattern)
        normalise(matrices)
        for optimizer in trainer.optimizers:
            self._hooks.callback(optimizer.register_step_post_hook(lambda *_: normalise(matrices)).remove)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._hooks.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": ExitStack()}


@dataclass(frozen=True)
class UnitMatrix:
    """A matrix whose vectors along dimension ``along`` have length 1."""

    weight: Tensor
    along: int


def unit_matrices(module: nn.Module, pattern: str | None = None) -> list[UnitMatrix]:
    """Every matrix once, with the dimension along which its vectors lie.

    Example:
        >>> from lightning_norms.model.decoder import Decoder, DecoderConfig
        >>> decoder = Decoder(DecoderConfig(vocab_size=11, d_model=8, n_layers=1))
        >>> [(tuple(matrix.weight.shape), matrix.along) for matrix in unit_matrices(decoder)][-2:]
        [((32, 8), 1), ((8, 32), 0)]
    """
    writers = {id(matrix.parameter) for matrix in residual_writers(module, pattern)}
    matrices: dict[int, UnitMatrix] = {}
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding) or type(part).__name__ == "Conv1D":
            weight: Any = part.weight
            outputs = output_dimension(part)
            if weight.requires_grad:
                along = outputs if id(weight) in writers else 1 - outputs
                matrices.setdefault(id(weight), UnitMatrix(weight, along))
    return list(matrices.values())


@torch.no_grad()
def normalise(matrices: Sequence[UnitMatrix]) -> None:
    """Divide the vectors by their lengths in place; lengths are computed in float32."""
    for matrix in matrices:
        length = torch.linalg.vector_norm(matrix.weight, dim=matrix.along, keepdim=True, dtype=torch.float32)
        matrix.weight.div_(length.clamp(min=1e-12).to(matrix.weight.dtype))
