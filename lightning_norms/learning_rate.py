"""The only writer of learning rates: effective = learning rate of the optimizer and its scheduler x all named factors.

The factors are applied only while the optimizer steps::

    scheduler sets      0.10 ------------------------------> 0.09 -------
    group["lr"]         0.10 | 0.10 x factor, during step() | 0.10 | 0.09
                          pre-hook                      post-hook

So no scheduler ever sees a factor, nothing compounds, and a checkpoint holds the scheduler's learning rate. Two
callbacks cannot each do this alone, as torch runs post-hooks in the order of the pre-hooks: hence one
:class:`Factors` for each optimizer, from :func:`factors_of`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.metrics import EFFECTIVE_LEARNING_RATE

LearningRate = float | Tensor


class Factors:
    """Named factors on the learning rate of one optimizer, and the number of steps that it really took.

    Get it with :func:`factors_of`. A step that a GradScaler skips is not taken and not counted.

    Attributes:
        clock: the step at which the factors are evaluated; set it to resume, or to start a warmup afresh.
        taken: steps really taken under these factors; only ever rises.

    Raises:
        TypeError: if this is no torch optimizer, or a group has no learning rate that can be multiplied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        self.clock = 0
        self.taken = 0
        self._optimizer = weakref.ref(optimizer)
        self._by_name: dict[str, Callable[[int], float]] = {}
        self._stepping = self._cancelled = False
        self._scaled: list[_Scaled] = []
        self._used: list[LearningRate] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load_state_dict),
        )

    def set(self, name: str, factor: Callable[[int], float]) -> None:
        """Add the factor ``name``, clock -> factor, or replace it; in the middle of a step it counts for that step."""
        self._by_name[name] = factor
        self.refresh()

    def remove(self, name: str) -> None:
        """Remove the factor ``name``, and the hooks with the last factor."""
        self.hide()
        self._by_name.pop(name, None)
        if not self._by_name:
            for handle in self._handles:
                handle.remove()
            optimizer = self._optimizer()
            if optimizer is not None:
                _FACTORS.pop(optimizer, None)

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
        optimizer, factor = self._optimizer(), self.factor()
        if optimizer is not None and factor != 1.0:  # at 1.0 not even the identity of the lr object may change
            self._scaled = [_Scaled(group, factor) for group in optimizer.param_groups]

    def hide(self) -> None:
        """Undo the factors: every group gets the very object back that its scheduler gave it."""
        self._stepping = False
        self._restore()

    def refresh(self) -> None:
        """Apply the factors anew if they are applied: for one that changed in the middle of the step."""
        if self._stepping or self._scaled:
            self.show()

    def cancel_step(self, cancel: bool = True) -> None:
        """Do not count the step in progress, whose gradients were removed; False takes this back."""
        self._cancelled = cancel

    def used(self) -> list[float]:
        """Effective learning rate of the last step that was taken, by group; empty before the first one."""
        return [float(rate) for rate in self._used]

    def _restore(self) -> None:
        for scaled in self._scaled:
            scaled.restore()
        self._scaled = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = True
        self.show()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:  # the second end of a nested call: a subclass whose step() calls super().step()
            return
        # Read from the groups and not from _scaled: the update used this, even if user code wrote lr meanwhile.
        # A scheduler fills a tensor lr in place, so that is copied.
        rates = [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in optimizer.param_groups]
        self.hide()
        cancelled, self._cancelled = self._cancelled, False
        if not cancelled and not _was_skipped(optimizer):
            self._used = rates
            self.clock += 1
            self.taken += 1

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # A checkpoint made inside a step (in fp32 all of training_step is inside one) holds the scheduler's lr too.
        for scaled, saved in product(self._scaled, state_dict["param_groups"]):
            if saved["lr"] is scaled.effective:
                saved["lr"] = scaled.scheduled

    def _after_load_state_dict(self, optimizer: Optimizer) -> None:
        # The groups are new dicts that hold the loaded, unscaled lr: there is nothing to restore in the old ones.
        was_scaled, self._scaled = bool(self._scaled), []
        if was_scaled or self._stepping:
            self.show()


class _Scaled:
    """A param group whose lr is temporarily scaled; remembers the original."""

    def __init__(self, group: dict[str, Any], factor: float) -> None:
        self.group = group
        self.scheduled: LearningRate = group["lr"]
        # A new object, never in place: a tensor lr may be shared with optimizer.defaults and with other groups.
        self.effective: LearningRate = self.scheduled * factor
        group["lr"] = self.effective

    def restore(self) -> None:
        """Undo, unless lr was written meanwhile (by user code, or load_state_dict): then that value stays."""
        if self.group["lr"] is self.effective:
            self.group["lr"] = self.scheduled


class HideFactors(Callback):
    """Removes the factors right after ``LearningRateMonitor`` has read the effective learning rate.

    Otherwise they would still be applied in ``training_step``, where manual optimization steps its schedulers.
    """

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in map(_unwrap, trainer.optimizers):
            if optimizer in _FACTORS:
                _FACTORS[optimizer].hide()


_FACTORS: weakref.WeakKeyDictionary[Optimizer, Factors] = weakref.WeakKeyDictionary()


def factors_of(optimizer: Any) -> Factors:
    """The one :class:`Factors` of a torch optimizer, or of Lightning's wrapper around one; made on first use."""
    inner = _unwrap(optimizer)
    if inner not in _FACTORS:
        _FACTORS[inner] = Factors(inner)
    return _FACTORS[inner]


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


def hide_after_monitor(trainer: Any, callback: Callback) -> HideFactors | None:
    """Insert a :class:`HideFactors` behind the last ``LearningRateMonitor`` that comes after ``callback``.

    Return it, to be removed from the trainer after fit; None if no such monitor reads the learning rate.
    """
    own = trainer.callbacks.index(callback)
    monitors = [i for i, c in enumerate(trainer.callbacks) if i > own and has_class_name(c, "LearningRateMonitor")]
    if not monitors:
        return None
    hider = HideFactors()
    trainer.callbacks.insert(monitors[-1] + 1, hider)
    return hider


def _unwrap(optimizer: Any) -> Any:
    return optimizer._optimizer if has_class_name(optimizer, "LightningOptimizer") else optimizer


def _was_skipped(optimizer: Optimizer) -> bool:
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
