"""Healthy moments of a run in memory, and the way back to them, bit for bit.

A snapshot holds what an optimizer step changes, and nothing that only time changes::

    kept and put back                        goes on as it is
    ------------------------------------     -------------------------------------------
    trainable parameters, all buffers        learning rate and other group settings
    optimizer state (moments, counters)      schedulers, global_step, epochs
    GradScaler                               random generators, data, frozen parameters
    weight averages (EMA, SWA)               other callbacks

Everything is local to the rank: under DDP each rank keeps the whole, under FSDP its own shards. No collective.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_norms.rescue.averages import find_averages
from lightning_norms.rescue.live_state import Key, Sources, revive

__all__ = ["Snapshot", "find_averages"]

Where = Literal["cpu", "same"]


class Snapshot:
    """An independent copy of a run at one step. Get it with :meth:`take` or :meth:`from_state`.

    Attributes:
        step: optimizer steps taken when the copy was made.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> start = layer.weight.clone()
        >>> snapshot = Snapshot.take(layer, [optimizer], step=0)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> _ = optimizer.step()
        >>> snapshot.restore(layer, [optimizer])
        ()
        >>> torch.equal(layer.weight, start), len(optimizer.state), snapshot.bytes
        (True, 0, 12)
    """

    def __init__(
        self, step: int, tensors: dict[Key, Tensor], values: dict[Key, Any], scaler: dict[str, Any] | None
    ) -> None:
        self.step = step
        self._tensors = tensors
        self._values = values
        self._scaler = scaler
        self._copying: list[torch.cuda.Event] = []
        self._spent = False

    @classmethod
    @torch.no_grad()
    def take(
        cls,
        pl_module: nn.Module,
        optimizers: Sequence[Any],
        scaler: Any = None,
        averages: Sequence[Any] = (),
        *,
        step: int = 0,
        device: Where = "cpu",
        frozen: bool = False,
        reuse: Snapshot | None = None,
    ) -> Snapshot:
        """Copy the run as it is now; do it between two optimizer steps, outside of validation.

        Args:
            pl_module: the LightningModule, or any module.
            optimizers: all of them, in the trainer's order.
            scaler: the GradScaler of 16-mixed, if there is one.
            averages: what :func:`find_averages` found.
            step: optimizer steps taken so far.
            device: "cpu" (pinned if the weights are on CUDA) or "same": beside the weights, faster and dearer.
            frozen: keep frozen parameters too, for a teacher network that the module moves by hand.
            reuse: a snapshot that is no longer wanted, of which the memory is written over. It is spent.
        """
        sources = Sources(pl_module, optimizers, averages, frozen)
        old = reuse._spend() if reuse is not None else {}
        tensors = {key: _room(tensor, device, old.pop(key, None)) for key, tensor in sources.tensors.items()}
        del old  # what does not fit is freed before the copying
        state = copy.deepcopy(scaler.state_dict()) if scaler is not None else None
        snapshot = cls(step, tensors, copy.deepcopy(sources.values), state)
        _copy(tensors.values(), sources.tensors.values())
        devices = {tensor.device for tensor in sources.tensors.values() if tensor.is_cuda}
        snapshot._copying = [torch.cuda.current_stream(each).record_event() for each in devices]
        return snapshot

    @torch.no_grad()
    def restore(
        self, pl_module: nn.Module, optimizers: Sequence[Any], scaler: Any = None, averages: Sequence[Any] = ()
    ) -> tuple[str, ...]:
        """Put everything back in place, and drop all gradients.

        Also inside an optimizer's closure, where Lightning calls ``on_before_optimizer_step``: the rest of that step
        finds no gradient and changes nothing. (A GradScaler ends the step with its own ``update``: one more count, or
        a smaller scale if that step overflowed. A fused optimizer under a GradScaler asserts when it finds no gradient;
        restore after its step.)

        A parameter that the snapshot does not know (unfrozen or added since) keeps its value, but its optimizer state
        is dropped, as it belongs to the abandoned course.

        Returns:
            Names of the trainable parameters that the snapshot does not know.

        Raises:
            RuntimeError: if the snapshot was spent by ``take(reuse=...)``.
        """
        self._check()
        sources = Sources(pl_module, optimizers, averages, frozen=True)
        self._wait()
        live = {key: sources.tensors[key] for key in self._tensors if self._fits(key, sources)}
        _copy(live.values(), [self._tensors[key] for key in live])
        for key in [*sources.tensors, *sources.values]:
            if key[0] == "optimizers" and key not in self._tensors and key not in self._values:
                sources.forget(key)
        for key, tensor in self._tensors.items():
            if key not in live:
                revive(sources, key, tensor)
        for key, value in self._values.items():
            sources.put(key, copy.deepcopy(value))
        sources.drop_gradients()
        if scaler is not None and self._scaler:
            scaler.load_state_dict(copy.deepcopy(self._scaler))
        known = {key[1] for key in live if key[0] == "parameters"}
        return tuple(name for name, each in sources.parameters.items() if each.requires_grad and name not in known)

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(
            tensor.numel() * tensor.element_size() for tensor in [*self._tensors.values(), *_within(self._values)]
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain dicts and the tensors themselves (not copies), by name: ``torch.load(weights_only=True)`` reads it.

        Under sharding these are this rank's shards: of use only to the same rank of the same number of ranks.

        Raises:
            RuntimeError: if the snapshot was spent.
        """
        self._check()
        self._wait()
        nested: dict[str, Any] = {"step": self.step, "scaler": copy.deepcopy(self._scaler)}
        for key, value in [*self._tensors.items(), *self._values.items()]:
            holder: dict[Any, Any] = nested
            for part in key[:-1]:
                holder = holder.setdefault(part, {})
            holder[key[-1]] = value
        return nested

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Snapshot:
        """The snapshot that :meth:`state_dict` described; shares no memory with it."""
        tensors: dict[Key, Tensor] = {}
        values: dict[Key, Any] = {}
        for kind, depth in DEPTHS.items():
            for key, value in _flat(state.get(kind, {}), depth, (kind,)):
                if isinstance(value, Tensor):
                    tensors[key] = value.detach().clone()
                else:
                    values[key] = copy.deepcopy(value)
        return cls(int(state["step"]), tensors, values, copy.deepcopy(state.get("scaler")))

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return self.__dict__

    def _fits(self, key: Key, sources: Sources) -> bool:
        return key in sources.tensors and sources.tensors[key].shape == self._tensors[key].shape

    def _spend(self) -> dict[Key, Tensor]:
        self._wait()
        tensors, self._tensors, self._values, self._spent = self._tensors, {}, {}, True
        return tensors

    def _check(self) -> None:
        if self._spent:
            raise RuntimeError(f"the snapshot of step {self.step} is spent: its memory went to a newer one")

    def _wait(self) -> None:
        """Until copies from CUDA have arrived: only for the host; the device keeps the order of its stream."""
        for event in self._copying:
            event.synchronize()
        self._copying = []


DEPTHS = {"parameters": 1, "buffers": 1, "optimizers": 3, "averages": 2}
"""Levels of names below each kind of thing: optimizers have a number, a parameter and an entry."""


def _room(tensor: Tensor, device: Where, old: Tensor | None) -> Tensor:
    """Where the copy of a tensor goes: the old place if it fits, else new memory."""
    if not _plain(tensor):
        return tensor.clone()  # a subclass (quantized moments) knows best how to copy itself
    target = torch.device("cpu") if device == "cpu" else tensor.device
    if old is not None and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, target):
        return old
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=target, pin_memory=tensor.is_cuda and device == "cpu")


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """One foreach for each pair of devices and dtype; to and from pinned memory without waiting."""
    buckets: dict[tuple[torch.device, torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if _plain(target) and _plain(source):
            bucket = buckets.setdefault((target.device, source.device, target.dtype), ([], []))
            bucket[0].append(target)
            bucket[1].append(source)
        else:
            target.copy_(source)
    for (to, of, _), (some_targets, some_sources) in buckets.items():
        torch._foreach_copy_(some_targets, some_sources, non_blocking="cuda" in (to.type, of.type))


def _plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided


def _within(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists and dicts, such as the history of LBFGS."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _within(each)


def _flat(nested: Mapping[Any, Any], depth: int, key: Key) -> Iterator[tuple[Key, Any]]:
    for name, value in nested.items():
        if depth == 1:
            yield (*key, name), value
        else:
            yield from _flat(value, depth - 1, (*key, name))
