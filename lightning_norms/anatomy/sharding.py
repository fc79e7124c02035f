"""What a strategy does to a network that a callback must know: where weights are, and who steps the optimizer."""

from __future__ import annotations

from torch import nn


def is_deepspeed(strategy: object) -> bool:
    """Whether this is Lightning's ``DeepSpeedStrategy`` or a subclass; by name, so that nothing is imported for it.

    DeepSpeed keeps copies of the weights and steps an optimizer of its own, without torch's step hooks. So what acts on
    gradients, weights or steps has no effect there, and must say so.
    """
    return any("DeepSpeed" in parent.__name__ for parent in type(strategy).__mro__)


def reshard(module: nn.Module) -> None:
    """Show the true parameters of FSDP2, this rank's shards, to whoever reads or writes them.

    A forward without a backward (validation, profiling) leaves FSDP2's root unsharded: ``weight`` is then a passing
    copy, and what is written to it is lost.
    """
    for part in module.modules():
        if any(parent.__name__ == "FSDPModule" for parent in type(part).__mro__):
            part.reshard()  # type: ignore[operator]


def is_flattened(model: nn.Module | None) -> bool:
    """Whether FSDP1 (``FullyShardedDataParallel``) has put the weights into flat vectors: no matrix has rows there."""
    return type(model).__name__ == "FullyShardedDataParallel"


def parts_with(module: nn.Module, method: str) -> list[nn.Module]:
    """The modules whose class has ``method``, each once.

    A wrapper (checkpointing, compile, FSDP1) passes on every attribute of what it wraps, so asking the instance would
    find the same part twice.

    Example:
        >>> class Clock(nn.Module):
        ...     def after_step(self): pass
        >>> len(parts_with(nn.Sequential(Clock(), nn.Linear(2, 2)), "after_step"))
        1
    """
    return [part for part in module.modules() if callable(getattr(type(part), method, None))]
