"""The repeated blocks of ANY ``nn.Module``, lowest first: what depth is counted in.

A stack is an ``nn.ModuleList``, ``nn.Sequential`` or digit-keyed ``nn.ModuleDict`` of blocks. Lists inside a block
(experts, sublayers) are no depth of their own; lists of lists of blocks (Swin's stages) are one stack, counted through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_norms.anatomy.names import clean_name, join, unwrap
from lightning_norms.anatomy.sublayers import sublayers

APPLICATIONS: dict[str, Callable[[Any], int]] = {
    "AlbertTransformer": lambda encoder: encoder.config.num_hidden_layers,
}
"""Owners of a stack whose blocks run more often than they are listed: class name -> number of layers."""


@dataclass(frozen=True)
class Stack:
    """Repeated blocks in depth order."""

    path: str
    """Cleaned name of the list that holds the blocks."""
    label: str
    """Empty when the module has one stack, else what tells it from the others: ``"encoder"``."""
    blocks: tuple[tuple[int, nn.Module], ...]
    """Pairs (index as a number, block), lowest first; a block that runs at several depths stands at its lowest."""
    names: tuple[str, ...]
    """Cleaned name of each block."""
    layers: int
    """Number of layers, L; more than there are blocks where blocks share their weights."""
    compiled: bool = False
    """Whether the whole stack runs inside a compiled region, where hooks on blocks do not fire reliably."""

    def group(self, index: int) -> str:
        """Name of block ``index``, padded so that names sort by depth: ``"block_02"``."""
        return join(self.label, f"block_{index:0{max(2, len(str(self.layers - 1)))}d}")

    def group_of(self, name: str) -> str | None:
        """The block that a parameter's cleaned name stands in, None if in none of this stack."""
        parts = name.split(".")
        beginnings = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        index = next((self._by_name[each] for each in beginnings if each in self._by_name), None)
        return None if index is None else self.group(index)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: index for (index, _), name in zip(self.blocks, self.names, strict=True)}


def stacks(module: nn.Module) -> tuple[Stack, ...]:
    """The outermost lists of blocks in ``module``, in the order in which they were registered."""
    found: list[Stack] = []
    for name, candidate in module.named_modules():
        path = clean_name(name)
        if any(not stack.path or path.startswith(stack.path + ".") for stack in found):
            continue
        listed = [(key, join(path, str(key)), block) for key, block in _listed(candidate)]
        if listed:
            owner = unwrap(module.get_submodule(name.rpartition(".")[0]))
            found.append(_stack(path, _through_stages(listed), owner, _compiled(module, name)))
    labels = _labels([stack.path for stack in found])
    return tuple(replace(stack, label=label) for stack, label in zip(found, labels, strict=True))


def _stack(path: str, listed: Sequence[tuple[int, str, nn.Module]], owner: nn.Module, compiled: bool) -> Stack:
    unique = {id(block): (index, name, block) for index, name, block in reversed(listed)}
    lowest = sorted(unique.values(), key=lambda each: each[0])
    applied = APPLICATIONS.get(type(owner).__name__)
    layers = applied(owner) if applied else listed[-1][0] + 1
    blocks = tuple((index, block) for index, _, block in lowest)
    return Stack(path, "", blocks, tuple(name for _, name, _ in lowest), layers, compiled)


def _listed(candidate: nn.Module) -> list[tuple[int, nn.Module]]:
    """The numbered children of a list of blocks, repeats among them; empty when ``candidate`` is no such list."""
    if isinstance(candidate, ParametrizationList):
        return []
    if isinstance(candidate, nn.ModuleDict) and not all(key.isdigit() for key in candidate):
        return []
    if not isinstance(candidate, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    children = [(int(key), child) for key, child in candidate._modules.items() if key.isdigit() and child is not None]
    children.sort(key=lambda pair: pair[0])
    inner = [unwrap(child) for _, child in children]
    composite = all(any(True for _ in c.children()) and any(True for _ in c.parameters()) for c in inner)
    # A Sequential also serves as a plain pipeline: only repeats of one class make it a stack.
    if isinstance(candidate, nn.Sequential) and (len(inner) < 2 or len({type(child) for child in inner}) > 1):
        return []
    return children if composite else []


def _through_stages(listed: Sequence[tuple[int, str, nn.Module]]) -> list[tuple[int, str, nn.Module]]:
    """The blocks of all stages counted through, where the listed modules are stages; else what was given."""
    inner = [(name + "." + path, block) for _, name, stage in listed for path, block in _whole_blocks(unwrap(stage))]
    if len(inner) < len(listed):
        return list(listed)
    return [(index, name, block) for index, (name, block) in enumerate(inner)]


def _whole_blocks(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks listed inside a stage, each with an attention or other sublayer *and* a feed-forward of its own."""
    for name, candidate in stage.named_modules():
        listed = _listed(candidate) if name else []
        if listed and all(len({each.kind for each in sublayers(block)}) > 1 for _, block in listed):
            yield from ((clean_name(join(name, str(key))), block) for key, block in listed)
            return


def _compiled(module: nn.Module, name: str) -> bool:
    parts = name.split(".") if name else []
    around = [module, *(module.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))]
    return "_orig_mod" in parts or any(getattr(each, "_compiled_call_impl", None) is not None for each in around)


def _labels(paths: Sequence[str]) -> list[str]:
    """The shortest path parts that tell the stacks apart; one stack needs none."""
    if len(paths) < 2:
        return [""] * len(paths)
    parts = [path.split(".") for path in paths]
    while len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    length = next(n for n in range(1, 99) if len({tuple(part[:n]) for part in parts}) == len(parts))
    return [".".join(part[:length]) for part in parts]
