"""A module's stacks, their sublayers and residual writers in words: for people and for error messages."""

from __future__ import annotations

from torch import nn

from lightning_norms.anatomy.names import join, unwrap
from lightning_norms.anatomy.stacks import Block, Stack, find_stacks
from lightning_norms.anatomy.sublayers import find_sublayers, find_unclaimed

LISTED = 12  # matrices of a block that are in no sublayer, at most
DIFFERENT = 3  # blocks of a stack that differ, at most


def describe(module: nn.Module) -> str:
    """The stacks of blocks in ``module``, and a block's sublayers, or its matrices if there are none.

    Example:
        >>> net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 2, enable_nested_tensor=False)
        >>> print(describe(net))
        layers: 2 x TransformerEncoderLayer; of layers.0:
          attention: self_attn.in_proj_weight -> self_attn.out_proj.weight
          feed_forward: linear1.weight -> linear2.weight
    """
    stacks = find_stacks(module)
    if not stacks:
        return f"{type(module).__name__}: no list of repeated blocks (nn.ModuleList, nn.Sequential)"
    return "\n".join(line for stack in stacks for line in _describe_stack(stack))


def _describe_stack(stack: Stack) -> list[str]:
    applied = f", run as {stack.layers} layers" if stack.layers > stack.blocks[-1].index + 1 else ""
    kinds = " or ".join(dict.fromkeys(type(unwrap(block.module)).__name__ for block in stack.blocks))
    title = f"{stack.path}: {len(stack.blocks)} x {kinds}{applied};"
    different: dict[object, Block] = {}
    for block in stack.blocks:
        different.setdefault(tuple(_describe_block(block.module, "")), block)
    lines: list[str] = []
    for block in list(different.values())[:DIFFERENT]:
        recognised = f"of {block.name}:"
        what = recognised if find_sublayers(block.module) else f"no sublayer recognised; matrices {recognised}"
        lines += [f"{' ' if lines else title} {what}", *_describe_block(block.module, block.name)]
    return lines


def _describe_block(block: nn.Module, path: str) -> list[str]:
    sublayers = find_sublayers(block)
    readers = (", ".join(reader.name for reader in sublayer.readers) for sublayer in sublayers)
    lines = [f"  {s.kind}: {names} -> {s.writer.name}" for s, names in zip(sublayers, readers, strict=True)]
    others = [f"  {'? ' if sublayers else ''}{line}" for line in name_unclaimed(block, path)]
    more = [f"  ... and {len(others) - LISTED} more"] if len(others) > LISTED else []
    return [*lines, *others[:LISTED], *more]


def name_unclaimed(block: nn.Module, path: str) -> list[str]:
    """Names and shapes of the matrices of a block that no sublayer claims, though they may write into the stream."""
    unclaimed = find_unclaimed(block, find_sublayers(block))
    return [f"{join(path, matrix.name)} {list(matrix.parameter.shape)}" for matrix in unclaimed]
