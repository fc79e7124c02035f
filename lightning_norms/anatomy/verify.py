"""The functional check of residual writers: what they are, shown by running the network.

With the writers of a stack at zero, no other matrix of its blocks reaches the output; with any one of them back, it
does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_norms.anatomy.depth import DepthMap
from lightning_norms.anatomy.stacks import Stack
from lightning_norms.anatomy.writers import Matrix

LISTED = 6  # leaks of a stack that are named, at most
TOLERANCE = 1e-4  # of the largest output


@dataclass(frozen=True)
class Finding:
    """What contradicts the claim that some matrices are the residual writers."""

    kind: Literal["leak", "idle", "unused"]
    """``leak``: another matrix of the blocks reaches the output; ``idle``: a writer does not; ``unused``: the run does
    not depend on this stack or matrix, so that it shows nothing."""
    name: str


@torch.no_grad()
def check_writers(
    module: nn.Module, writers: Sequence[Matrix], run: Callable[[], Tensor], spared: Sequence[Tensor] = ()
) -> list[Finding]:
    """Compare ``writers`` with what ``run()``, a deterministic forward through ``module``, depends on.

    Weights are overwritten with random numbers of a readable size during the check and put back at its end; an empty
    list says that the writers are right. ``spared`` are tensors that stay as they are, such as adapters.
    """
    with _put_back(module), torch.random.fork_rng(devices=[]):
        _make_readable(module, {id(tensor) for tensor in spared})
        return [f for stack in DepthMap.of(module).stacks for f in _check_stack(stack, writers, run, spared)]


def _check_stack(
    stack: Stack, writers: Sequence[Matrix], run: Callable[[], Tensor], spared: Sequence[Tensor]
) -> Iterator[Finding]:
    inside = {id(p): (name, p) for block in stack.blocks for name, p in block.module.named_parameters()}
    own = [matrix for matrix in writers if id(matrix.parameter) in inside]
    left = {id(tensor) for tensor in (*spared, *(matrix.parameter for matrix in own))}
    others = [(n, p) for key, (n, p) in inside.items() if _maps(n, p) and key not in left]
    if not _differs(run(), _with_other_numbers([*others, *((m.name, m.parameter) for m in own)], run)):
        yield Finding("unused", stack.path)
        return
    if not own and not _has_skip(stack.blocks[0].module, run):
        return  # a stem of convolutions, not a stack of residual blocks
    saved = {id(matrix): matrix.parameter.clone() for matrix in own}
    whole = run()
    used = {id(m) for m in own if _differs(whole, _with_other_numbers([(m.name, m.parameter)], run))}
    for matrix in own:
        matrix.parameter.zero_()
    silent = run()
    if _differs(silent, _with_other_numbers(others, run)):
        leaks = (name for name, p in others if _differs(silent, _with_other_numbers([(name, p)], run)))
        names = list(islice(leaks, LISTED)) or ["several together"]
        yield from (Finding("leak", f"{stack.path}: {name}") for name in names)
    for matrix in own:
        matrix.parameter.copy_(saved[id(matrix)])
        if not _differs(silent, run()):
            yield Finding("idle" if id(matrix) in used else "unused", matrix.name)
        matrix.parameter.zero_()
    for matrix in own:
        matrix.parameter.copy_(saved[id(matrix)])


def _with_other_numbers(named: Sequence[tuple[str, Tensor]], run: Callable[[], Tensor]) -> Tensor:
    """What the run gives with other random numbers in these matrices, which are put back."""
    saved = [parameter.clone() for _, parameter in named]
    for _, parameter in named:
        _randomize(parameter)
    output = run()
    for (_, parameter), old in zip(named, saved, strict=True):
        parameter.copy_(old)
    return output


def _has_skip(block: nn.Module, run: Callable[[], Tensor]) -> bool:
    """Whether anything passes the block with all of its matrices at zero; also where the block is never called."""
    saved = [(p, p.clone()) for p in block.parameters() if p.ndim > 1]
    for parameter, _ in saved:
        parameter.zero_()
    outputs: list[Tensor] = []

    def disturb(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x + torch.randn_like(x) if x.is_floating_point() else x, (args, kwargs))

    keep = block.register_forward_hook(lambda _, __, output: outputs.append(_first_tensor(output)))
    run()
    change = block.register_forward_pre_hook(disturb, with_kwargs=True)
    run()
    keep.remove()
    change.remove()
    for parameter, old in saved:
        parameter.copy_(old)
    return not outputs or _differs(outputs[0], outputs[len(outputs) // 2])


def _first_tensor(output: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _make_readable(module: nn.Module, spared: Collection[int]) -> None:
    """No bias, no zero and no vanishing gain: what a branch gives is then what its matrices say."""
    torch.manual_seed(2)
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or id(parameter) in spared:
            continue
        if _maps(name, parameter):
            _randomize(parameter)
        elif name.endswith("bias"):
            parameter.zero_()
        elif not parameter.any() or parameter.abs().max() < 0.1:  # gates and layer scales
            parameter.uniform_(0.5, 1.5)


def _maps(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and parameter.is_floating_point() and not name.endswith("bias")  # of experts: [n, width]


def _randomize(parameter: Tensor) -> None:
    parameter.normal_(0.0, max(1, parameter.shape[-1]) ** -0.5)


def _differs(one: Tensor, other: Tensor) -> bool:
    if not (one.isfinite().all() and other.isfinite().all()):
        raise ValueError("check_writers: the run gives a value that is not finite")
    return bool((one - other).abs().max() > TOLERANCE * max(1e-3, float(one.abs().max())))


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    state = [(tensor, tensor.clone()) for tensor in (*module.parameters(), *module.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in state:
                tensor.copy_(old)
