"""Healthy moments of a run in memory, and the way back to them, bit for bit.

A snapshot holds what an optimizer step changes, and nothing that only time changes::

    kept and put back                        goes on as it is
    ------------------------------------     -------------------------------------------
    trainable parameters, all buffers        learning rate and other group settings
    optimizer state (moments, counters)      schedulers, global_step, epochs
    GradScaler                               random generators, data, other frozen parameters
    weight averages (EMA, SWA), teachers     other callbacks

Everything is local to the rank: under DDP each rank keeps the whole, under FSDP its own shards. No collective.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_norms.rescue.live_state import Key, LiveState
from lightning_norms.rescue.optimizer_parts import copy_plain, tensors_within, train_mode, with_inner


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

    def __init__(self, step: int, entries: dict[Key, Any], scaler: dict[str, Any] | None) -> None:
        self.step = step
        self._entries = entries
        self._scaler = scaler
        self._names: Any = WeakTensorKeyDictionary()  # a parameter that gets another name is still the same
        self._copying: list[torch.cuda.Event] = []
        self._spent = False

    @classmethod
    @torch.no_grad()
    def take(
        cls,
        module: nn.Module,
        optimizers: Sequence[Any],
        scaler: Any = None,
        averages: Sequence[Any] = (),
        *,
        owners: Sequence[Any] = (),
        step: int = 0,
        reuse: Snapshot | None = None,
    ) -> Snapshot:
        """Copy the run as it is now to the host; do it between two optimizer steps, outside of validation.

        Args:
            module: the LightningModule, or any module.
            optimizers: all of them, in the trainer's order.
            scaler: the GradScaler of 16-mixed, if there is one.
            averages: what :func:`lightning_norms.rescue.averages.find_averages` found.
            owners: objects whose attributes may hold copies of the weights, such as callbacks.
            step: optimizer steps taken so far.
            reuse: a snapshot that is no longer wanted; its memory is overwritten, and it is spent.
        """
        state = LiveState(module, optimizers, averages, owners=owners)
        live = state.entries
        old = reuse._spend() if reuse is not None else {}
        entries = {key: _allocate(value, old.pop(key, None)) for key, value in live.items()}
        del old  # what does not fit is freed before the copying
        snapshot = cls(step, entries, copy.deepcopy(scaler.state_dict()) if scaler is not None else None)
        for name, parameter in state.parameters.items():
            snapshot._names[parameter] = name
        tensors = {key: value for key, value in live.items() if isinstance(value, Tensor)}
        _copy([entries[key] for key in tensors], tensors.values())
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        snapshot._copying = [torch.cuda.current_stream(device).record_event() for device in devices]
        return snapshot

    @torch.no_grad()
    def restore(
        self,
        module: nn.Module,
        optimizers: Sequence[Any],
        scaler: Any = None,
        averages: Sequence[Any] = (),
        *,
        owners: Sequence[Any] = (),
        keep_gradients: bool = False,
    ) -> tuple[str, ...]:
        """Put everything back in place, and drop all gradients unless other people's hooks are still to see them.

        Returns:
            Names of the trainable parameters that the snapshot does not hold (unfrozen or added since): they keep
            their values, but their optimizer state is dropped.

        Raises:
            RuntimeError: if the snapshot was spent by ``take(reuse=...)``.
        """
        self._check()
        live = LiveState(module, optimizers, averages, owners=owners, with_frozen=True, names=self._names)
        modes = [(optimizer, train_mode(optimizer)) for optimizer in with_inner(optimizers)]
        self._wait()
        fitting = {key: saved for key, saved in self._entries.items() if _fits(saved, live.entries.get(key))}
        _copy([live.entries[key] for key in fitting], fitting.values())
        for key in live.entries:
            if key.kind in ("optimizer", "counter") and key not in self._entries:
                live.forget(key)
        for key, saved in self._entries.items():
            if key not in fitting:
                live.revive(key, saved)
        for optimizer, mode in modes:
            if mode is not None and mode != train_mode(optimizer):  # it was taken between validation batches
                (optimizer.train if mode else optimizer.eval)()
        if not keep_gradients:
            live.drop_gradients()
        if scaler is not None and self._scaler:
            scaler.load_state_dict(copy.deepcopy(self._scaler))
        trainable = (name for name, parameter in live.parameters.items() if parameter.requires_grad)
        return tuple(name for name in trainable if Key("parameter", name) not in fitting)

    @torch.no_grad()
    def put_weights(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Put back the weights that are trained now, and nothing else: no buffer, no frozen weight, no moment."""
        self._check()
        live = LiveState(module, optimizers, names=self._names)
        self._wait()
        trained = {name for name, parameter in live.parameters.items() if parameter.requires_grad}
        fitting = [
            (live.entries[key], saved)
            for key, saved in self._entries.items()
            if key.kind == "parameter" and key.name in trained and _fits(saved, live.entries.get(key))
        ]
        _copy([tensor for tensor, _ in fitting], [saved for _, saved in fitting])

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(tensor.nbytes for tensor in tensors_within(self._entries))

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python and the tensors themselves (not copies): ``torch.load(weights_only=True)`` reads it.

        Under sharding these are this rank's shards: of use only to the same rank of the same number of ranks.
        """
        self._check()
        self._wait()
        entries = [{**key._asdict(), "value": value} for key, value in self._entries.items()]
        return {"step": self.step, "scaler": copy.deepcopy(self._scaler), "entries": entries}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Snapshot:
        """Make the snapshot that :meth:`state_dict` described; shares no memory with it."""
        state = copy.deepcopy(dict(state))
        entries = {Key(**{name: entry[name] for name in Key._fields}): entry["value"] for entry in state["entries"]}
        return cls(state["step"], entries, state["scaler"])

    def _spend(self) -> dict[Key, Any]:
        self._wait()
        entries, self._entries, self._spent = self._entries, {}, True
        return entries

    def _check(self) -> None:
        if self._spent:
            raise RuntimeError(f"the snapshot of step {self.step} is spent: its memory went to a newer one")

    def _wait(self) -> None:
        # Until copies from CUDA have arrived: only for the host; the device keeps the order of its stream.
        for event in self._copying:
            event.synchronize()
        self._copying = []


def _allocate(tensor: Any, old: Any) -> Any:
    """Reuse the old host memory if shape and dtype match; else new memory, pinned for a tensor on CUDA."""
    if not isinstance(tensor, Tensor):
        return copy_plain(tensor)
    if not _is_plain(tensor):
        return tensor.clone()  # a subclass (quantized moments) knows best how to copy itself
    if isinstance(old, Tensor) and (old.shape, old.dtype, old.device.type) == (tensor.shape, tensor.dtype, "cpu"):
        return old
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _fits(saved: Any, live: Any) -> bool:
    return isinstance(saved, Tensor) and isinstance(live, Tensor) and live.shape == saved.shape


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy by one foreach for each pair of devices and dtype; to and from pinned memory without waiting."""
    buckets: dict[tuple[torch.device, torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if _is_plain(target) and _is_plain(source):
            bucket = buckets.setdefault((target.device, source.device, target.dtype), ([], []))
            bucket[0].append(target)
            bucket[1].append(source)
        else:
            target.copy_(source)
    for (to, of, _), (some_targets, some_sources) in buckets.items():
        torch._foreach_copy_(some_targets, some_sources, non_blocking="cuda" in (to.type, of.type))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided
