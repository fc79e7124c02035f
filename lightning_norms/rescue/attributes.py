"""Attributes of modules that a forward pass may change, such as counters, queues, metrics: kept and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Put every attribute of ``module`` and its parts back afterwards: what it refers to, and what a container holds.

    A list in a list, and what lives outside of modules, is not looked into.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer.calls, layer.queue = 0, [1]
        >>> with kept_attributes(layer):
        ...     layer.calls, layer.new = 5, True
        ...     layer.queue.append(2)
        >>> layer.calls, layer.queue, hasattr(layer, "new")
        (0, [1], False)
    """
    kept = [(part, dict(vars(part)), _undo_all(vars(part).values())) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, undo in kept:
            vars(part).clear()
            vars(part).update(attributes)
            for put_back in undo:
                put_back()


def _undo_all(values: Any) -> list[Callable[[], None]]:
    undo = (_undo(value) for value in values)
    return [put_back for put_back in undo if put_back is not None]


def _undo(value: Any) -> Callable[[], None] | None:
    """What puts the contents of a value back; None for what is not looked into."""
    if isinstance(value, Tensor):
        return _undo_tensor(value)
    if isinstance(value, torch.Generator):
        return _undo_generator(value)
    if isinstance(value, list | set | dict | deque):
        return _undo_container(value, value.copy())
    return None


def _undo_generator(value: torch.Generator) -> Callable[[], None]:
    state = value.get_state()

    def put_back() -> None:
        value.set_state(state)

    return put_back


@torch.no_grad()
def _undo_tensor(value: Tensor) -> Callable[[], None]:
    copy = value.detach().clone()

    def put_back() -> None:
        value.data.copy_(copy)

    return put_back


def _undo_container(value: Any, copy: Any) -> Callable[[], None]:
    extend = value.update if isinstance(value, set | dict) else value.extend

    def put_back() -> None:
        if type(value) in (list, set, dict, deque) or value != copy:
            value.clear()
            extend(copy)

    return put_back
