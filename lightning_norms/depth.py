"""What depth is in any ``nn.Module``: its stacks of blocks, the group of a parameter.

A stack is an ``nn.ModuleList``, ``nn.Sequential`` or digit-keyed ``nn.ModuleDict`` of blocks. Lists inside a block
(experts, sublayers) are no depth of their own.

    embedding | block_00  block_01 ... block_47 | final_norm  head | other         one stack
    encoder.block_00 ... decoder.block_00 ...                                      several stacks, kept apart
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
HEAD = re.compile(r"(^|[._])(lm_)?heads?([._]|$)|classifier|unembed|embed_out")
EMBEDDING = re.compile(r"emb|(^|\.)(entry|wte|wpe)(\.|$)|pos_|cls_token")
EXIT = re.compile(r"(^|\.)exit(\.|$)")
ROLES = ("embedding", "blocks", "final_norm", "head", "other")


def clean_name(name: str) -> str:
    """A parameter's or module's name without what compile, DDP, FSDP and checkpoint wrappers add to it.

    Example:
        >>> clean_name("model._orig_mod.layers.3._checkpoint_wrapped_module.linear1.weight")
        'model.layers.3.linear1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or like one (DyT): no children, and no parameter beyond a vector.

    Example:
        >>> is_norm(nn.RMSNorm(8)), is_norm(nn.Linear(8, 8)), is_norm(nn.GELU())
        (True, False, False)
    """
    parameters = list(module.parameters(recurse=False))
    if not parameters or any(True for _ in module.children()):
        return False
    # Under FSDP1 every local shard is a vector, so the shape alone does not tell a matrix's owner from a norm.
    kind = type(module).__name__.lower()
    if any(matrix in kind for matrix in ("linear", "conv", "embedding")):
        return False
    return "norm" in kind or all(parameter.ndim <= 1 for parameter in parameters)


@dataclass(frozen=True)
class Stack:
    """Repeated blocks in depth order."""

    path: str
    """Cleaned name of the list that holds the blocks."""
    label: str
    """Empty when the module has one stack, else what tells it from the others: ``"encoder"``."""
    blocks: tuple[tuple[int, nn.Module], ...]
    """Pairs (index as a number, block), lowest first."""
    compiled: bool = False
    """Whether the whole stack runs inside a compiled region, where hooks on blocks do not fire reliably."""

    @property
    def layers(self) -> int:
        """Number of blocks, L."""
        return self.blocks[-1][0] + 1

    def group(self, index: int) -> str:
        """Name of block ``index``, padded so that names sort by depth: ``"block_02"``."""
        return join(self.label, f"block_{index:0{max(2, len(str(self.layers - 1)))}d}")


@dataclass(frozen=True)
class DepthMap:
    """The stacks of a module and, in depth order, the group of each of its parameters.

    Example:
        >>> net = nn.Sequential()
        >>> net.tokens = nn.Embedding(5, 4)
        >>> net.h = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(11))
        >>> net.ln_f, net.lm_head = nn.LayerNorm(4), nn.Linear(4, 5)
        >>> depth = DepthMap.of(net)
        >>> depth.groups[:2], depth.groups[-3:]
        (('embedding', 'block_00'), ('block_10', 'final_norm', 'head'))
        >>> depth.group_of("h.10.linear1.weight"), depth.group_of("nowhere.weight")
        ('block_10', 'other')
    """

    stacks: tuple[Stack, ...]
    groups: tuple[str, ...]
    by_name: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> DepthMap:
        """Read ``module``; a tied tensor counts once, under its first name."""
        found = stacks(module)
        by_name = {clean_name(name): _group(module, found, name) for name, _ in module.named_parameters()}
        used = set(by_name.values())
        return cls(found, tuple(group for group in _order(found) if group in used), by_name)

    def group_of(self, name: str) -> str:
        """The group of a parameter's (wrapped or clean) name; ``"other"`` for a name that is not known."""
        name = clean_name(name)
        return self.by_name.get(name) or _block_of(self.stacks, name) or "other"


def stacks(module: nn.Module) -> tuple[Stack, ...]:
    """The outermost lists of blocks in ``module``, in the order in which they were registered."""
    found: list[Stack] = []
    for name, candidate in module.named_modules():
        path = clean_name(name)
        if any(not stack.path or path.startswith(stack.path + ".") for stack in found):
            continue
        blocks = _blocks(candidate)
        if blocks:
            found.append(Stack(path, "", blocks, _compiled(module, name)))
    labels = _labels([stack.path for stack in found])
    return tuple(Stack(s.path, label, s.blocks, s.compiled) for s, label in zip(found, labels, strict=True))


def _blocks(candidate: nn.Module) -> tuple[tuple[int, nn.Module], ...]:
    """The numbered children of a list of blocks; empty when ``candidate`` is no such list."""
    if isinstance(candidate, ParametrizationList):
        return ()
    if isinstance(candidate, nn.ModuleDict) and not all(key.isdigit() for key in candidate):
        return ()
    if not isinstance(candidate, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return ()
    children = sorted((int(key), child) for key, child in candidate.named_children() if key.isdigit())
    inner = [unwrap(child) for _, child in children]
    composite = all(any(True for _ in c.children()) and any(True for _ in c.parameters()) for c in inner)
    # A Sequential also serves as a plain pipeline: only repeats of one class make it a stack.
    if isinstance(candidate, nn.Sequential) and (len(inner) < 2 or len({type(child) for child in inner}) > 1):
        return ()
    return tuple(children) if composite else ()


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, DDP, FSDP and checkpoint wrappers."""
    names = dict(module.named_children())
    return unwrap(next(iter(names.values()))) if len(names) == 1 and set(names) <= WRAPPERS else module


def _compiled(module: nn.Module, name: str) -> bool:
    parts = name.split(".") if name else []
    around = [module, *(module.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))]
    return "_orig_mod" in parts or any(getattr(each, "_compiled_call_impl", None) is not None for each in around)


def _labels(paths: Sequence[str]) -> list[str]:
    """The shortest path parts that tell the stacks apart; one stack needs none."""
    if len(paths) < 2:
        return [""] * len(paths)
    parts = [path.split(".") for path in paths]
    while len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    length = next(n for n in range(1, 99) if len({tuple(part[:n]) for part in parts}) == len(parts))
    return [".".join(part[:length]) for part in parts]


def join(label: str, name: str) -> str:
    """A dotted name, without a dot where there is no label."""
    return f"{label}.{name}" if label else name


def _block_of(found: Sequence[Stack], name: str) -> str | None:
    for stack in found:
        match = re.match(rf"{re.escape(stack.path + '.') if stack.path else ''}(\d+)(\.|$)", name)
        if match:
            return stack.group(int(match[1]))
    return None


def _group(module: nn.Module, found: Sequence[Stack], raw_name: str) -> str:
    """Group of one parameter: its block, or the role it plays before or after the stack it belongs to."""
    name = clean_name(raw_name)
    block = _block_of(found, name)
    if block:
        return block
    parents = [(stack.path.rpartition(".")[0], stack) for stack in found]
    own = [(parent, stack) for parent, stack in parents if not parent or name.startswith(parent + ".")]
    stack = max(own, key=lambda pair: len(pair[0]))[1] if own and len(found) > 1 else None
    label = stack.label if stack and stack.path.rpartition(".")[0] else ""
    owner = raw_name.rpartition(".")[0]
    place = _place(module, [stack] if stack else found, clean_name(owner))
    return join(label, _role(name, module.get_submodule(owner), place))


def _place(module: nn.Module, found: Sequence[Stack], owner: str) -> str:
    """Where a module stands: ``before`` the stacks, ``after`` them, ``around`` (holds one), or nowhere."""
    if not found or any(stack.path == owner or stack.path.startswith(owner + ".") or not owner for stack in found):
        return "around" if found else ""
    order = [clean_name(name) for name, _ in module.named_modules()]
    where = order.index(owner)
    if where < order.index(found[0].path):
        return "before"
    return "after" if where > order.index(found[-1].path) else ""


def _role(name: str, owner: nn.Module, place: str) -> str:
    if HEAD.search(name.lower()):
        return "head"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or EMBEDDING.search(name.lower()):
        return "embedding"
    if is_norm(owner) or EXIT.search(name):
        return {"before": "embedding", "after": "final_norm"}.get(place, "other")
    return {"before": "embedding", "after": "head"}.get(place, "other")


def _order(found: Sequence[Stack]) -> Iterator[str]:
    yield "embedding"
    for stack in found:
        for role in ROLES:
            if role == "blocks":
                yield from (stack.group(index) for index, _ in stack.blocks)
            elif stack.label:
                yield join(stack.label, role)
    yield from ROLES[2:]
