"""Whether anything passes around the branches of a stack: without a skip, its writers write into no residual stream."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import fx, nn
from typing_extensions import override

from lightning_norms.anatomy.names import unwrap
from lightning_norms.anatomy.stacks import Stack


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Collection[nn.Module]) -> None:
        super().__init__()
        self._leaves = {id(leaf) for leaf in leaves}

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._leaves or super().is_leaf_module(m, module_qualified_name)


def lacks_skip(module: nn.Module, stack: Stack, writers: Collection[int]) -> bool:
    """Whether it is certain that nothing passes around the parameters ``writers`` (ids).

    Certain: the code of the block and of what holds the stack can be traced, and no way avoids them.
    """
    block = unwrap(stack.blocks[0].module)
    inner = [part for part in block.modules() if any(id(p) in writers for p in part.parameters(recurse=False))]
    if _has_way_around(block, inner) is not False:
        return False
    if type(module.get_submodule(stack.path)).forward is nn.Sequential.forward:
        return True
    owner = module.get_submodule(stack.path.rpartition(".")[0])
    return _has_way_around(unwrap(owner), [unwrap(block.module) for block in stack.blocks]) is False


def _has_way_around(module: nn.Module, parts: Collection[nn.Module]) -> bool | None:
    """Whether some way from the inputs of ``module`` to its output avoids ``parts``; None where that cannot be seen."""
    names = [name for name, part in module.named_modules() if any(part is other for other in parts)]
    try:
        # Tracing runs the code once: on a copy that shares the tensors, so that it leaves nothing behind.
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        copied = copy.deepcopy(module, shared)
        graph = _Tracer([copied.get_submodule(name) for name in names]).trace(copied)
    except Exception:  # code that depends on values, hooks and locks: whatever the user's forward raises
        return None
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        blocked = node.op == "call_module" and node.target in names
        if node.op == "placeholder" or (not blocked and any(source in reached for source in node.all_input_nodes)):
            reached.add(node)
    return next(node in reached for node in graph.nodes if node.op == "output")
