"""The repeated blocks of ANY ``nn.Module``, lowest first: what depth is counted in.

A stack is an ``nn.ModuleList``, ``nn.Sequential`` or digit-keyed ``nn.ModuleDict`` of blocks. Lists inside a block
(experts, sublayers) are no depth of their own; lists of lists of blocks (Swin's stages) are one stack, counted through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_norms.anatomy.names import clean_name, join, unwrap
from lightning_norms.anatomy.sublayers import find_sublayers

APPLICATIONS: dict[str, Callable[[Any], int]] = {
    "AlbertTransformer": lambda encoder: encoder.config.num_hidden_layers,
}
"""Owners of a stack whose blocks run more often than they are listed: class name -> number of layers."""


@dataclass(frozen=True)
class Block:
    """One of the repeated modules of a stack; ``index`` is its depth, the lowest one where it runs at several."""

    index: int
    name: str
    module: nn.Module


@dataclass(frozen=True)
class Stack:
    """Repeated blocks in depth order."""

    path: str
    label: str
    """Empty when the module has one stack, else what tells it from the others: ``"encoder"``."""
    blocks: tuple[Block, ...]
    layers: int
    """Number of layers, L; more than there are blocks where blocks share their weights."""
    compiled: bool = False
    """Whether the whole stack runs inside a compiled region, where hooks on blocks do not fire reliably."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The group of each block."""
        return tuple(self.group(block.index) for block in self.blocks)

    def group(self, index: int) -> str:
        """Name of block ``index``, padded so that names sort by depth: ``"block_02"``."""
        return join(self.label, f"block_{index:0{max(2, len(str(self.layers - 1)))}d}")

    def group_of(self, name: str) -> str | None:
        """The group of the block that holds the parameter with this cleaned name; None outside of this stack."""
        return next((self.group(block.index) for block in self.blocks if f"{name}.".startswith(f"{block.name}.")), None)


def find_stacks(module: nn.Module) -> tuple[Stack, ...]:
    """The outermost lists of blocks in ``module``, in the order in which they were registered."""
    outermost: list[Stack] = []
    for name, candidate in module.named_modules():
        path = clean_name(name)
        if any(not stack.path or path.startswith(stack.path + ".") for stack in outermost):
            continue
        listed = _listed(candidate, path)
        if listed:
            owner = unwrap(module.get_submodule(name.rpartition(".")[0]))
            outermost.append(_stack(path, _through_stages(listed), owner, _is_compiled(module, name)))
    labels = _labels([stack.path for stack in outermost])
    return tuple(replace(stack, label=label) for stack, label in zip(outermost, labels, strict=True))


def _stack(path: str, listed: Sequence[Block], owner: nn.Module, compiled: bool) -> Stack:
    unique = {id(block.module): block for block in reversed(listed)}
    blocks = tuple(sorted(unique.values(), key=lambda block: block.index))
    count_layers = APPLICATIONS.get(type(owner).__name__)
    layers = count_layers(owner) if count_layers else listed[-1].index + 1
    return Stack(path, "", blocks, layers, compiled)


def _listed(candidate: nn.Module, path: str) -> list[Block]:
    """The numbered children of a list of blocks, repeats among them; empty when ``candidate`` is no such list."""
    is_list = isinstance(candidate, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    if not is_list or isinstance(candidate, ParametrizationList):
        return []
    if isinstance(candidate, nn.ModuleDict) and not all(key.isdigit() for key in candidate):
        return []
    numbered = [(key, child) for key, child in candidate._modules.items() if key.isdigit() and child is not None]
    inner = [unwrap(child) for _, child in numbered]
    # A Sequential also serves as a plain pipeline: only repeats of one class make it a stack.
    if isinstance(candidate, nn.Sequential) and (len(inner) < 2 or len({type(child) for child in inner}) > 1):
        return []
    if not all(any(True for _ in child.children()) and any(True for _ in child.parameters()) for child in inner):
        return []
    return sorted((Block(int(key), join(path, key), child) for key, child in numbered), key=lambda block: block.index)


def _through_stages(listed: list[Block]) -> list[Block]:
    """The blocks of all stages counted through, where the listed modules are stages; else the listed ones."""
    stages = ((stage.name, block) for stage in listed for block in _whole_blocks(unwrap(stage.module)))
    inner = [Block(index, join(name, block.name), block.module) for index, (name, block) in enumerate(stages)]
    return listed if len(inner) < len(listed) else inner


def _whole_blocks(stage: nn.Module) -> list[Block]:
    """The blocks listed inside a stage, each with an attention or other sublayer *and* a feed-forward of its own."""
    for name, candidate in stage.named_modules():
        listed = _listed(candidate, clean_name(name)) if name else []
        if listed and all(len({sublayer.kind for sublayer in find_sublayers(block.module)}) > 1 for block in listed):
            return listed
    return []


def _is_compiled(module: nn.Module, name: str) -> bool:
    parts = name.split(".") if name else []
    around = [module, *(module.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))]
    return "_orig_mod" in parts or any(getattr(owner, "_compiled_call_impl", None) is not None for owner in around)


def _labels(paths: Sequence[str]) -> list[str]:
    """The shortest path parts that tell the stacks apart; one stack needs none."""
    parts = [path.split(".") for path in paths]
    while len(parts) > 1 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    length = next(n for n in range(99) if len({tuple(part[:n]) for part in parts}) == len(parts))
    return [".".join(part[:length]) for part in parts]
