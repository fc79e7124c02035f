"""The only writer of learning rates: effective = what the optimizer and its scheduler say x all named factors.

The factors are on only while the optimizer steps::

    scheduler says      0.10 ------------------------------> 0.09 -------
    group["lr"]         0.10 | 0.10 x factor, during step() | 0.10 | 0.09
                          pre-hook                      post-hook

So no scheduler ever sees a factor, nothing compounds, and a checkpoint holds the scheduler's learning rate. Two
callbacks may not do this each on its own, as torch runs post-hooks in the order of the pre-hooks: hence one
:class:`Factors` for each optimizer, from :func:`factors_of`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.metrics import EFFECTIVE_LEARNING_RATE

LearningRate = float | Tensor


class Factors:
    """Named factors on the learning rate of one optimizer, and the number of steps that it really took.

    Get it with :func:`factors_of`. A step that a GradScaler skips is not taken and not counted.

    Args:
        optimizer: the torch optimizer; it is kept alive by its owner, not from here.

    Attributes:
        clock: the step that the factors are asked for; may be set, to resume or to start a warmup afresh.
        taken: steps really taken under these factors; only ever rises.

    Raises:
        TypeError: if this is no torch optimizer, or a group has no learning rate that could be multiplied.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> factors = factors_of(optimizer)
        >>> factors.set("warmup", lambda step: (step + 1) / 2)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> factors.used(), optimizer.param_groups[0]["lr"], weight.item()
        ([0.25], 0.5, 0.75)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        self.clock = 0
        self.taken = 0
        self._optimizer = weakref.ref(optimizer)
        self._by_name: dict[str, Callable[[int], float]] = {}
        self._stepping = False
        self._cancelled = False
        self._worn: list[_Worn] = []
        self._used: list[LearningRate] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load_state_dict),
        )

    def set(self, name: str, factor: Callable[[int], float]) -> None:
        """Add the factor ``name`` or replace it; in the middle of a step it already counts for that step.

        Args:
            name: who it belongs to, for instance "warmup".
            factor: clock -> factor. A closure over a number works too; call :meth:`refresh` after changing the number.
        """
        self._by_name[name] = factor
        self.refresh()

    def remove(self, name: str) -> None:
        """Take the factor ``name`` away, and the hooks too once nobody is left."""
        self.hide()
        self._by_name.pop(name, None)
        if not self._by_name:
            for handle in self._handles:
                handle.remove()
            optimizer = self._optimizer()
            if optimizer is not None:
                _FACTORS.pop(optimizer, None)

    def factor(self) -> float:
        """The product of all factors at the present clock."""
        return math.prod(factor(self.clock) for factor in self._by_name.values())

    def show(self) -> None:
        """Put the factors on now, for those who read ``group["lr"]``; :meth:`hide` or the next step takes them off."""
        self._put_on()

    def hide(self) -> None:
        """Take the factors off: every group has the very object back that its scheduler gave it."""
        self._stepping = False
        self._take_off()

    def refresh(self) -> None:
        """Put the factors on anew if they are on: for one that changed in the middle of the step."""
        if self._stepping or self._worn:
            self._put_on()

    def cancel_step(self, cancel: bool = True) -> None:
        """Do not count the step that is under way: its gradients were taken away, so that nothing moves.

        Args:
            cancel: False takes it back, for a step that was never begun.
        """
        self._cancelled = cancel

    def names(self) -> tuple[str, ...]:
        """Who has a factor here."""
        return tuple(self._by_name)

    def get(self, name: str) -> Callable[[int], float] | None:
        """The factor ``name``, if somebody has set it."""
        return self._by_name.get(name)

    def used(self) -> list[float]:
        """Effective learning rate of the last step that was taken, by group; empty before the first one.

        Copies from the device only for a learning rate that is a tensor.
        """
        return [float(rate) for rate in self._used]

    def _put_on(self) -> None:
        self._take_off()  # also heals a step that an exception has left open
        optimizer, factor = self._optimizer(), self.factor()
        if optimizer is not None and factor != 1.0:  # at 1.0 not even the identity of the lr object may change
            self._worn = [_Worn(group, factor) for group in optimizer.param_groups]

    def _take_off(self) -> None:
        for worn in self._worn:
            worn.take_off()
        self._worn = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = True
        self._put_on()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:  # the second end of a nested call: a subclass whose step() calls super().step()
            return
        # Read from the groups and not from _worn: what the update did use, even if user code wrote lr meanwhile.
        rates = [_copy(group["lr"]) for group in optimizer.param_groups]
        self.hide()
        cancelled, self._cancelled = self._cancelled, False
        if not cancelled and not _skipped(optimizer):
            self._used = rates
            self.clock += 1
            self.taken += 1

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # A checkpoint taken inside a step (in fp32 all of training_step is inside one) holds the scheduler's lr too.
        for worn in self._worn:
            for saved in state_dict["param_groups"]:
                if saved["lr"] is worn.effective:
                    saved["lr"] = worn.scheduled

    def _after_load_state_dict(self, optimizer: Optimizer) -> None:
        # The groups are new dicts that hold the loaded, clean lr: what was worn is gone with the old ones.
        on, self._worn = bool(self._worn), []
        if on or self._stepping:
            self._put_on()


class _Worn:
    """One group with the factor on: what it was, what it is."""

    def __init__(self, group: dict[str, Any], factor: float) -> None:
        self.group = group
        self.scheduled: LearningRate = group["lr"]
        # A new object, never in place: a tensor lr may be shared with optimizer.defaults and with other groups.
        self.effective: LearningRate = self.scheduled * factor
        group["lr"] = self.effective

    def take_off(self) -> None:
        """Undo, unless somebody has written lr meanwhile (user code, or load_state_dict): then theirs stays."""
        if self.group["lr"] is self.effective:
            self.group["lr"] = self.scheduled


class Curtain(Callback):
    """Closes what a callback showed to the ``LearningRateMonitor`` behind it: stands right after that monitor.

    Without it the factors would still be on in ``training_step``, where manual optimization steps its schedulers.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take all factors off again."""
        for optimizer in trainer.optimizers:
            hide(optimizer)


_FACTORS: weakref.WeakKeyDictionary[Optimizer, Factors] = weakref.WeakKeyDictionary()


def factors_of(optimizer: Any) -> Factors:
    """The one :class:`Factors` of an optimizer, made on first use.

    Args:
        optimizer: a torch optimizer, or Lightning's wrapper around one.
    """
    inner = _unwrap(optimizer)
    if inner not in _FACTORS:
        _FACTORS[inner] = Factors(inner)
    return _FACTORS[inner]


def hide(optimizer: Any) -> None:
    """Take the factors of an optimizer off, if it has any and they are on."""
    factors = _FACTORS.get(_unwrap(optimizer))
    if factors is not None:
        factors.hide()


def effective_learning_rates(optimizers: Sequence[Any]) -> dict[str, float]:
    """What the last steps used, under the names that loggers get: see :data:`metrics.EFFECTIVE_LEARNING_RATE`.

    Args:
        optimizers: all optimizers of the run. A group is named by its "name", or else counted "0", "1", ...; with
            several optimizers "optimizer1/0" is the first group of the second one.
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


def draw_curtain(trainer: Any, callback: Callback) -> Curtain | None:
    """Stand a :class:`Curtain` behind the last ``LearningRateMonitor`` that comes after ``callback``.

    Args:
        trainer: the Lightning Trainer.
        callback: the one that will call :meth:`Factors.show` in ``on_train_batch_start``.

    Returns:
        The curtain, for :func:`lift_curtain`; None if there is no such monitor and so nobody to show anything to.
    """
    own = trainer.callbacks.index(callback)
    monitors = [index for index, other in enumerate(trainer.callbacks) if index > own and _is_monitor(other)]
    if not monitors:
        return None
    curtain = Curtain()
    trainer.callbacks.insert(monitors[-1] + 1, curtain)
    return curtain


def lift_curtain(trainer: Any, curtain: Curtain | None) -> None:
    """Take a curtain out of ``trainer.callbacks`` again."""
    if curtain in trainer.callbacks:
        trainer.callbacks.remove(curtain)


def _is_monitor(callback: object) -> bool:
    # By name: `lightning.pytorch` and `pytorch_lightning` are two copies of the same class.
    return has_class_name(callback, "LearningRateMonitor")


def _unwrap(optimizer: Any) -> Any:
    wrapped = has_class_name(optimizer, "LightningOptimizer")
    return optimizer._optimizer if wrapped else optimizer


def _copy(rate: LearningRate) -> LearningRate:
    # Schedulers fill a tensor lr in place.
    return rate.clone() if isinstance(rate, Tensor) else rate


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has skipped the step by itself.

    Other optimizers are not called at all by a GradScaler that skips. The look at the device costs a sync, but only in
    fused fp16, and it is the same one that the scaler pays for every other optimizer.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


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
