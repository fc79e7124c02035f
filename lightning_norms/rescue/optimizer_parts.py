"""What optimizers keep outside of ``optimizer.state``: counters in groups, attributes, optimizers that they wrap."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "base_momentum", "max_momentum", "betas"}
_CHOSEN = {"weight_decay", "name", "foreach", "fused", "capturable", "differentiable", "maximize"}
SET_FROM_OUTSIDE = frozenset({"params", "param_names"} | _SCHEDULED | _CHOSEN)
"""Entries of a group that people and schedulers write: no rollback takes them back."""


class _Bare(Optimizer):
    """To see what every optimizer has; torch marks the ``step`` of a class when one is made, so none of its own."""


_OF_EVERY_OPTIMIZER = frozenset(vars(_Bare([torch.zeros(1)], {}))) | {"_opt_called", "_step_count"}


def with_inner(optimizers: Sequence[Any]) -> list[Any]:
    """Return optimizers and those that they wrap (SAM, Lookahead), the outer one first, each once.

    Example:
        >>> outer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> outer.base_optimizer = torch.optim.Adam([torch.zeros(1)])
        >>> [type(optimizer).__name__ for optimizer in with_inner([outer])]
        ['SGD', 'Adam']
    """
    result: dict[int, Any] = {}

    def visit(value: Any) -> None:
        value = getattr(value, "_optimizer", value)  # Lightning's wrapper
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, Optimizer) and id(value) not in result:
            result[id(value)] = value
            for name, attribute in vars(value).items():
                if name not in _OF_EVERY_OPTIMIZER:
                    visit(attribute)

    visit(list(optimizers))
    return list(result.values())


def counters(optimizer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (number of the group, name, value) of the plain values in an optimizer's groups, and "" for attributes.

    Torch's own optimizers yield none: they count in ``optimizer.state``, and their groups hold what people set.
    """
    if is_torchs_own(optimizer):
        return
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in SET_FROM_OUTSIDE and is_plain(value):
                yield str(number), name, value
    for name, value in vars(optimizer).items():
        has_tensors = next(tensors_within(value), None) is not None
        is_history = isinstance(value, (Mapping, list, tuple)) and not has_tensors and value != {}  # {}: filled later
        if name not in _OF_EVERY_OPTIMIZER and is_plain(value) and not is_history:
            yield "", name, value


def is_plain(value: Any) -> bool:
    """Whether this is a number, a tensor but no weight, None, or a nested list, tuple or dictionary of them."""
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, Tensor):
        return not isinstance(value, Parameter) and not value.requires_grad
    return value is None or isinstance(value, (bool, int, float))


def train_mode(optimizer: Any) -> bool | None:
    """Return whether a schedule-free optimizer has its training weights in place; None if it has no such modes."""
    if not (callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))):
        return None
    mode = optimizer.param_groups[0].get("train_mode", getattr(optimizer, "train_mode", None))
    return mode if isinstance(mode, bool) else None


def copy_plain(value: Any) -> Any:
    """Copy a plain value; parameters that are keys of a dictionary stay themselves."""
    return copy.deepcopy(value, {id(key): key for key in _tensor_keys(value)})


def _tensor_keys(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        yield from (key for key in value if isinstance(key, Tensor))
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensor_keys(item)


def is_torchs_own(optimizer: Any) -> bool:
    """Whether the optimizer comes with torch, so that a step without any gradient is known to change nothing.

    Others may count the step, or move towards slow weights.
    """
    return type(optimizer).__module__.startswith("torch.optim.")


def accepts_no_gradient(optimizer: Any) -> bool:
    """Whether the optimizer, or one that it inherits from, comes with torch: these leave out what has no gradient."""
    return any(cls.__module__.startswith("torch.optim.") for cls in type(optimizer).__mro__ if cls is not Optimizer)


def moves_within_step(optimizer: Any) -> bool:
    """Whether an optimizer evaluates the loss again at weights that it has moved, as SAM and its kin do.

    Example:
        >>> moves_within_step(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        False
    """
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    has_two_steps = all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))
    return has_two_steps or any("SAM" in cls.__name__ for cls in type(optimizer).__mro__)


def unreachable_state(optimizer: Any, reached: Sequence[Any]) -> list[str]:
    """Return the top-level names in ``optimizer.state_dict()`` that hold tensors which are not among ``reached``."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return []
    storages = {value.untyped_storage().data_ptr() for value in tensors_within(list(reached))}
    return [
        str(name)
        for name, value in optimizer.state_dict().items()
        if any(tensor.untyped_storage().data_ptr() not in storages for tensor in tensors_within(value))
    ]


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and dictionaries, such as the history of LBFGS."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_within(item)
