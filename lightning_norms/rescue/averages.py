"""Weight averages (EMA, SWA, teachers): which objects hold one, and its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

_AVERAGE = re.compile(r"(?i:average)|EMA|Ema(?![a-z])|(?<![a-z])ema(?![a-z])")


def is_average(module: object, attribute: str = "") -> bool:
    """Whether this is a weight average: an ``AveragedModel``, or a module with EMA or average in a name.

    Example:
        >>> is_average(nn.Linear(1, 1)), is_average(nn.Linear(1, 1), "_average_model")
        (False, True)
    """
    names = (type(module).__name__, attribute)
    return isinstance(module, nn.Module) and (
        hasattr(module, "n_averaged") or any(_AVERAGE.search(name) is not None for name in names)
    )


def average_tensors(average: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of a weight average, under the module's own names, maybe after "module."."""
    if isinstance(average, nn.Module):
        yield from average.named_parameters()
        yield from average.named_buffers()
        return
    for name, value in _attributes(average):
        if is_average(value, name):
            yield from average_tensors(value)
        elif name == "n_averaged" and isinstance(value, Tensor):  # StochasticWeightAveraging counts by itself
            yield name, value


def find_averages(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """Return the callbacks that keep a weight average: Lightning's two, and others.

    Args:
        callbacks: ``trainer.callbacks``.
    """
    return tuple(
        callback for callback in callbacks if any(is_average(value, name) for name, value in _attributes(callback))
    )


def frozen_twins(parameters: dict[str, Tensor]) -> set[str]:
    """Return the names of frozen parameters that are the same place of a copy: a teacher beside its student.

    Two names are of the same place if they end alike and differ only above the first number: ``teacher.layers.0.bias``
    and ``net.student.layers.0.bias``, but not the bias of layer 1.

    Example:
        >>> nets = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2).requires_grad_(False)})
        >>> sorted(frozen_twins(dict(nets.named_parameters())))
        ['teacher.bias', 'teacher.weight']
    """
    trained = {
        (ending, parameter.shape)
        for name, parameter in parameters.items()
        if parameter.requires_grad
        for ending in _endings(name)
    }
    return {
        name
        for name, parameter in parameters.items()
        if not parameter.requires_grad and any((ending, parameter.shape) in trained for ending in _endings(name))
    }


def _endings(name: str) -> Iterator[str]:
    parts = name.split(".")
    first_number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return (".".join(parts[place:]) for place in range(first_number + 1))


def _attributes(owner: object) -> Iterable[tuple[str, Any]]:
    return getattr(owner, "__dict__", {}).items()
