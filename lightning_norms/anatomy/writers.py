"""The matrices on the way into the residual stream of ANY ``nn.Module``: declared, found, or named by a pattern.

stream --+--> norm --> [query, key, value] --> attention --> [writer] --(+)-->       value_path: value, writer
         +-----------------------------------------------------------^
stream --+--> norm --> [up, gate] --> activation --> [writer] ---------(+)-->        value_path: up, gate, writer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_norms.anatomy.depth import is_norm
from lightning_norms.anatomy.describe import describe
from lightning_norms.anatomy.fused_qkv import VALUE, Fused, is_fused, layout_of
from lightning_norms.anatomy.matrices import Projection, refuses_scaling
from lightning_norms.anatomy.names import clean_name, join, unwrap
from lightning_norms.anatomy.stacks import Stack, stacks
from lightning_norms.anatomy.sublayers import Sublayer, sublayers

VALUE_READER = re.compile(r"^(w_?|to_?|linear_?|lin_?)?(v|value|values)(_?(proj|projection|lin|linear|weight))*$", re.I)


@dataclass(frozen=True)
class Matrix:
    """A weight on the way into the residual stream, and where it stands in depth."""

    name: str
    """Cleaned name of the parameter."""
    parameter: nn.Parameter
    owner: nn.Module
    """The module that holds it: a Linear, or Hugging Face's transposed Conv1D."""
    block: nn.Module
    stack: str
    """Label of the stack, empty when there is one."""
    layer: int
    """1-based."""
    layers: int
    """L of its stack."""
    writer: bool
    """Whether its output is added to the stream; False for the rest of the value path."""
    fused: Fused | None = None
    """Where the value part stands, if query or key share this matrix: only that part is on the value path."""


@dataclass(frozen=True)
class _Choice:
    """What was chosen in a block."""

    chosen: frozenset[int]
    """Ids of parameters."""
    writers: frozenset[int]
    evenness: Hashable
    """Must be the same in all blocks of a stack."""
    kinds: frozenset[str] = frozenset()


_Chooser = Callable[[str, nn.Module], _Choice]
"""From a block's cleaned name and the block to what is chosen in it."""


def residual_writers(module: nn.Module, pattern: str | None = None) -> tuple[Matrix, ...]:
    r"""The matrices whose output is added to the residual stream: attention output and MLP down projection.

    Args:
        module: any module with a stack of blocks.
        pattern: regular expression searched for in the cleaned parameter names inside the blocks, for instance
            ``r"(o_proj|down_proj)\.weight"``. Without it: the ``writer`` that sublayers of a block name themselves,
            else what the module tree and the shapes say (:func:`lightning_norms.anatomy.sublayers.sublayers`).

    Returns:
        Every matrix once, in depth order.

    Raises:
        ValueError: nothing was found, or not the same in every block of a stack.

    Example:
        >>> net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 2, enable_nested_tensor=False)
        >>> [matrix.name for matrix in residual_writers(net)][:2]
        ['layers.0.self_attn.out_proj.weight', 'layers.0.linear2.weight']
    """
    choose = _found_writers if pattern is None else _by_pattern(pattern, are_writers=True)
    return _collect(module, choose, pattern, "pattern")


def value_path(module: nn.Module, pattern: str | None = None, value_pattern: str | None = None) -> tuple[Matrix, ...]:
    """The matrices that a value passes on its way into the stream: value and output projection, both MLP matrices.

    Args:
        module: any module with a stack of blocks.
        pattern: as in :func:`residual_writers`.
        value_pattern: the same for the other matrices of the path (value, fused qkv, MLP up). Without both: the
            ``value_path`` that sublayers of a block name themselves, else what the module tree and the shapes say.

    Raises:
        ValueError: nothing was found, not the same in every block of a stack, or only one pattern was given.
    """
    if pattern is None and value_pattern is None:
        return _collect(module, _found_value_path, None, "pattern")
    if pattern is None or value_pattern is None:
        raise ValueError("this rule scales the whole value path: give both pattern= (writers) and value_pattern=")
    writers = {id(matrix.parameter): matrix for matrix in residual_writers(module, pattern)}
    others = _collect(module, _by_pattern(value_pattern, are_writers=False), value_pattern, "value_pattern")
    return tuple(({id(matrix.parameter): matrix for matrix in others} | writers).values())


@torch.no_grad()
def scale_(matrix: Matrix, factor: float) -> None:
    """Multiply a matrix in place; of a fused qkv matrix [3d, d] (HF Conv1D: [d, 3d]) only the value part."""
    parameter: Any = matrix.parameter
    if matrix.fused is None:
        local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.mul_(factor)
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


# --- what is chosen in a block --------------------------------------------------------------------------------------


def _found_writers(_: str, block: nn.Module) -> _Choice:
    writers = _declared(block, "writer")
    return _Choice(writers, writers, len(writers)) if writers else _found(block, lambda each: [each.writer])


def _found_value_path(_: str, block: nn.Module) -> _Choice:
    declared = _declared(block, "value_path")
    return _Choice(declared, _declared(block, "writer"), len(declared)) if declared else _found(block, _path_of)


def _found(block: nn.Module, wanted: Callable[[Sublayer], Sequence[Projection]]) -> _Choice:
    found = sublayers(block)
    chosen = frozenset(id(each.parameter) for sublayer in found for each in wanted(sublayer))
    writers = frozenset(id(sublayer.writer.parameter) for sublayer in found)
    kinds = frozenset(sublayer.kind for sublayer in found)
    # Attention and feed-forward may be blocks of their own (x-transformers); experts come in any number.
    return _Choice(chosen, writers, len(found) if len(found) < 2 else kinds, kinds)


def _path_of(sublayer: Sublayer) -> Sequence[Projection]:
    if sublayer.kind == "feed_forward":
        return (*sublayer.readers, sublayer.writer)
    values = [each for each in sublayer.readers if VALUE_READER.match(each.word)]
    return (*(values or [each for each in sublayer.readers if is_fused(each.name)]), sublayer.writer)


def _by_pattern(pattern: str, are_writers: bool) -> _Chooser:
    def choose(path: str, block: nn.Module) -> _Choice:
        chosen = frozenset(
            id(parameter)
            for raw, parameter in block.named_parameters()
            if re.search(pattern, name := join(path, clean_name(raw)))
            and not name.endswith("bias")
            and not is_norm(block.get_submodule(raw.rpartition(".")[0]))
        )
        return _Choice(chosen, chosen if are_writers else _declared(block, "writer"), len(chosen))

    return choose


def _declared(block: nn.Module, attribute: str) -> frozenset[int]:
    """Ids of the weights of the modules that any part of ``block`` names under ``attribute``."""
    named = [getattr(part, attribute, None) for part in block.modules()]
    modules = [m for each in named for m in (each if isinstance(each, tuple | list) else [each])]
    return frozenset(id(m.weight) for m in modules if isinstance(m, nn.Module) and hasattr(m, "weight"))


# --- over all blocks ------------------------------------------------------------------------------------------------


def _collect(module: nn.Module, choose: _Chooser, pattern: str | None, argument: str) -> tuple[Matrix, ...]:
    found: dict[int, Matrix] = {}
    given = f"{argument}={pattern!r}"
    for stack in stacks(module):
        choices = [choose(name, block) for name, (_, block) in zip(stack.names, stack.blocks, strict=True)]
        if any(choice.chosen for choice in choices):
            _check_even(
                module, stack, choices, f"{given} does not match" if pattern else "the writers found do not cover"
            )
        pairs = _pairs(choices)
        for (index, block), name, choice in zip(stack.blocks, stack.names, choices, strict=True):
            for matrix in _matrices(stack, index, name, block, choice):
                layer = replace(matrix, layer=index // 2 + 1, layers=(stack.layers + 1) // 2) if pairs else matrix
                found.setdefault(id(matrix.parameter), layer)
    if not found:
        flat = any("_flat_param" in name for name, _ in module.named_parameters())
        what = f"{given} matches nothing" if pattern else "no residual writers were found"
        then = "FSDP has merged the weights: use_orig_params=True" if flat else f"give {argument}= a regular expression"
        raise ValueError(f"{what}: {then}. Seen:\n{describe(module)}")
    return tuple(found.values())


def _check_even(module: nn.Module, stack: Stack, choices: Sequence[_Choice], what: str) -> None:
    if len({choice.evenness for choice in choices}) > 1:
        counts: dict[int, list[str]] = {}
        for (index, _), choice in zip(stack.blocks, choices, strict=True):
            counts.setdefault(len(choice.chosen), []).append(str(index))
        listed = "; ".join(f"{count} in {_some(blocks)}" for count, blocks in sorted(counts.items()))
        raise ValueError(f"{what} all blocks alike ({listed}). Seen:\n{describe(module)}")


def _pairs(choices: Sequence[_Choice]) -> bool:
    """Whether attention and feed-forward are listed as blocks of their own, so that two make a layer."""
    kinds = [choice.kinds for choice in choices]
    return all(choice.evenness == 1 for choice in choices) and len(frozenset().union(*kinds)) > 1


def _matrices(stack: Stack, index: int, path: str, block: nn.Module, choice: _Choice) -> Iterator[Matrix]:
    for raw, parameter in block.named_parameters():
        if id(parameter) in choice.chosen:
            name = join(path, clean_name(raw))
            owner, around = _owner(block, raw)
            why = refuses_scaling(owner)
            if why:
                raise ValueError(f"{name} cannot be scaled: {why}. Rescale before parametrizing, or leave it out.")
            writer = id(parameter) in choice.writers
            fused = layout_of(name, parameter, owner, around) if not writer and is_fused(name) else None
            yield Matrix(name, parameter, owner, block, stack.label, index + 1, stack.layers, writer, fused)


def _owner(block: nn.Module, raw_name: str) -> tuple[nn.Module, nn.Module]:
    """The module whose matrix a parameter is, past a parametrization and adapters, and the module around it."""
    parts = raw_name.split(".")[:-1]
    if "parametrizations" in parts:
        parts = parts[: parts.index("parametrizations")]
    around = [part for part in parts if part != "base_layer"][:-1]
    return unwrap(block.get_submodule(".".join(parts))), unwrap(block.get_submodule(".".join(around)))


def _some(blocks: Sequence[str]) -> str:
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(blocks[:6])}{', ...' if len(blocks) > 6 else ''}"
