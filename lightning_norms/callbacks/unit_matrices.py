"""Keep every matrix made of unit vectors, as nGPT asks: the other half of that design."""

from __future__ import annotations

import re
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_norms.anatomy.sharding import is_deepspeed, is_flattened, reshard
from lightning_norms.anatomy.writers import output_dimension, residual_writers


class UnitMatrices(Callback):
    r"""Divides the vectors that meet the residual stream by their length, before training and after every step.

    ::

        reads from the stream, embeddings, head    every row has length 1
        writes into the stream                     every column has length 1

    It acts on the weights of ``nn.Linear``, ``nn.Embedding`` and Hugging Face's ``Conv1D``; gains, biases and position
    tables that are bare parameters stay as they are. Use it with weight decay 0 and no warmup (both in the paper).

    Args:
        pattern: regular expression for the writers' parameter names, where they are not found without it.

    Raises:
        ValueError: if ``pattern`` is no regular expression; when training starts, if no writer is found, or under
            DeepSpeed or FSDP1.

    Example:
        >>> callback = UnitMatrices(pattern=r"(o_proj|down_proj)\.weight")

    Source: Loshchilov et al. 2024 (nGPT), arXiv:2410.01131; directions as in NVIDIA's code.
    """

    def __init__(self, pattern: str | None = None) -> None:
        super().__init__()
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"UnitMatrices: {pattern!r} is not a regular expression: {error}") from None
        self.pattern = pattern
        self._handles: list[RemovableHandle] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put everything on the sphere, and hook on to the optimizers."""
        self._remove()
        name = (
            "DeepSpeed" if is_deepspeed(trainer.strategy) else "FSDP1" if is_flattened(trainer.strategy.model) else ""
        )
        if name:
            raise ValueError(
                f"UnitMatrices: {name} keeps the weights in flat pieces, where a matrix has no rows: train with ddp or "
                "FSDP2 (ModelParallelStrategy)."
            )
        reshard(pl_module)
        directions = matrices_and_directions(pl_module, self.pattern)
        normalise(directions)
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: normalise(directions)))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizers as they were."""
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same."""
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}


def matrices_and_directions(module: nn.Module, pattern: str | None = None) -> list[tuple[Tensor, int]]:
    """Every matrix once, with the dimension along which its vectors lie.

    Example:
        >>> from lightning_norms.model.decoder import Decoder, DecoderConfig
        >>> found = matrices_and_directions(Decoder(DecoderConfig(vocab_size=11, d_model=8, n_layers=1)))
        >>> [(tuple(matrix.shape), along) for matrix, along in found][-2:]
        [((32, 8), 1), ((8, 32), 0)]
    """
    writers = {id(matrix.parameter) for matrix in residual_writers(module, pattern)}
    found: dict[int, tuple[Tensor, int]] = {}
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding) or type(part).__name__ == "Conv1D":
            weight: Any = part.weight
            outputs = output_dimension(part)
            if weight.requires_grad:
                found.setdefault(id(weight), (weight, outputs if id(weight) in writers else 1 - outputs))
    return list(found.values())


@torch.no_grad()
def normalise(directions: list[tuple[Tensor, int]]) -> None:
    """In place, lengths in float32."""
    for matrix, along in directions:
        length = torch.linalg.vector_norm(matrix, dim=along, keepdim=True, dtype=torch.float32)
        matrix.div_(length.clamp(min=1e-12).to(matrix.dtype))
