"""Copies of the weights that people keep by hand: lists and dictionaries of shadow tensors, modules out of sight.

A container counts as a copy if its tensors have the shapes of parameters, in their order. So no name is asked for::

    self.shadow = ExponentialMovingAverage(...)    an object with a list          shadow.shadow_params.0, .1, ...
    self.ema = {name: tensor}                      a dictionary, in a callback    EMA.ema.<name>
    self.teacher = [copy.deepcopy(net)]            a module that is not a part    teacher.0.<name>
    self.flat = parameters_to_vector(...)          one long vector                flat
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_DEPTH = 4
_FOREIGN = ("torch", "lightning", "lightning_norms", "pytorch_lightning", "numpy", "pandas", "builtins", "functools")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SHADOW = re.compile(r"(?i)ema|average|shadow|teacher|slow")


class Place(NamedTuple):
    """Where a copied tensor, or the count of an averaging object, is kept."""

    path: str
    owner: Any
    """The object or dictionary whose entry it is."""
    name: str
    value: Any


def find_copies(module: nn.Module, owners: Sequence[Any], weights: Mapping[str, Tensor]) -> Iterator[Place]:
    """Yield every tensor of every copy of the weights, and the counters of plain objects that hold one.

    Args:
        module: the module; attributes of its parts are looked through.
        owners: other objects whose attributes are looked through, such as callbacks.
        weights: all parameters by name.
    """
    search = _Search(weights, module)
    for name, part in module.named_modules():
        yield from search.within(part, name)
    for number, owner in enumerate(owners):
        if not _is_foreign(owner, but_not="lightning"):
            yield from search.within(owner, f"{type(owner).__name__}({number})")


class _Search:
    def __init__(self, weights: Mapping[str, Tensor], module: nn.Module) -> None:
        self.weights = weights
        self.limit = 2 * len(weights) + 16  # longer lists are data
        buffers = (buffer for buffer in module.buffers() if not is_lazy(buffer))
        self.known = {_address(tensor) for tensor in (*weights.values(), *buffers)}
        self.parts = {id(part) for part in module.modules()}

    def within(self, root: Any, path: str) -> Iterator[Place]:
        """Search the attributes of a part of the module, or of an owner."""
        for name, value in vars(root).items():
            if name in _OF_EVERY_MODULE and isinstance(root, nn.Module):
                continue
            if isinstance(value, Tensor):
                if self._is_copy({name: value}):
                    yield self._place(path, root, name, value)
            else:
                yield from self._search(value, f"{path}.{name}", _DEPTH)

    def _search(self, holder: Any, path: str, depth: int) -> Iterator[Place]:
        items = self._items(holder)
        if not items or len(items) > self.limit or not depth:
            return
        tensors = {name: value for name, value in items.items() if isinstance(value, Tensor)}
        places: list[Place] = []
        if self._is_copy(tensors):
            places = [self._place(path, holder, name, tensor) for name, tensor in tensors.items()]
        for name, value in items.items():
            if not isinstance(value, Tensor):
                places += self._search(value, f"{path}.{name}", depth - 1)
        if places and not isinstance(holder, (Mapping, list, tuple, nn.Module)):
            places += [self._place(path, holder, name, value) for name, value in items.items() if _is_count(value)]
        yield from places

    def _items(self, holder: Any) -> dict[Any, Any]:
        if isinstance(holder, nn.Module):
            if id(holder) in self.parts:
                return {}
            tensors = (*holder.named_parameters(), *holder.named_buffers())
            return {name: tensor for name, tensor in tensors if _address(tensor) not in self.known}
        if isinstance(holder, Mapping):
            return dict(holder) if len(holder) <= self.limit else {}
        if isinstance(holder, (list, tuple)):
            return dict(enumerate(holder)) if len(holder) <= self.limit else {}
        return {} if _is_foreign(holder) else dict(getattr(holder, "__dict__", {}))

    def _is_copy(self, tensors: Mapping[Any, Tensor]) -> bool:
        """Whether these are values for parameters: by their names, by the order of their shapes, or all in one."""
        if not tensors or not all(_is_value(tensor) for tensor in tensors.values()):
            return False
        if any(_address(tensor) in self.known for tensor in tensors.values()):
            return False
        named = {str(name).removeprefix("module."): tensor.shape for name, tensor in tensors.items()}
        if self._have_names(named):
            return True
        shapes = list(named.values())
        if len(shapes) == 1:
            (name,) = named
            total = sum(weight.numel() for weight in self.weights.values() if weight.requires_grad)
            is_flat = len(shapes[0]) == 1 and shapes[0].numel() == total > 1
            return is_flat or (bool(_SHADOW.search(name)) and any(w.shape == shapes[0] for w in self.weights.values()))
        remaining = iter([weight.shape for weight in self.weights.values()])
        return all(shape in remaining for shape in shapes)  # in this order, maybe with gaps

    def _have_names(self, named: Mapping[str, Any]) -> bool:
        by_ending = {(name, weight.shape) for name, weight in self.weights.items()}
        if all((name, shape) in by_ending for name, shape in named.items()):
            return True
        endings = {(name[at + 1 :], shape) for name, shape in by_ending for at in _dots(name)}
        return all((name, shape) in endings and "." in name for name, shape in named.items())

    def _place(self, path: str, owner: Any, name: Any, value: Any) -> Place:
        return Place(f"{path}.{name}".lstrip("."), owner, name, value)


def _dots(name: str) -> Iterator[int]:
    return (at for at, letter in enumerate(name) if letter == ".")


def _is_value(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.grad_fn is None


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_foreign(value: Any, but_not: str = "") -> bool:
    package = type(value).__module__.partition(".")[0]
    return package in _FOREIGN and package != but_not


def _address(tensor: Tensor) -> tuple[int, int]:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return (tensor.data_ptr(), tensor.numel()) if is_plain else (id(tensor), 0)
