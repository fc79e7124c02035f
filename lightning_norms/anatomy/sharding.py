"""What a strategy does to a network that a callback must know: where weights are, and who steps the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_norms.anatomy.names import has_class_name


def is_deepspeed(strategy: object) -> bool:
    """Whether this is a ``DeepSpeedStrategy``: callbacks on gradients, weights or steps have no effect there."""
    return any("DeepSpeed" in parent.__name__ for parent in type(strategy).__mro__)


def reshard(module: nn.Module) -> None:
    """Make the parameters of FSDP2 this rank's shards again, before they are read or written.

    After a forward without a backward, ``weight`` of its root is a temporary copy, and what is written to it is lost.
    """
    for part in module.modules():
        if has_class_name(part, "FSDPModule"):
            part.reshard()  # type: ignore[operator]


def is_flattened(model: nn.Module | None) -> bool:
    """Whether FSDP1 has put the weights into flat vectors, where no matrix has rows."""
    return type(model).__name__ == "FullyShardedDataParallel"


def weight_keeper(strategy: Any) -> str | None:
    """What keeps the weights where their rows cannot be written, DeepSpeed or FSDP1; None if nothing does."""
    return "DeepSpeed" if is_deepspeed(strategy) else "FSDP1" if is_flattened(strategy.model) else None


def parts_with(module: nn.Module, method: str) -> list[nn.Module]:
    """The modules whose class has ``method``: wrappers forward attributes, so their instances would count twice."""
    return [part for part in module.modules() if callable(getattr(type(part), method, None))]


def sharding_group(model: nn.Module | None) -> dist.ProcessGroup | None:
    """The ranks over which FSDP1 shards ``model``; None for every other wrapper."""
    is_sharded = is_flattened(model) and getattr(getattr(model, "sharding_strategy", None), "name", "") != "NO_SHARD"
    return getattr(model, "process_group", None) if is_sharded else None


def sum_over_ranks(parts: Sequence[Tensor], strategy: Any) -> list[Tensor]:
    """Sums of tensors of one device and dtype over all ranks, in one collective; shapes are the same on every rank."""
    flat = torch.cat([part.flatten() for part in parts])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat)  # not strategy.reduce, which waits at a barrier first: a second collective
    else:
        flat = strategy.reduce(flat, reduce_op="sum")  # ranks that torch.distributed does not know (XLA)
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


def to_local(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor; the tensor itself where it is whole."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def to_full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered where it is sharded as a DTensor: a collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def grad_scaler(trainer: Any) -> Any | None:
    """The run's GradScaler; None when losses and gradients are not scaled."""
    return getattr(trainer.precision_plugin, "scaler", None)


def pending_scale(trainer: Any, optimizer: Optimizer) -> Tensor | None:
    """The loss scale that a fused optimizer takes out only inside its step; None when gradients are unscaled."""
    scaler = grad_scaler(trainer)
    return scaler._scale if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False) else None
