"""Depth in any ``nn.Module``: the group of every parameter, lowest first.

embedding | block_00  block_01 ... block_47 | final_norm  head | other         one stack
encoder.block_00 ... decoder.block_00 ...                                      several stacks, kept apart
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_norms.anatomy.names import clean_name, join
from lightning_norms.anatomy.stacks import Stack, find_stacks

HEAD = re.compile(
    r"(^|[._])(lm_)?heads?([._]|$)|classifier|unembed|embed_out|to_logits|(^|\.)(cls|predictions|pooler|score|qa_outputs)\."
    r"|(^|\.)vocab_(transform|layer_norm|projector)\."
)
EMBEDDING = re.compile(r"emb|(^|\.)(entry|wte|wpe)(\.|$)|pos_|cls_token")
EXIT = re.compile(r"(^|\.)exit(\.|$)")
FINAL = re.compile(r"final|(^|[._])(ln|norm)_f([._]|$)")
AFTER_BLOCKS = ("final_norm", "head", "other")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or like one (DyT): no children, and no parameter beyond a vector."""
    parameters = list(module.parameters(recurse=False))
    if not parameters or any(True for child in module.children() for _ in child.parameters()):
        return False
    # Under FSDP1 every local shard is a vector, so the shape alone does not tell a matrix's owner from a norm.
    kind = type(module).__name__.lower()
    if any(matrix in kind for matrix in ("linear", "conv", "embedding")):
        return False
    return "norm" in kind or all(parameter.ndim <= 1 for parameter in parameters)


@dataclass(frozen=True)
class DepthMap:
    """The stacks of a module and, in depth order, the group of each of its parameters."""

    stacks: tuple[Stack, ...]
    groups: tuple[str, ...]
    by_name: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> DepthMap:
        """Read ``module``; a tied tensor counts once, under its first name."""
        stacks = find_stacks(module)
        by_name = {clean_name(name): _group(module, stacks, name) for name, _ in module.named_parameters()}
        used = set(by_name.values())
        return cls(stacks, tuple(group for group in dict.fromkeys(_order(stacks)) if group in used), by_name)

    def group_of(self, name: str) -> str:
        """The group of a parameter's (wrapped or clean) name; ``"other"`` for an unknown name."""
        name = clean_name(name)
        return self.by_name.get(name) or _block_of(self.stacks, name) or "other"


def _order(stacks: Sequence[Stack]) -> Iterator[str]:
    yield "embedding"
    for stack in stacks:
        yield join(stack.label, "embedding")
        yield from stack.groups
        yield from (join(stack.label, role) for role in AFTER_BLOCKS)
    yield from AFTER_BLOCKS


def _block_of(stacks: Sequence[Stack], name: str) -> str | None:
    return next((group for stack in stacks if (group := stack.group_of(name))), None)


def _group(module: nn.Module, stacks: Sequence[Stack], raw_name: str) -> str:
    """Group of one parameter: its block, or the role it plays before or after the stack it belongs to."""
    name = clean_name(raw_name)
    block = _block_of(stacks, name)
    if block:
        return block
    parents = {stack: stack.path.rpartition(".")[0] for stack in stacks}
    own = [stack for stack, parent in parents.items() if not parent or name.startswith(parent + ".")]
    stack = max(own, key=lambda stack: len(parents[stack])) if own and len(stacks) > 1 else None
    owner = raw_name.rpartition(".")[0]
    place = _place(module, [stack] if stack else stacks, clean_name(owner))
    return join(stack.label if stack and parents[stack] else "", _role(name, module.get_submodule(owner), place))


def _place(module: nn.Module, stacks: Sequence[Stack], owner: str) -> str:
    """Where a module stands: ``before`` the stacks or ``after`` them; empty around, inside or between them."""
    if not owner or not stacks:
        return ""
    paths = [stack.path for stack in stacks]
    if any(f"{path}.".startswith(f"{owner}.") or owner.startswith(f"{path}.") for path in paths):
        return ""
    order = [clean_name(name) for name, _ in module.named_modules()]
    if order.index(owner) < order.index(paths[0]):
        return "before"
    return "after" if order.index(owner) > order.index(paths[-1]) else ""


def _role(name: str, owner: nn.Module, place: str) -> str:
    if HEAD.search(name.lower()):
        return "head"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or EMBEDDING.search(name.lower()):
        return "embedding"
    if is_norm(owner) and FINAL.search(name.lower()):
        return "final_norm"  # OPT registers it before its blocks
    after = "final_norm" if is_norm(owner) or EXIT.search(name) else "head"
    return {"before": "embedding", "after": after}.get(place, "other")
