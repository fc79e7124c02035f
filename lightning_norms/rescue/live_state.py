"""Where everything that an optimizer step changes lives right now, each tensor under a key that outlives the tensor.

Tensors are this rank's: a DTensor counts as its local shard.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_norms.anatomy.sharding import reshard, to_local
from lightning_norms.rescue.averages import average_tensors, frozen_twins, is_average
from lightning_norms.rescue.optimizer_parts import copy_plain, counters, with_inner
from lightning_norms.rescue.weight_copies import Place, find_copies


class Key(NamedTuple):
    """Name of one tensor, or plain value, of a run."""

    kind: Literal["parameter", "buffer", "optimizer", "counter", "average", "copy", "extra"]
    name: str
    """Name of the tensor; for an optimizer, of the parameter whose state this is, "" for what belongs to none; for a
    counter of an optimizer, the number of its group, or "" for an attribute."""
    number: int = 0
    """Which optimizer, wrapped ones among them, which average."""
    entry: str = ""
    """Which entry of the optimizer's state, of the group, or which attribute."""


class LiveState:
    """Everything in a run that an optimizer step changes.

    Args:
        module: the module; FSDP2 modules that a validation has left unsharded are resharded.
        optimizers: torch optimizers, or Lightning's wrappers around them.
        averages: modules, or callbacks that hold a weight average.
        owners: objects whose attributes may hold copies of the weights, such as callbacks.
        with_frozen: count frozen parameters too. Without, those count that are trainable, have moments, or are the
            copy of a trainable one (a teacher).
        names: names of parameters that have got another one since (pruning renames them).

    Attributes:
        entries: live local tensors, and the plain values in optimizer states (Adafactor's float, a list), by key.
        parameters: all parameters by name, as their owners have them, not only the local part.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Any],
        averages: Sequence[Any] = (),
        *,
        owners: Sequence[Any] = (),
        with_frozen: bool = False,
        names: Mapping[Tensor, str] | None = None,
    ) -> None:
        reshard(module)
        self._module, self._optimizers = module, with_inner(optimizers)
        self.parameters = _named_parameters(module, self._optimizers, names or {})
        self.entries: dict[Key, Any] = {}
        self._places: dict[Key, Place] = {}
        with_shape = {name: parameter for name, parameter in self.parameters.items() if not is_lazy(parameter)}
        by_id = {id(parameter): name for name, parameter in self.parameters.items()}
        self._states = [_states(optimizer, by_id) for optimizer in self._optimizers]
        trained = set(self.parameters) if with_frozen else self._trained() | frozen_twins(with_shape)
        for name, parameter in self.parameters.items():
            if name in trained:
                self._add(Key("parameter", name), parameter)
        for name, buffer in module.named_buffers():
            self._add(Key("buffer", name), buffer)
        for name, part in module.named_modules():
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                self.entries[Key("extra", name)] = [part.get_extra_state()]  # a list: a tensor is not copied in place
        self._add_optimizers()
        self._add_averages(averages, trained)
        for place in find_copies(module, [*owners, *self._optimizers], with_shape):
            key = Key("copy", place.path)
            self._places[key] = place
            self._add(key, place.value)

    def forget(self, key: Key) -> None:
        """Take an entry out of an optimizer's state, and the state itself if it is the last one; or a counter."""
        if key.kind == "counter":
            if key.name:  # an attribute is not taken away: its class may count on it
                self._counters(key).pop(key.entry, None)
            return
        state = self._states[key.number][key.name]
        state.pop(key.entry, None)
        if not state and key.name:
            self._optimizers[key.number].state.pop(self.parameters[key.name], None)

    def revive(self, key: Key, saved: Any) -> None:
        """Make a copy of what has no live tensor of its shape: a buffer, a number, an entry of an optimizer's state.

        A parameter or an average cannot be made anew, nor a state whose parameter is gone: nothing happens.
        """
        if key.kind == "buffer":
            self._replace_buffer(key.name, saved)
        elif key.kind == "extra":
            self._module.get_submodule(key.name).set_extra_state(copy.deepcopy(saved[0]))
        elif key in self._places and not isinstance(saved, Tensor):
            vars(self._places[key].owner)[self._places[key].name] = saved
        elif key.kind == "counter" and key.number < len(self._optimizers):
            self._counters(key)[key.entry] = copy_plain(saved)
        elif key.kind == "optimizer" and key.number < len(self._optimizers):
            state = self._optimizers[key.number].state
            if not key.name:
                state[key.entry] = copy.deepcopy(saved)
            elif key.name in self.parameters:
                parameter = self.parameters[key.name]
                state.setdefault(parameter, {})[key.entry] = _like_parameter(saved, parameter)

    def drop_gradients(self) -> None:
        """Set every ``grad`` to None: zeros would still be decayed and moved by momentum."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _counters(self, key: Key) -> dict[str, Any]:
        optimizer = self._optimizers[key.number]
        owners: list[dict[str, Any]] = [vars(optimizer)] if not key.name else optimizer.param_groups
        number = int(key.name or 0)
        return owners[number] if number < len(owners) else {}

    def _replace_buffer(self, name: str, saved: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return
        old = owner._buffers.get(leaf)
        if old is not None:
            owner._buffers[leaf] = saved.to(old.device, old.dtype, copy=True)

    def _trained(self) -> set[str]:
        # What has moments is trained, even if it is frozen at the moment (toggled in a GAN).
        moved = {name for states in self._states for name, state in states.items() if state}
        averages = (part for part in self._module.modules() if is_average(part))
        averaged = {id(parameter) for average in averages for parameter in average.parameters()}
        return {
            name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad or name in moved or id(parameter) in averaged
        }

    def _add_optimizers(self) -> None:
        for number, (optimizer, states) in enumerate(zip(self._optimizers, self._states, strict=True)):
            for name, state in states.items():
                for entry, value in state.items():
                    if isinstance(entry, str):
                        self._add(Key("optimizer", name, number, entry), value)
            for name, entry, value in counters(optimizer):
                self._add(Key("counter", name, number, entry), value)

    def _add_averages(self, averages: Sequence[Any], trained: set[str]) -> None:
        for number, average in enumerate(averages):
            for name, tensor in average_tensors(average):
                # The average of a frozen weight is that weight: it does not move either.
                weight = name.removeprefix("module.")
                if weight not in self.parameters or weight in trained:
                    self._add(Key("average", name, number), tensor)

    def _add(self, key: Key, value: Any) -> None:
        if not isinstance(value, Tensor):
            self.entries[key] = value
        elif not is_lazy(value):
            self.entries[key] = _compact(to_local(value.detach()))


def _compact(tensor: Tensor) -> Tensor:
    """Of an expanded tensor the few numbers behind its many entries."""
    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _like_parameter(saved: Any, parameter: Tensor) -> Any:
    if not isinstance(saved, Tensor):
        return copy.deepcopy(saved)
    # Step counters of 0 dimensions stay on the host, as torch's own optimizers have them unless they are capturable.
    tensor = saved.clone() if saved.dim() == 0 else saved.to(parameter.device, copy=True)
    if hasattr(parameter, "to_local") and parameter.to_local().shape == tensor.shape:
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        return DTensor.from_local(
            tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return tensor


def _named_parameters(module: nn.Module, optimizers: Sequence[Any], names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Each parameter once, so tied ones too; with those that only an optimizer knows, and under the names given."""
    named: dict[str, Tensor] = {names.get(parameter, name): parameter for name, parameter in module.named_parameters()}
    ids = {id(parameter) for parameter in named.values()}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in ids:
                    ids.add(id(parameter))
                    named[f"optimizer{number}.{index}.{position}"] = parameter
    return named


def _states(optimizer: Any, names: Mapping[int, str]) -> dict[str, MutableMapping[str, Any]]:
    """Optimizer states by name of the parameter; under "" what belongs to none."""
    states: dict[str, MutableMapping[str, Any]] = {
        names[id(parameter)]: state for parameter, state in optimizer.state.items() if id(parameter) in names
    }
    if any(isinstance(entry, str) for entry in optimizer.state):
        states[""] = optimizer.state
    return states
