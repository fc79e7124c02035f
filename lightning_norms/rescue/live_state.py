"""Where everything that an optimizer step changes lives right now, each tensor under a key that outlives the tensor.

=========================================  ==========================================================
key                                        what
=========================================  ==========================================================
("parameters", name)                       a trainable parameter, or one that an optimizer has moved
("buffers", name)                          a buffer, whether checkpoints hold it or not
("optimizers", number, name, entry)        one entry of the optimizer state of a parameter
("averages", number, name)                 a tensor of a weight average
=========================================  ==========================================================

Tensors are this rank's: a DTensor counts as its local shard.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_norms.anatomy.sharding import reshard
from lightning_norms.rescue.averages import _average_tensors, is_average

Key = tuple[str | int, ...]


class Sources:
    """All live tensors of a run by key, and the plain values between them.

    Args:
        pl_module: the module; FSDP2 modules that a validation has left unsharded are resharded.
        optimizers: torch optimizers, or Lightning's wrappers around them.
        averages: modules, or callbacks that hold a weight average.
        frozen: count frozen parameters too.

    Attributes:
        tensors: key -> live local tensor.
        values: key -> entry of an optimizer state that is no tensor, for instance Adafactor's float or a list.
        parameters: name -> parameter as its owner has it, not only the local part; all of them.
    """

    def __init__(
        self, pl_module: nn.Module, optimizers: Sequence[Any], averages: Sequence[Any] = (), frozen: bool = False
    ) -> None:
        reshard(pl_module)
        self.parameters = _named_parameters(pl_module, optimizers)
        self.tensors: dict[Key, Tensor] = {}
        self.values: dict[Key, Any] = {}
        self._module = pl_module
        self._optimizers = optimizers
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._states = [_states(optimizer, names) for optimizer in optimizers]
        kept = self._kept(frozen)
        for name in kept:
            self._add(("parameters", name), self.parameters[name])
        for name, buffer in pl_module.named_buffers():
            self._add(("buffers", name), buffer)
        for number, states in enumerate(self._states):
            for name, state in states.items():
                for entry, value in state.items():
                    if isinstance(entry, str):
                        self._add(("optimizers", number, name, entry), value)
        for number, average in enumerate(averages):
            for name, tensor in _average_tensors(average):
                # The average of a frozen weight is that weight: it does not move either.
                if name.removeprefix("module.") not in self.parameters or name.removeprefix("module.") in kept:
                    self._add(("averages", number, name), tensor)

    def forget(self, key: Key) -> None:
        """Take an entry out of an optimizer's state, and the state itself if it is the last one."""
        _, number, name, entry = key
        state = self._states[int(number)][str(name)]
        state.pop(str(entry), None)
        if not state and name:
            self._optimizers[int(number)].state.pop(self.parameters[str(name)], None)

    def put(self, key: Key, value: Any) -> None:
        """Write an entry of an optimizer's state; nothing happens if its parameter is gone."""
        _, number, name, entry = key
        optimizer = self._optimizers[int(number)] if int(number) < len(self._optimizers) else None
        if optimizer is None or name not in {"", *self.parameters}:
            return
        state = optimizer.state.setdefault(self.parameters[str(name)], {}) if name else optimizer.state
        state[str(entry)] = value

    def replace_buffer(self, name: str, tensor: Tensor) -> None:
        """Give a buffer that has changed its shape a new tensor; one that is no longer there stays away."""
        path, _, leaf = name.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return
        old = owner._buffers.get(leaf)
        if old is not None:
            owner._buffers[leaf] = tensor.to(old.device, old.dtype, copy=True)

    def drop_gradients(self) -> None:
        """Set every ``grad`` to None: zeros would still be decayed and moved by momentum."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _kept(self, frozen: bool) -> set[str]:
        # What has moments is trained, even if it is frozen at the moment (toggled in a GAN).
        moved = {name for states in self._states for name, state in states.items() if state}
        averaged = {
            id(parameter)
            for module in self._module.modules()
            if is_average(module)
            for parameter in module.parameters()
        }
        return {
            name
            for name, parameter in self.parameters.items()
            if frozen or parameter.requires_grad or name in moved or id(parameter) in averaged
        }

    def _add(self, key: Key, value: Any) -> None:
        if isinstance(value, Tensor):
            if not is_lazy(value):
                self.tensors[key] = local(value)
        else:
            self.values[key] = value


def revive(sources: Sources, key: Key, saved: Tensor) -> None:
    """Put a tensor back that has no live counterpart of its shape: as a new buffer or entry of an optimizer state.

    Args:
        sources: the run as it is now.
        key: what is missing. A parameter or an average cannot be made anew: nothing happens.
        saved: its value, of this rank.
    """
    if key[0] == "buffers":
        sources.replace_buffer(str(key[1]), saved)
    elif key[0] == "optimizers" and str(key[2]) in sources.parameters:
        sources.put(key, _like_parameter(saved, sources.parameters[str(key[2])]))


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor, detached; of an expanded tensor the few numbers behind its many names."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _like_parameter(saved: Tensor, parameter: Tensor) -> Tensor:
    # Step counters of 0 dimensions stay on the host, as torch's own optimizers have them unless they are capturable.
    tensor = saved.clone() if saved.dim() == 0 else saved.to(parameter.device, copy=True)
    if hasattr(parameter, "to_local") and parameter.to_local().shape == tensor.shape:
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return tensor


def _named_parameters(pl_module: nn.Module, optimizers: Sequence[Any]) -> dict[str, Tensor]:
    """Each parameter once, so tied ones too; with those that only an optimizer knows."""
    named: dict[str, Tensor] = dict(pl_module.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[f"optimizer{number}.{index}.{position}"] = parameter
    return named


def _states(optimizer: Any, names: Mapping[int, str]) -> dict[str, MutableMapping[str, Any]]:
    """Optimizer state by name of the parameter; under "" what belongs to none."""
    states: dict[str, MutableMapping[str, Any]] = {
        names[id(parameter)]: state for parameter, state in optimizer.state.items() if id(parameter) in names
    }
    if any(isinstance(entry, str) for entry in optimizer.state):
        states[""] = optimizer.state
    return states
