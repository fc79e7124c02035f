"""The matrices on the way into the residual stream of ANY ``nn.Module``: declared by its modules, or by a pattern.

stream --+--> norm --> [query, key, value] --> attention --> [writer] --(+)-->       value_path: value, writer
         +-----------------------------------------------------------^
stream --+--> norm --> [up, gate] --> activation --> [writer] ---------(+)-->        value_path: up, gate, writer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_norms.depth import Stack, clean_name, is_norm, join, stacks, unwrap


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


def residual_writers(module: nn.Module, pattern: str | None = None) -> tuple[Matrix, ...]:
    r"""The matrices whose output is added to the residual stream: attention output and MLP down projection.

    Args:
        module: any module with a stack of blocks.
        pattern: regular expression searched for in the cleaned parameter names inside the blocks, for instance
            ``r"(o_proj|down_proj)\.weight"``. Without it: the ``writer`` that sublayers of a block name themselves.

    Returns:
        Every matrix once, in depth order.

    Raises:
        ValueError: nothing was found, or not the same number in every block of a stack.
    """
    return _checked(module, lambda block: _declared(block, "writer"), pattern, "pattern")


def value_path(module: nn.Module, pattern: str | None = None, value_pattern: str | None = None) -> tuple[Matrix, ...]:
    """The matrices that a value passes on its way into the stream: value and output projection, both MLP matrices.

    Args:
        module: any module with a stack of blocks.
        pattern: as in :func:`residual_writers`.
        value_pattern: the same for the other matrices of the path (value, fused qkv, MLP up). Without both: the
            ``value_path`` that sublayers of a block name themselves.

    Raises:
        ValueError: nothing was found, not the same number in every block of a stack, or only one pattern was given.
    """
    if pattern is None and value_pattern is None:
        return _checked(module, lambda block: _declared(block, "value_path"), None, "pattern")
    if pattern is None or value_pattern is None:
        raise ValueError("this rule scales the whole value path: give both pattern= (writers) and value_pattern=")
    both = (*residual_writers(module, pattern), *_checked(module, lambda _: set(), value_pattern, "value_pattern"))
    return tuple({id(matrix.parameter): matrix for matrix in both}.values())


def describe(module: nn.Module) -> str:
    """What was seen of ``module``, for an error message: its stacks and the matrices of the first block."""
    found = stacks(module)
    if not found:
        return f"{type(module).__name__}: no nn.ModuleList or nn.Sequential of repeated blocks"
    lines = []
    for stack in found:
        index, block = stack.blocks[0]
        path = join(stack.path, str(index))
        lines.append(f"{stack.path}: {len(stack.blocks)} x {type(unwrap(block)).__name__}; matrices of {path}:")
        matrices = [(clean_name(name), p) for name, p in block.named_parameters() if p.ndim > 1]
        lines += [f"  {path}.{name} {list(p.shape)}" for name, p in matrices[:12]]
        lines += [f"  ... and {len(matrices) - 12} more"] if len(matrices) > 12 else []
    return "\n".join(lines)


def _checked(
    module: nn.Module, declared: Callable[[nn.Module], set[int]], pattern: str | None, argument: str
) -> tuple[Matrix, ...]:
    found: dict[int, Matrix] = {}
    for stack in stacks(module):
        counts: dict[int, list[str]] = {}
        for index, block in stack.blocks:
            matrices = list(_matching(stack, index, block, declared(block), pattern))
            counts.setdefault(len(matrices), []).append(str(index))
            for matrix in matrices:
                found.setdefault(id(matrix.parameter), matrix)
        if len(counts) > 1:
            seen = "; ".join(f"{n} in {_some(blocks)}" for n, blocks in sorted(counts.items()))
            raise ValueError(
                f"{argument}={pattern!r} does not match all blocks alike ({seen}). Seen:\n{describe(module)}"
            )
    if not found:
        what = f"{argument}={pattern!r} matches nothing" if pattern else "no block names its residual writers"
        raise ValueError(f"{what}: give {argument}= a regular expression. Seen:\n{describe(module)}")
    return tuple(found.values())


def _matching(stack: Stack, index: int, block: nn.Module, declared: set[int], pattern: str | None) -> Iterator[Matrix]:
    for raw, parameter in block.named_parameters():
        name = join(join(stack.path, str(index)), clean_name(raw))
        owner = block.get_submodule(raw.rpartition(".")[0])
        if pattern is None:
            chosen = id(parameter) in declared
        else:
            chosen = bool(re.search(pattern, name)) and not name.endswith("bias") and not is_norm(owner)
        if chosen:
            yield Matrix(name, parameter, owner, block, stack.label, index + 1, stack.layers)


def _declared(block: nn.Module, attribute: str) -> set[int]:
    """Ids of the weights of the modules that any part of ``block`` names under ``attribute``."""
    named = [getattr(part, attribute, None) for part in block.modules()]
    modules = [m for each in named for m in (each if isinstance(each, tuple | list) else [each])]
    return {id(m.weight) for m in modules if isinstance(m, nn.Module) and hasattr(m, "weight")}


def _some(blocks: Sequence[str]) -> str:
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(blocks[:6])}{', ...' if len(blocks) > 6 else ''}"
