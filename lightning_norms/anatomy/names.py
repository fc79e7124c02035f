"""Names and modules without what compile, DDP, FSDP and activation checkpointing put around them."""

from __future__ import annotations

from torch import nn

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """A parameter's or module's name without what compile, DDP, FSDP and checkpoint wrappers add to it.

    Example:
        >>> clean_name("model._orig_mod.layers.3._checkpoint_wrapped_module.linear1.weight")
        'model.layers.3.linear1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def has_class_name(instance: object, *names: str) -> bool:
    """Whether an object's class, or one of its parents, has one of these names.

    By name, so that nothing is imported for the question, and so that ``lightning.pytorch`` and ``pytorch_lightning``,
    which are two copies of the same classes, count as one.

    Example:
        >>> has_class_name(nn.Linear(1, 1), "Module"), has_class_name(nn.Linear(1, 1), "Conv1d")
        (True, False)
    """
    return any(parent.__name__ in names for parent in type(instance).__mro__)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, DDP, FSDP and checkpoint wrappers."""
    names = dict(module.named_children())
    return unwrap(next(iter(names.values()))) if len(names) == 1 and set(names) <= WRAPPERS else module


def join(label: str, name: str) -> str:
    """A dotted name, without a dot where one of the two is empty.

    Example:
        >>> join("encoder", "block_00"), join("", "block_00")
        ('encoder.block_00', 'block_00')
    """
    return f"{label}.{name}" if label and name else label or name
