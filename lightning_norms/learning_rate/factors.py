"""Named factors on the learning rates of one optimizer: on only while its update runs.

::

    the user sets       0.10 ------------------------------> 0.09 -------
    group["lr"]         0.10 | 0.10 x factor, in the update | 0.10 | 0.09

So no scheduler and no code of the user, in ``training_step`` or anywhere else, ever sees a factor, nothing compounds,
and a checkpoint holds the user's learning rate. Two callbacks cannot each do this alone, as torch runs post-hooks in
the order of the pre-hooks: hence one :class:`Factors` for each optimizer, from :func:`.registry.factors_of`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_norms.learning_rate.rounding import RoundedUpdates
from lightning_norms.learning_rate.step_hooks import StepHooks

LearningRate = float | Tensor


class Factors:
    """Named factors on the learning rate of one optimizer, and the number of steps that it really took.

    Get it with :func:`.registry.factors_of`. A step that a GradScaler skips is not taken and not counted.

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
        self._checked = 1.0  # factor at which half-precision weights were last seen to move
        self._rounding: RoundedUpdates | None = None
        self._attach(optimizer)

    def _attach(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        if optimizer in FACTORS:
            FACTORS[optimizer].leave()
        self._optimizer = weakref.ref(optimizer)
        self._hooks = StepHooks(optimizer, self._begin_update, self._end_update, pause=self._restore)
        self._handles = (
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load_state_dict),
        )
        FACTORS[optimizer] = self

    def leave(self) -> None:
        """Take everything off the optimizer."""
        self.hide()
        self._hooks.remove()
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            FACTORS.pop(optimizer, None)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose learning rates these factors multiply, while it lives."""
        return self._optimizer()

    def move(self, optimizer: Optimizer) -> None:
        """Multiply the learning rates of another optimizer from now on; clock and factors go on."""
        self.leave()
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
            self.leave()

    def names(self) -> tuple[str, ...]:
        """Names of all factors."""
        return tuple(self._by_name)

    def get(self, name: str) -> Callable[[int], float] | None:
        """The factor ``name``, if it is set."""
        return self._by_name.get(name)

    def factor(self) -> float:
        """The product of all factors at the present clock."""
        return self._factor_at(self.clock)

    def _factor_at(self, clock: int) -> float:
        return math.prod(factor(clock) for factor in self._by_name.values())

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
        optimizer, factor = self._optimizer(), self.factor()
        is_lowered = factor <= self._checked / 2 and self._factor_at(self.clock + 1) <= factor  # and does not rise
        self._rounding = RoundedUpdates(optimizer) if is_lowered and optimizer is not None else None

    def _end_update(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # Read from the groups and not from _scaled: the update used this, even if it wrote lr itself. A scheduler
        # fills a tensor lr in place, so that is copied.
        rates = [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in optimizer.param_groups]
        self._warn_if_written(optimizer)
        factor = self.factor()
        self.hide()
        self._has_ended = True
        if not self.is_cancelled and not was_skipped(optimizer):
            self._used = rates
            self.clock += 1
            self.taken += 1
            if self._rounding is not None:
                self._checked = 0.0 if self._rounding.warn(max(map(float, rates))) else factor  # said once
        self._rounding = None

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


FACTORS: weakref.WeakKeyDictionary[Optimizer, Factors] = weakref.WeakKeyDictionary()
"""The one :class:`Factors` of each optimizer that has some."""


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has skipped the step by itself; a GradScaler does not call the others for a skip."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        # The second: a wrapper that does not call Optimizer.__init__.
        raise TypeError(f"a learning rate factor needs a torch.optim.Optimizer with step hooks; got {name}")
    for index, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, (int, float, Tensor)):
            raise TypeError(
                f"group {index} of {name} has lr={rate!r}, which cannot be multiplied: give the optimizer a number"
            )
