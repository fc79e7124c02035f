"""The matrices on the way into the residual stream of ANY ``nn.Module``: declared by its modules, or by a pattern.

stream --+--> norm --> [query, key, value] --> attention --> [writer] --(+)-->       value_path: value, writer
         +-----------------------------------------------------------^
stream --+--> norm --> [up, gate] --> activation --> [writer] ---------(+)-->        value_path: up, gate, writer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_norms.depth import Stack, clean_name, is_norm, join, stacks, unwrap

FUSED = re.compile(r"c_attn|in_proj|qkv|query_key_value")
MIXED = re.compile(r"query_key_value")  # GPT-NeoX, BLOOM, Falcon: query, key and value alternate by head


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

    @property
    def fused(self) -> bool:
        """Whether query, key and value share this matrix, so that only the value third is on the value path."""
        return not self.writer and FUSED.search(self.name) is not None


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
    writers = {id(matrix.parameter): matrix for matrix in residual_writers(module, pattern)}
    others = _checked(module, lambda _: set(), value_pattern, "value_pattern")
    for matrix in others:
        _check_thirds(matrix)
    return tuple(({id(matrix.parameter): matrix for matrix in others} | writers).values())


@torch.no_grad()
def scale_(matrix: Matrix, factor: float) -> None:
    """Multiply a matrix in place; of a fused qkv matrix [3d, d] (HF Conv1D: [d, 3d]) only the value third."""
    parameter: Any = matrix.parameter
    if not matrix.fused:
        local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.mul_(factor)
        return
    dimension = output_dimension(matrix.owner)
    length = parameter.shape[dimension]
    scaling = torch.ones(length, device=parameter.device, dtype=parameter.dtype)
    scaling[-(length // 3) :] = factor
    scaling = scaling.unsqueeze(1 - dimension)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        scaling = distribute_tensor(scaling.expand_as(parameter), parameter.device_mesh, parameter.placements)
    parameter.mul_(scaling)


def output_dimension(owner: nn.Module) -> int:
    """Which dimension of a matrix counts outputs: 0, but 1 in Hugging Face's transposed Conv1D."""
    return 1 if type(owner).__name__ == "Conv1D" else 0


def _check_thirds(matrix: Matrix) -> None:
    shape, dimension = tuple(matrix.parameter.shape), output_dimension(matrix.owner)
    known = len(shape) == 2 and not MIXED.search(matrix.name) and shape[dimension] == 3 * shape[1 - dimension]
    if matrix.fused and not known:
        raise ValueError(
            f"cannot find the value third of {matrix.name} {list(shape)}: expected [3d, d] in the order query, key, "
            "value. Leave it out of value_pattern."
        )


def describe(module: nn.Module) -> str:
    """What was seen of ``module``, for an error message: its stacks and the matrices of the first block."""
    found = stacks(module)
    if not found:
        return f"{type(module).__name__}: no list of repeated blocks (nn.ModuleList, nn.Sequential)"
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
            matrices = list(_matching(stack, index, block, declared(block), pattern, argument))
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


def _matching(
    stack: Stack, index: int, block: nn.Module, declared: set[int], pattern: str | None, argument: str
) -> Iterator[Matrix]:
    writers = _declared(block, "writer")
    for raw, parameter in block.named_parameters():
        name = join(join(stack.path, str(index)), clean_name(raw))
        owner = block.get_submodule(raw.rpartition(".")[0])
        if pattern is None:
            chosen = id(parameter) in declared
        else:
            chosen = bool(re.search(pattern, name)) and not name.endswith("bias") and not is_norm(owner)
        if chosen:
            writer = argument == "pattern" if pattern else id(parameter) in writers
            yield Matrix(name, parameter, owner, block, stack.label, index + 1, stack.layers, writer)


def _declared(block: nn.Module, attribute: str) -> set[int]:
    """Ids of the weights of the modules that any part of ``block`` names under ``attribute``."""
    named = [getattr(part, attribute, None) for part in block.modules()]
    modules = [m for each in named for m in (each if isinstance(each, tuple | list) else [each])]
    return {id(m.weight) for m in modules if isinstance(m, nn.Module) and hasattr(m, "weight")}


def _some(blocks: Sequence[str]) -> str:
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(blocks[:6])}{', ...' if len(blocks) > 6 else ''}"
