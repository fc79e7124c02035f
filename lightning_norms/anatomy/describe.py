"""A module's stacks, their sublayers and residual writers in words: for people and for error messages."""

from __future__ import annotations

from torch import nn

from lightning_norms.anatomy.names import clean_name, join, unwrap
from lightning_norms.anatomy.stacks import Stack, find_stacks
from lightning_norms.anatomy.sublayers import find_sublayers

LISTED = 12  # matrices of a block without recognised sublayers, at most


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
    first = stack.blocks[0]
    applied = f", run as {stack.layers} layers" if stack.layers > stack.blocks[-1].index + 1 else ""
    kinds = " or ".join(dict.fromkeys(type(unwrap(block.module)).__name__ for block in stack.blocks))
    title = f"{stack.path}: {len(stack.blocks)} x {kinds}{applied};"
    sublayers = find_sublayers(first.module)
    if not sublayers:
        matrices = [(clean_name(name), p.shape) for name, p in first.module.named_parameters() if p.ndim > 1]
        lines = [f"  {join(first.name, name)} {list(shape)}" for name, shape in matrices[:LISTED]]
        more = [f"  ... and {len(matrices) - LISTED} more"] if len(matrices) > LISTED else []
        return [f"{title} no sublayer recognised; matrices of {first.name}:", *lines, *more]
    readers = (", ".join(reader.name for reader in sublayer.readers) for sublayer in sublayers)
    lines = [f"  {s.kind}: {names} -> {s.writer.name}" for s, names in zip(sublayers, readers, strict=True)]
    return [f"{title} of {first.name}:", *lines]
