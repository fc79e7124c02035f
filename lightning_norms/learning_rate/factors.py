"""Named factors on the learning rates of one optimizer: on only while its update runs.

::

    the user sets       0.10 ------------------------------> 0.09 -------
    group["lr"]         0.10 | 0.10 x factor, in the update | 0.10 | 0.09

So no scheduler and no code of the user, in ``training_step`` or anywhere else, ever sees a factor, nothing compounds,
and a checkpoint holds the user's learning rate. Two callbacks cannot each do this alone, as torch runs post-hooks in
the order of the pre-hooks: hence one :class:`Factors` for each optimizer, from :func:`factors_of`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.learning_rate.step_hooks import StepHooks
from lightning_norms.metrics import EFFECTIVE_LEARNING_RATE

LearningRate = float | Tensor


class Factors:
    """Named factors on the learning rate of one optimizer, and the number of steps that it really took.

    Get it with :func:`factors_of`. A step that a GradScaler skips is not taken and not counted.

    Attributes:
        clock: the step at which the factors are evaluated; set it to resume, or to start a warmup afresh.
        taken: steps really taken under these factors; only ever rises.
        is_cancelled: whether the step in progress, or else the last one, was told to move nothing.

    Raises:
        TypeError: if this is no torch optimizer, or a group has no learning rate that can be multiplied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.clock = 0
        self.taken = 0
        self.is_cancelled = False
        self._by_name: dict[str, Callable[[int], float]] = {}
        self._scaled: list[_Scaled] = []
        self._used: list[LearningRate] = []
        self._is_applied = self._has_ended = self._has_warned = False
        self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._hooks = StepHooks(optimizer, self._begin_update, self._end_update, pause=self._restore)
        self._handles = (
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load_state_dict),
        )
        _FACTORS[optimizer] = self

    def _detach(self) -> None:
        self.hide()
        self._hooks.remove()
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            _FACTORS.pop(optimizer, None)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose learning rates these factors multiply, while it lives."""
        return self._optimizer()

    def move(self, optimizer: Optimizer) -> None:
        """Multiply the learning rates of another optimizer from now on; clock and factors go on."""
        self._detach()
        self._attach(optimizer)

    def copy(self, optimizer: Optimizer) -> Factors:
        """The same factors on a further optimizer, at clock 0."""
        other = Factors(optimizer)
        other._by_name = dict(self._by_name)
        return other

    def set(self, name: str, factor: Callable[[int], float]) -> None:
        """Add the factor ``name``, clock -> factor, or replace it; in the middle of a step it counts for that step."""
        self._by_name[name] = factor
        self.refresh()

    def remove(self, name: str) -> None:
        """Remove the factor ``name``, and the hooks with the last factor."""
        self.hide()
        self._by_name.pop(name, None)
        if not self._by_name:
            self._detach()

    def names(self) -> tuple[str, ...]:
        """Names of all factors."""
        return tuple(self._by_name)

    def get(self, name: str) -> Callable[[int], float] | None:
        """The factor ``name``, if it is set."""
        return self._by_name.get(name)

    def factor(self) -> float:
        """The product of all factors at the present clock."""
        return math.prod(factor(self.clock) for factor in self._by_name.values())

    def show(self) -> None:
        """Apply the factors now, for readers of ``group["lr"]``, until :meth:`hide` or the end of the next step."""
        self._restore()  # also heals a step that an exception has left open
        self._is_applied = True
        optimizer, factor = self._optimizer(), self.factor()
        if optimizer is not None and factor != 1.0:  # at 1.0 not even the identity of the lr object may change
            self._scaled = [_Scaled(group, factor) for group in optimizer.param_groups]

    def hide(self) -> None:
        """Undo the factors: every group gets the very object back that the user or a scheduler gave it."""
        self._hooks.reset()
        self._restore()

    def refresh(self) -> None:
        """Apply the factors anew if they are applied: for one that changed in the middle of the step."""
        if self._is_applied:
            self.show()

    def cancel_step(self, cancel: bool = True) -> None:
        """Do not count the step in progress, whose gradients were removed; False takes this back."""
        self.is_cancelled, self._has_ended = cancel, False

    def used(self) -> list[float]:
        """Effective learning rate of the last step that was taken, by group; empty before the first one."""
        return [float(rate) for rate in self._used]

    def _restore(self) -> None:
        for scaled in self._scaled:
            scaled.restore()
        self._scaled, self._is_applied = [], False

    def _begin_update(self) -> None:
        if self._has_ended:  # a step under a GradScaler is cancelled before it begins
            self.cancel_step(False)
        self.show()

    def _end_update(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # Read from the groups and not from _scaled: the update used this, even if it wrote lr itself. A scheduler
        # fills a tensor lr in place, so that is copied.
        rates = [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in optimizer.param_groups]
        self._warn_if_written(optimizer)
        self.hide()
        self._has_ended = True
        if not self.is_cancelled and not was_skipped(optimizer):
            self._used = rates
            self.clock += 1
            self.taken += 1

    def _warn_if_written(self, optimizer: Optimizer) -> None:
        if not self._has_warned and any(scaled.was_written() for scaled in self._scaled):
            self._has_warned = True
            rank_zero_warn(
                f"{type(optimizer).__name__} writes its own learning rate inside step(), or a hook on its step does: "
                f"there the factors ({', '.join(self._by_name)}) do not hold. Set the learning rate before the step."
            )

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # A checkpoint made inside a step (in fp32 all of training_step is inside one) holds the scheduler's lr too.
        for scaled, saved in product(self._scaled, state_dict["param_groups"]):
            if saved["lr"] is scaled.effective:
                saved["lr"] = scaled.scheduled

    def _after_load_state_dict(self, optimizer: Optimizer) -> None:
        # The groups are new dicts that hold the loaded, unscaled lr: there is nothing to restore in the old ones.
        self._scaled = []
        self.refresh()


class _Scaled:
    """A param group whose lr is temporarily scaled; remembers the original."""

    def __init__(self, group: dict[str, Any], factor: float) -> None:
        self.group = group
        self.scheduled: LearningRate = group["lr"]
        # A new object, never in place: a tensor lr may be shared with optimizer.defaults and with other groups.
        self.effective: LearningRate = self.scheduled * factor
        group["lr"] = self.effective

    def was_written(self) -> bool:
        """Whether somebody has written another lr since."""
        return self.group["lr"] is not self.effective

    def restore(self) -> None:
        """Undo, unless lr was written meanwhile (by user code, or load_state_dict): then that value stays."""
        if not self.was_written():
            self.group["lr"] = self.scheduled


_FACTORS: weakref.WeakKeyDictionary[Optimizer, Factors] = weakref.WeakKeyDictionary()


def factors_of(optimizer: Any) -> Factors:
    """The one :class:`Factors` of a torch optimizer, or of Lightning's wrapper around one; made on first use."""
    inner = _unwrap(optimizer)
    return _FACTORS[inner] if inner in _FACTORS else Factors(inner)


def all_factors_of(optimizers: Iterable[Any]) -> list[Factors]:
    """The :class:`Factors` of those optimizers that have some."""
    return [_FACTORS[inner] for inner in map(_unwrap, optimizers) if inner in _FACTORS]


def is_cancelled(optimizer: Any) -> bool:
    """Whether the step of ``optimizer`` in progress, or else its last one, was told to move nothing."""
    return any(factors.is_cancelled for factors in all_factors_of([optimizer]))


def follow(all_factors: Sequence[Factors], optimizers: Sequence[Any], stepping: Any = None) -> list[Factors]:
    """Let optimizers that were made anew in mid-run take over the factors of those that they replace.

    A further optimizer gets the same factors at clock 0.

    Args:
        all_factors: the factors of the optimizers before, of which some may be gone.
        optimizers: all optimizers of the run now.
        stepping: the optimizer whose step is under way; its new factors count for this step.

    Returns:
        The factors of ``optimizers``, in their order.
    """
    inner = [_unwrap(optimizer) for optimizer in optimizers if optimizer.param_groups]
    before = [factors.optimizer for factors in all_factors]
    is_same = len(inner) == len(before) and all(one is other for one, other in zip(inner, before, strict=True))
    if is_same or not all_factors or (stepping is not None and _unwrap(stepping) in _FACTORS):
        return list(all_factors)
    gone = [factors for factors in all_factors if all(factors.optimizer is not optimizer for optimizer in inner)]
    for optimizer in inner:
        if optimizer in _FACTORS:
            continue
        if gone:
            gone.pop(0).move(optimizer)
        else:
            all_factors[0].copy(optimizer)
        if stepping is not None and _unwrap(stepping) is optimizer:
            _FACTORS[optimizer].show()
    return [_FACTORS[optimizer] for optimizer in inner]


def effective_learning_rates(optimizers: Sequence[Any]) -> dict[str, float]:
    """Learning rates of the last steps of all optimizers of a run under their logged keys.

    A group is called by its "name", or else by its number "0", "1", ...; with several optimizers "optimizer1/0" is the
    first group of the second one.
    """
    rates = {}
    for position, optimizer in enumerate(map(_unwrap, optimizers)):
        owner = f"optimizer{position}/" if len(optimizers) > 1 else ""
        names = [str(group.get("name", index)) for index, group in enumerate(optimizer.param_groups)]
        if len(set(names)) < len(names):
            names = [str(index) for index in range(len(names))]
        for name, rate in zip(names, factors_of(optimizer).used(), strict=False):
            rates[EFFECTIVE_LEARNING_RATE.of(owner + name)] = rate
    return rates


def _unwrap(optimizer: Any) -> Any:
    return optimizer._optimizer if has_class_name(optimizer, "LightningOptimizer") else optimizer


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has skipped the step by itself; a GradScaler does not call the others for a skip."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a learning rate factor needs a torch.optim.Optimizer with step hooks; got {name}")
    for index, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, (int, float, Tensor)):
            raise TypeError(
                f"group {index} of {name} has lr={rate!r}, which cannot be multiplied: give the optimizer a number"
            )
