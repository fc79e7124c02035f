"""Act after every step that the optimizers of a run take, and notice when no step is seen though weights move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_norms.anatomy.sharding import to_local
from lightning_norms.learning_rate.factors import was_skipped
from lightning_norms.learning_rate.registry import is_cancelled
from lightning_norms.learning_rate.step_hooks import StepHooks


class TakenSteps:
    """Calls ``action`` after every step that an optimizer takes: none that a GradScaler or ``LRFallback`` skips.

    Args:
        action: called after the step.

    Attributes:
        count: number of steps taken.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self.count = 0
        self._action = action
        self._hooks: list[tuple[Optimizer, StepHooks]] = []

    def follow(self, optimizers: Sequence[Any], stepping: Any = None) -> None:
        """Watch these optimizers instead of those before, unless the one whose step is under way is watched already."""
        current = [optimizer for optimizer, _ in self._hooks]
        is_same = len(current) == len(optimizers) and all(map(lambda a, b: a is b, current, optimizers))
        if is_same or any(stepping is optimizer for optimizer in current):
            return
        self.leave()
        for optimizer in optimizers:
            hooks = StepHooks(optimizer, begin=lambda: None, end=partial(self._end, optimizer))
            self._hooks.append((optimizer, hooks))

    def leave(self) -> None:
        """Take all hooks off."""
        for _, hooks in self._hooks:
            hooks.remove()
        self._hooks = []

    def _end(self, optimizer: Optimizer) -> None:
        if not is_cancelled(optimizer) and not was_skipped(optimizer):
            self.count += 1
            self._action()


class UnseenSteps:
    """Warns once that weights move while a callback sees no optimizer step; done with the first step that it sees.

    Args:
        module: the module that is trained.
        callback: name of the callback.
        consequence: what the callback does not do then, as the end of a sentence.
    """

    PATIENCE = 3
    """Batches in which weights have to move: a module may set its weights once or twice before its first step."""

    def __init__(self, module: nn.Module, callback: str, consequence: str) -> None:
        self._callback, self._consequence = callback, consequence
        self._batches = self._moved = 0
        trainable = (p for p in module.parameters() if p.requires_grad and not is_lazy(p))
        self._watched: Sequence[Tensor] = sorted(trainable, key=lambda parameter: parameter.numel())[:8]
        self._values = self._copy()

    def end_batch(self, trainer: Any, steps: int) -> None:
        """Judge a batch after which the callback has seen ``steps`` optimizer steps in this fit."""
        if steps or not self._watched:
            self._watched, self._values = (), []
            return
        before, self._values = self._values, self._copy()
        self._batches += 1
        self._moved += any(a.shape == b.shape and not a.equal(b) for a, b in zip(before, self._values, strict=True))
        if self._moved >= self.PATIENCE and self._batches >= self.PATIENCE * trainer.accumulate_grad_batches:
            optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "an optimizer"
            rank_zero_warn(
                f"{self._callback}: no optimizer step was seen in {self._batches} batches although the weights move, "
                f"so {self._consequence}: {names} is stepped past Lightning. Return the optimizer that steps from "
                "configure_optimizers, and call step() of self.optimizers()."
            )
            self._watched, self._values = (), []

    @torch.no_grad()
    def _copy(self) -> list[Tensor]:
        return [to_local(parameter.detach()).clone() for parameter in self._watched]


class ActsAfterSteps(Callback):
    """A callback that acts after every step taken; a subclass calls :meth:`begin` in ``on_train_start``."""

    first_only = False
    """Whether only the steps of the first optimizer count."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: TakenSteps | None = None
        self._unseen: UnseenSteps | None = None

    def begin(
        self, trainer: Trainer, pl_module: LightningModule, action: Callable[[], object], consequence: str
    ) -> None:
        """Call ``action`` after every step from here to the end of the fit.

        Args:
            trainer: the Trainer, when training starts.
            pl_module: the module that it trains.
            action: called after a step.
            consequence: what does not happen when no step is seen, as the end of a sentence.
        """
        self._leave()
        self._steps = TakenSteps(action)
        self._unseen = UnseenSteps(pl_module, type(self).__name__, consequence)
        self._follow(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._follow(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._follow(trainer, stepping=optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps is not None and self._unseen is not None:
            self._unseen.end_batch(trainer, self._steps.count)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": None, "_unseen": None}

    def _follow(self, trainer: Trainer, stepping: Optimizer | None = None) -> None:
        if self._steps is not None:
            self._steps.follow(trainer.optimizers[:1] if self.first_only else trainer.optimizers, stepping)

    def _leave(self) -> None:
        if self._steps is not None:
            self._steps.leave()
        self._steps = self._unseen = None
