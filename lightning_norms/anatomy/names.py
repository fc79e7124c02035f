"""Names and modules without what compile, DDP, FSDP and activation checkpointing put around them."""

from __future__ import annotations

from torch import nn

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Remove the wrappers' parts: ``"layers.3._checkpoint_wrapped_module.weight"`` -> ``"layers.3.weight"``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def has_class_name(instance: object, *names: str) -> bool:
    """Whether an object's class or a parent has one of these names: Lightning's two packages have copies of each."""
    return any(parent.__name__ in names for parent in type(instance).__mro__)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, DDP, FSDP and checkpoint wrappers."""
    names = dict(module.named_children())
    return unwrap(next(iter(names.values()))) if len(names) == 1 and set(names) <= WRAPPERS else module


def join(label: str, name: str) -> str:
    """A dotted name, without a dot where one of the two is empty."""
    return f"{label}.{name}" if label and name else label or name
