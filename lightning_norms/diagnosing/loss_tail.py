"""The part of a step between the network's last weights and its loss, recorded so that it runs again on other outputs.

::

    batch --> body --> head (last weights) --> outputs --> log_softmax, gather, x 0.5, ... --> loss
                                               cut         tail: recorded, any loss, any scale

Whatever the loss is, its value for a constant output is found by running the tail on a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

Key = tuple[int, tuple[int, ...]]
"""Which weights made an output, and the shape of the constant in its place."""
WRITING = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
"""Functions that write into their first argument, besides those whose name ends in an underscore."""


@dataclass(eq=False)
class Cut:
    """One output of the network; its values are dropped after the tail has been checked with them."""

    key: Key
    values: Tensor

    def start(self, generator: torch.Generator) -> Tensor:
        """Nearly zero, in the shape of a constant, as some losses have no gradient at exactly zero."""
        return 0.01 * torch.randn(self.key[1], generator=generator).to(self.values.device)

    def fill(self, constant: Tensor) -> Tensor:
        """A constant at every position, with memory of its own."""
        return constant.expand(self.values.shape).clone()

    def drop(self) -> None:
        """Keep only device and shape."""
        self.values = self.values.new_empty(1).expand(self.values.shape)


@dataclass(eq=False)
class Node:
    """One recorded call; one with weights among its arguments is a cut and forgets what it was computed from."""

    number: int
    func: Callable[..., Any] | None = None
    leaves: list[Any] = field(default_factory=list)
    """Arguments: tensors, plain values, and the outputs of other nodes as :class:`Output`."""
    spec: Any = None
    cuts: list[Cut] = field(default_factory=list)
    """Outputs that start a tail, of a call with weights."""


@dataclass(frozen=True, eq=False)
class Output:
    """An output of a node, by its place."""

    node: Node
    place: int


class TailRecorder(TorchFunctionMode):
    """Records every call on outputs of the network while it is active; changes nothing.

    A node keeps its arguments alive only as long as a result of it lives, so a pass needs hardly more memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origin: Any = WeakIdKeyDictionary()
        self._weights: Any = WeakIdKeyDictionary()  # tensors computed from parameters alone
        self._count, self._is_active = 0, False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        name = getattr(func, "__name__", "")
        writes = name in WRITING or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(args[0], Tensor) and not self._origin.get(args[0]):
            leaves[0] = args[0].detach().clone()  # as it is before the call
        origins = [self._origin_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_flatten(args[0] if writes else result)[0] if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not outputs:
            return result
        weights = [self._weight(leaf) for leaf in tensors]
        cutting = [weight for weight, leaf in zip(weights, tensors, strict=True) if weight and leaf.numel() > 1]
        if all(weights):
            for output in outputs:
                self._weights[output] = weights[0]
        elif cutting and outputs[0].requires_grad and not writes:
            self._add(Node(self._next(), cuts=[Cut(_key(cutting[0], name, x), x.detach()) for x in outputs]), outputs)
        elif any(origins):
            stored = [leaf if origin is None else origin for leaf, origin in zip(leaves, origins, strict=True)]
            stored = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in stored]
            self._add(Node(self._next(), partial(_write, func) if writes else func, stored, spec), outputs)
        return result

    def start(self) -> None:
        """Record from here on."""
        self.stop()
        self._is_active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop recording, if :meth:`start` was called."""
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def tail(self, loss: Tensor) -> Tail | None:
        """Return what leads to a loss; None if it does not depend on the network's outputs in a way that was seen."""
        origin = self._origin.get(loss)
        tail = None if origin is None else Tail(origin)
        return tail if tail is not None and tail.is_exact(loss) else None

    def _origin_of(self, tensor: Tensor) -> Output | None:
        """The output that a tensor is; one whose making was not seen (compiled code) starts a tail itself."""
        origin: Output | None = self._origin.get(tensor)
        if origin is None and tensor.requires_grad and not tensor.is_leaf and not self._weight(tensor):
            self._add(Node(self._next(), cuts=[Cut(_key(0, "", tensor), tensor.detach())]), [tensor])
            origin = self._origin.get(tensor)
        return origin

    def _weight(self, tensor: Tensor) -> int | None:
        """What identifies the parameter that a tensor is, or is computed from."""
        weight: int | None = id(tensor) if isinstance(tensor, nn.Parameter) else self._weights.get(tensor)
        return weight

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _add(self, node: Node, outputs: Sequence[Tensor]) -> None:
        for place, output in enumerate(outputs):
            self._origin[output] = Output(node, place)


class Tail:
    """The calls that lead from the network's outputs to one loss.

    Args:
        loss: the output of the last call.
    """

    def __init__(self, loss: Output) -> None:
        self._loss = loss
        nodes, waiting = dict[int, Node](), [loss.node]
        while waiting:
            node = waiting.pop()
            if node.number not in nodes:
                nodes[node.number] = node
                waiting += [leaf.node for leaf in node.leaves if isinstance(leaf, Output)]
        self._nodes = [nodes[number] for number in sorted(nodes)]

    @property
    def cuts(self) -> list[Cut]:
        """Outputs of the network that the tail starts from."""
        return [cut for node in self._nodes for cut in node.cuts]

    def is_exact(self, loss: Tensor) -> bool:
        """Whether the tail gives the loss that it was recorded from; drops the network's outputs."""
        if not self.cuts or any(cut.values.ndim == 0 for cut in self.cuts):
            return False
        try:
            with torch.no_grad():
                again = float(self(lambda cut: cut.values.float().clone()))
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False
        for cut in self.cuts:
            cut.drop()
        return math.isclose(again, float(loss.detach()), rel_tol=0.02, abs_tol=1e-6)

    def __call__(self, outputs: Callable[[Cut], Tensor]) -> Tensor:
        """Return the loss for other outputs of the network."""
        values: dict[tuple[int, int], Any] = {}

        def value(leaf: Any) -> Any:
            return values[leaf.node.number, leaf.place] if isinstance(leaf, Output) else leaf

        for node in self._nodes:
            if node.func is None:
                results = [outputs(cut) for cut in node.cuts]
            else:
                args, kwargs = tree_unflatten([value(leaf) for leaf in node.leaves], node.spec)
                results = [leaf for leaf in tree_flatten(node.func(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
            values |= {(node.number, place): result for place, result in enumerate(results)}
        loss: Tensor = value(self._loss)
        return loss


def _write(func: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call a function that writes into its first argument on a copy of it."""
    target = target.clone()
    func(target, *args, **kwargs)
    return target


def _key(weight: int, name: str, output: Tensor) -> Key:
    """A picture keeps its shape, anything else only its last dimension: positions get the same constant."""
    is_picture = output.ndim == 4 or (output.ndim == 3 and "conv" in name)
    return weight, tuple(output.shape[1:] if is_picture else output.shape[-1:])
