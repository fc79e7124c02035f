"""Copies of fresh weights that a run keeps beside its network: a teacher, a moving average, a list of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.anatomy.sharding import to_local
from lightning_norms.anatomy.writers import Matrix

DEPTH = 5  # containers and plain objects in each other, below a holder
REGISTERED = ("_parameters", "_buffers", "_modules")
AVERAGE = re.compile(r"ema|averag|shadow|teacher|target|momentum|slow|swa", re.IGNORECASE)
LONGEST = 10_000  # items of a container that is looked through: a data set is none


def find_equal_copies(
    matrices: Sequence[Matrix], holders: Iterable[object], factors: Sequence[float]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor that ``holders`` keep anywhere, and the trainable matrix that it equals.

    A copied network lists its blocks in the order of the original, which tells those apart that start alike, as those
    of nn.TransformerEncoder do. A frozen block of a stack that trains is no copy.
    """
    trained = {matrix.stack for matrix in matrices if matrix.parameter.requires_grad}
    own = {id(matrix.parameter) for matrix in matrices if matrix.stack in trained}
    originals = [matrix.parameter for matrix in matrices if matrix.parameter.requires_grad]
    pointers = {to_local(original).data_ptr() for original in originals}
    matched: Counter[tuple[int, ...]] = Counter()
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in {id(tensor): tensor for holder in holders for tensor in _tensors(holder, DEPTH, set())}.values():
        if id(tensor) in own or to_local(tensor).data_ptr() in pointers:
            continue
        equal = tuple(i for i, original in enumerate(originals) if _are_equal(tensor, original))
        if equal:
            alike = len({factors[i] for i in equal}) == 1
            pairs.append((tensor, originals[equal[0 if alike else matched[equal] % len(equal)]]))
            matched[equal] += 1
    return pairs


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(to_local(one.detach()), to_local(other.detach()))


def _tensors(value: Any, depth: int, visited: set[int], is_copy: bool = False) -> Iterator[Tensor]:
    """Every matrix below ``value``, in order; in containers only where ``is_copy``, since they may record a start."""
    if isinstance(value, Tensor):
        if is_copy and value.is_floating_point() and value.ndim > 1 and not value.is_meta:
            yield value
        return
    if depth < 0 or id(value) in visited or has_class_name(value, "Trainer", "Optimizer", "Dataset"):
        return
    visited.add(id(value))
    for part, is_copied in _parts(value, is_copy, depth == DEPTH):
        yield from _tensors(part, depth if isinstance(part, nn.Module) else depth - 1, visited, is_copied)


def _parts(value: Any, is_copy: bool, is_holder: bool) -> list[tuple[Any, bool]]:
    if isinstance(value, dict):
        return [(part, is_copy) for part in list(value.values())[:LONGEST]]
    if isinstance(value, list | tuple | set | frozenset):
        return [(part, is_copy) for part in value] if len(value) <= LONGEST else []
    if isinstance(value, type):
        return []
    attributes = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in REGISTERED}
    parts = []
    if isinstance(value, nn.Module):
        registered = (value._parameters, value._buffers, value._modules)
        parts = [(part, True) for group in registered for part in group.values()]
    is_own = not is_holder and not isinstance(value, nn.Module)  # an object that keeps averages
    return parts + [(part, is_own or AVERAGE.search(name) is not None) for name, part in attributes.items()]
