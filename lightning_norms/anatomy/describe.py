"""What was found in a module, in words: its stacks, their sublayers and residual writers. For people and for errors."""

from __future__ import annotations

from torch import nn

from lightning_norms.anatomy.names import clean_name, join, unwrap
from lightning_norms.anatomy.stacks import Stack, stacks
from lightning_norms.anatomy.sublayers import sublayers


def describe(module: nn.Module) -> str:
    """What is seen of ``module``: its stacks of blocks, and a block's sublayers, or its matrices if there are none.

    Example:
        >>> net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 2, enable_nested_tensor=False)
        >>> print(describe(net))
        layers: 2 x TransformerEncoderLayer; of layers.0:
          attention: self_attn.in_proj_weight -> self_attn.out_proj.weight
          feed_forward: linear1.weight -> linear2.weight
    """
    found = stacks(module)
    if not found:
        return f"{type(module).__name__}: no list of repeated blocks (nn.ModuleList, nn.Sequential)"
    return "\n".join(line for stack in found for line in _of_stack(stack))


def _of_stack(stack: Stack) -> list[str]:
    block, path = stack.blocks[0][1], stack.names[0]
    applied = f", run as {stack.layers} layers" if stack.layers > stack.blocks[-1][0] + 1 else ""
    kinds = " or ".join(dict.fromkeys(type(unwrap(each)).__name__ for _, each in stack.blocks))
    lines = [f"{stack.path}: {len(stack.blocks)} x {kinds}{applied}; of {path}:"]
    for sublayer in sublayers(block):
        readers = ", ".join(each.name for each in sublayer.readers)
        lines.append(f"  {sublayer.kind}: {readers} -> {sublayer.writer.name}")
    return (
        lines
        if len(lines) > 1
        else [lines[0].replace("; of", "; no sublayer recognised; matrices of"), *_matrices(path, block)]
    )


def _matrices(path: str, block: nn.Module) -> list[str]:
    matrices = [(join(path, clean_name(name)), p) for name, p in block.named_parameters() if p.ndim > 1]
    lines = [f"  {name} {list(p.shape)}" for name, p in matrices[:12]]
    return [*lines, *([f"  ... and {len(matrices) - 12} more"] if len(matrices) > 12 else [])]
