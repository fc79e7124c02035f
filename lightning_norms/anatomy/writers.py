"""The matrices on the way into the residual stream of ANY ``nn.Module``: declared, recognised, or named by a pattern.

stream --+--> norm --> [query, key, value] --> attention --> [writer] --(+)-->       value_path: value, writer
         +-----------------------------------------------------------^
stream --+--> norm --> [up, gate] --> activation --> [writer] ---------(+)-->        value_path: up, gate, writer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_norms.anatomy.depth import is_norm
from lightning_norms.anatomy.describe import describe, name_unclaimed
from lightning_norms.anatomy.fused_qkv import VALUE, Fused, is_fused, layout_of
from lightning_norms.anatomy.matrices import Projection, refuses_scaling
from lightning_norms.anatomy.names import clean_name, join, unwrap
from lightning_norms.anatomy.sharding import to_local
from lightning_norms.anatomy.skips import lacks_skip
from lightning_norms.anatomy.stacks import Block, Stack, find_stacks
from lightning_norms.anatomy.sublayers import Sublayer, find_sublayers

VALUE_READER = re.compile(r"^(w_?|to_?|linear_?|lin_?)?(v|value|values)(_?(proj|projection|lin|linear|weight))*$", re.I)


@dataclass(frozen=True)
class Matrix:
    """A weight on the way into the residual stream, and where it stands in depth: ``layer`` of ``layers``, from 1."""

    name: str
    parameter: nn.Parameter
    owner: nn.Module
    """The module that holds it: a Linear, or Hugging Face's transposed Conv1D."""
    block: nn.Module
    stack: str
    layer: int
    layers: int
    writer: bool
    """Whether its output is added to the stream; False for the rest of the value path."""
    fused: Fused | None = None
    """Where the value part stands, if query or key share this matrix: only that part is on the value path."""


@dataclass(frozen=True)
class _Selection:
    """The parameters that are selected in one block, by id."""

    selected: frozenset[int]
    writers: frozenset[int]
    count: int | None
    """How many there are, the same in every block; None where it may differ, as the number of experts does."""
    kinds: frozenset[str] = frozenset()
    """Kinds of the sublayers; the same in every block that has no ``count``."""
    doubts: tuple[str, ...] = ()
    """Matrices that no sublayer claims, and attentions without a value: nothing is selected by a guess."""


def residual_writers(module: nn.Module, pattern: str | None = None) -> tuple[Matrix, ...]:
    """The matrices whose output is added to the residual stream, each once, in depth order.

    ``pattern`` is a regular expression for their cleaned names. Without it they are the ``writer`` that sublayers of a
    block name themselves, else what the module tree and the shapes say. A ValueError says that nothing matches, or not
    the same in every block of a stack.
    """
    if pattern is None:
        return _collect(module, partial(_select, attribute="writer"), None, "pattern")
    return _collect(module, partial(_match, pattern=pattern, are_writers=True), pattern, "pattern")


def value_path(module: nn.Module, pattern: str | None = None, value_pattern: str | None = None) -> tuple[Matrix, ...]:
    """The matrices that a value passes on its way into the stream: value and output projection, both MLP matrices.

    ``pattern`` is a regular expression for the writers, ``value_pattern`` for the rest of the path. Without both they
    are the ``value_path`` that sublayers name themselves, else what is recognised: see :func:`residual_writers`.
    """
    if pattern is None and value_pattern is None:
        return _collect(module, partial(_select, attribute="value_path"), None, "pattern")
    if pattern is None or value_pattern is None:
        raise ValueError("this rule scales the whole value path: give both pattern= (writers) and value_pattern=")
    writers = {id(matrix.parameter): matrix for matrix in residual_writers(module, pattern)}
    match = partial(_match, pattern=value_pattern, are_writers=False)
    others = _collect(module, match, value_pattern, "value_pattern")
    return tuple(({id(matrix.parameter): matrix for matrix in others} | writers).values())


@torch.no_grad()
def scale_(matrix: Matrix, factor: float) -> None:
    """Multiply a matrix in place; of a fused qkv matrix [3d, d] (HF Conv1D: [d, 3d]) only the value part."""
    parameter: Any = matrix.parameter
    if matrix.fused is None:
        to_local(parameter).mul_(factor)
        return
    dimension = output_dimension(matrix.owner)
    scaling = torch.ones(parameter.shape[dimension], device=parameter.device, dtype=parameter.dtype)
    scaling[matrix.fused.rows(VALUE).to(scaling.device)] = factor
    scaling = scaling.unsqueeze(1 - dimension)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        scaling = distribute_tensor(scaling.expand_as(parameter), parameter.device_mesh, parameter.placements)
    parameter.mul_(scaling)


def output_dimension(owner: nn.Module) -> int:
    """Which dimension of a matrix counts outputs: 0, but 1 in Hugging Face's transposed Conv1D."""
    return 1 if type(owner).__name__ == "Conv1D" else 0


def _select(block: Block, attribute: str) -> _Selection:
    """What the block declares as ``attribute``, ``"writer"`` or ``"value_path"``, else what is recognised as that."""
    declared = _declared(block, attribute)
    if declared:
        return _Selection(declared, _declared(block, "writer"), len(declared))
    sublayers = find_sublayers(block.module)
    writers = frozenset(id(sublayer.writer.parameter) for sublayer in sublayers)
    doubts = name_unclaimed(block.module, block.name) if sublayers else []
    readers: list[Projection] = []
    for sublayer in sublayers if attribute == "value_path" else ():
        values = _readers_of_values(sublayer)
        doubts += [] if values else [f"the value part of {join(block.name, sublayer.readers[0].name)}"]
        readers += values
    # Attention and feed-forward may be blocks of their own (x-transformers); experts come in any number.
    count = len(sublayers) if len(sublayers) < 2 else None
    selected = writers.union(id(reader.parameter) for reader in readers)
    kinds = frozenset(sublayer.kind for sublayer in sublayers)
    return _Selection(selected, writers, count, kinds, tuple(doubts))


def _readers_of_values(sublayer: Sublayer) -> Sequence[Projection]:
    if sublayer.kind == "feed_forward":
        return sublayer.readers
    values = [reader for reader in sublayer.readers if VALUE_READER.match(reader.word)]
    return values or [reader for reader in sublayer.readers if is_fused(reader.name)]


def _match(block: Block, pattern: str, are_writers: bool) -> _Selection:
    selected = frozenset(
        id(parameter)
        for raw, parameter in block.module.named_parameters()
        if re.search(pattern, name := join(block.name, clean_name(raw)))
        and not name.endswith("bias")
        and not is_norm(block.module.get_submodule(raw.rpartition(".")[0]))
    )
    return _Selection(selected, selected if are_writers else _declared(block, "writer"), len(selected))


def _declared(block: Block, attribute: str) -> frozenset[int]:
    """Ids of the weights of the modules that any part of ``block`` names under ``attribute``."""
    declared = [getattr(part, attribute, None) for part in block.module.modules()]
    modules = [m for value in declared for m in (value if isinstance(value, tuple | list) else [value])]
    return frozenset(id(m.weight) for m in modules if isinstance(m, nn.Module) and hasattr(m, "weight"))


def _collect(
    module: nn.Module, select: Callable[[Block], _Selection], pattern: str | None, argument: str
) -> tuple[Matrix, ...]:
    matrices: dict[int, Matrix] = {}
    plain: list[str] = []
    what = f"{argument}={pattern!r}"
    for stack in find_stacks(module):
        selections = [select(block) for block in stack.blocks]
        doubts = [doubt for selection in selections for doubt in selection.doubts]
        if doubts:
            raise ValueError(_doubtful(module, doubts, argument))
        if _is_plain(module, stack, selections):
            plain.append(stack.path)
            continue
        uneven = _unevenness(stack, selections)
        if uneven:
            does_not = f"{what} does not match" if pattern else "the writers found do not cover"
            raise ValueError(f"{does_not} all blocks alike ({uneven}). Seen:\n{describe(module)}")
        for matrix in _matrices(stack, selections):
            matrices.setdefault(id(matrix.parameter), matrix)
    if not matrices and plain:
        raise ValueError(
            f"the blocks of {' and '.join(plain)} have no residual branches, since nothing passes around their "
            f"matrices: there is nothing to scale, or give {argument}= a regular expression. Seen:\n{describe(module)}"
        )
    if not matrices:
        nothing = f"{what} matches nothing" if pattern else "no residual writers were found"
        flat = any("_flat_param" in name for name, _ in module.named_parameters())
        then = "FSDP has merged the weights: use_orig_params=True" if flat else f"give {argument}= a regular expression"
        raise ValueError(f"{nothing}: {then}. Seen:\n{describe(module)}")
    return tuple(matrices.values())


def _is_plain(module: nn.Module, stack: Stack, selections: Sequence[_Selection]) -> bool:
    """Whether the blocks of a stack are known to have no skip; an attention does not stand without one."""
    if {kind for selection in selections for kind in selection.kinds} != {"feed_forward"}:
        return False
    return lacks_skip(module, stack, frozenset().union(*(selection.writers for selection in selections)))


def _doubtful(module: nn.Module, doubts: Sequence[str], argument: str) -> str:
    names = ", ".join(doubts[:3]) + (f" and {len(doubts) - 3} more" if len(doubts) > 3 else "")
    return (
        f"the residual writers are not certain, since no sublayer claims {names}: give {argument}= "
        r"a regular expression for the names of all writers, as r'(o_proj|down_proj)\.weight$'. "
        f"Seen:\n{describe(module)}"
    )


def _unevenness(stack: Stack, selections: Sequence[_Selection]) -> str:
    """Which blocks have how many matrices, where that should be the same; empty if it is, or if nothing is selected."""
    alike = len({selection.kinds if selection.count is None else selection.count for selection in selections}) == 1
    if alike or not any(selection.selected for selection in selections):
        return ""
    blocks: dict[int, list[str]] = {}
    for block, selection in zip(stack.blocks, selections, strict=True):
        blocks.setdefault(len(selection.selected), []).append(str(block.index))
    return "; ".join(f"{count} in {_some(indices)}" for count, indices in sorted(blocks.items()))


def _some(indices: Sequence[str]) -> str:
    return f"block{'s' if len(indices) > 1 else ''} {', '.join(indices[:6])}{', ...' if len(indices) > 6 else ''}"


def _matrices(stack: Stack, selections: Sequence[_Selection]) -> Iterator[Matrix]:
    """The matrices of a stack; attention and feed-forward that are listed as blocks of their own make one layer."""
    kinds = {kind for selection in selections for kind in selection.kinds}
    pairs = all(selection.count == 1 for selection in selections) and len(kinds) > 1
    for block, selection in zip(stack.blocks, selections, strict=True):
        for raw, parameter in block.module.named_parameters():
            if id(parameter) in selection.selected:
                matrix = _matrix(stack, block, raw, parameter, id(parameter) in selection.writers)
                yield replace(matrix, layer=block.index // 2 + 1, layers=(stack.layers + 1) // 2) if pairs else matrix


def _matrix(stack: Stack, block: Block, raw_name: str, parameter: nn.Parameter, is_writer: bool) -> Matrix:
    name = join(block.name, clean_name(raw_name))
    parts = raw_name.split(".")[:-1]
    if "parametrizations" in parts:
        parts = parts[: parts.index("parametrizations")]
    owner = unwrap(_part(block.module, parts))
    why = refuses_scaling(owner)
    if why:
        raise ValueError(f"{name} cannot be scaled: {why}. Rescale before parametrizing, or leave it out.")
    around = unwrap(_part(block.module, [part for part in parts if part != "base_layer"][:-1]))
    fused = layout_of(name, parameter, owner, around) if not is_writer and is_fused(name) else None
    return Matrix(name, parameter, owner, block.module, stack.label, block.index + 1, stack.layers, is_writer, fused)


def _part(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a submodule, also one whose name a method or property of its owner has: get_submodule sees only that."""
    for name in names:
        part = module._modules.get(name)
        module = module.get_submodule(name) if part is None else part  # a compiled module passes names on
    return module
