"""Ask before a run goes back: would the same batch do better on the snapshot's weights than on the present ones?

::

                      present weights   snapshot's weights
    divergence              9.1                0.4           going back helps
    other data, other loss  9.1                9.0           it does not: the weights are not to blame

Both passes see the same batch, random numbers, buffers and frozen weights, take no gradient, and leave no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_norms.anatomy.sharding import is_flattened, reshard, sharding_group, sum_over_ranks, to_local
from lightning_norms.rescue.attributes import kept_attributes
from lightning_norms.rescue.snapshot import Snapshot

SHARE = 0.5
"""Part of the rise of the loss that going back must undo."""


@dataclass(frozen=True)
class Comparison:
    """Losses of one batch on the present weights and on those of a snapshot, mean over the ranks.

    Attributes:
        step: of the snapshot.
        present: loss on the present weights.
        before: loss on the snapshot's weights.

    Example:
        >>> Comparison(step=50, present=9.0, before=0.4).helps(lowest=0.3)
        True
        >>> Comparison(step=50, present=9.0, before=8.9).helps(lowest=0.3)
        False
    """

    step: int
    present: float
    before: float

    def helps(self, lowest: float | None) -> bool:
        """Whether going back undoes at least half of the rise above ``lowest``, the best level of the loss so far."""
        if not (math.isfinite(self.present) and math.isfinite(self.before)):
            return math.isfinite(self.before)
        rise = abs(self.present) if lowest is None else self.present - lowest
        return self.present - self.before > max(0.0, SHARE * rise)

    @property
    def words(self) -> str:
        """The two losses in half a sentence."""
        return f"the same batch gives {self.present:.4g}, and {self.before:.4g} on the weights of step {self.step}"


class Replay:
    """Runs ``training_step`` again on the batch of the present step, on any weights, without side effects.

    A module can say that this is not possible: ``can_replay_step = False``. Manual optimization, ``dataloader_iter``
    and steps that fail without gradients and with them cannot be replayed either.

    Args:
        trainer: the Lightning Trainer.
        module: its LightningModule.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._batch: tuple[Any, int] | None = None
        self._healthy: tuple[Any, int] | None = None
        takes_iterator = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        says_no = not getattr(module, "can_replay_step", True)
        self._is_possible = module.automatic_optimization and not takes_iterator and not says_no

    def keep_batch(self, batch: Any, batch_idx: int) -> None:
        """Remember the batch that begins; a reference, let go of by :meth:`drop_batch`."""
        if self._is_possible:
            self._batch = (batch, batch_idx)

    def drop_batch(self, is_healthy: bool = False) -> None:
        """Let go of the batch, or keep it as the one of the healthy time."""
        if is_healthy:
            self._healthy = self._batch
        self._batch = None

    def compare(self, snapshot: Snapshot) -> Comparison | None:
        """Losses of the present batch; None where the step cannot be replayed. Every rank must call it."""
        return self._compare(snapshot, self._batch)

    def compare_healthy(self, snapshot: Snapshot) -> Comparison | None:
        """Losses of the batch that was kept from the healthy time."""
        return self._compare(snapshot, self._healthy)

    def _compare(self, snapshot: Snapshot, batch: tuple[Any, int] | None) -> Comparison | None:
        if not self._is_possible:
            return None
        present = self._loss_on(batch, lambda: None)
        before = self._loss_on(batch, lambda: snapshot.put_weights(self._module, self._trainer.optimizers))
        values = [math.nan if value is None else value for value in (present, before)]
        failures = float(present is None) + float(before is None)
        losses = torch.tensor([*values, failures], device=self._trainer.strategy.root_device)
        if self._trainer.world_size > 1:
            (losses,) = sum_over_ranks([losses], self._trainer.strategy)
        one, other, failed = losses.tolist()
        if failed:
            return None
        return Comparison(snapshot.step, one / self._trainer.world_size, other / self._trainer.world_size)

    def _loss_on(self, batch: tuple[Any, int] | None, change_weights: Callable[[], None]) -> float | None:
        """The loss after ``change_weights``, which is undone; None if the step gives none or fails."""
        if batch is None:
            return None
        for needs_gradient in (False, True):  # a gradient penalty fails without
            if needs_gradient and self._is_sharded():
                return None
            with self._unchanged(), torch.set_grad_enabled(needs_gradient):
                change_weights()
                try:
                    output = self._step(*batch)
                except Exception:
                    continue
                loss = output.get("loss") if isinstance(output, dict) else output
                return None if not isinstance(loss, Tensor) else float(loss.detach())
        return None

    def _step(self, batch: Any, batch_idx: int) -> Any:
        strategy, step = self._trainer.strategy, self._module.training_step
        has_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        arguments = (batch, batch_idx) if has_index else (batch,)
        if self._is_sharded():  # the wrapper gathers the weights
            return strategy.training_step(*arguments)
        with strategy.precision_plugin.train_step_context():
            return step(*arguments)

    def _is_sharded(self) -> bool:
        model = self._trainer.strategy.model
        by_tensor = any(hasattr(parameter, "placements") for parameter in self._module.parameters())
        return by_tensor or is_flattened(model) or sharding_group(model) is not None

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Put back, afterwards, weights, buffers, attributes, random numbers; log nothing meanwhile."""
        reshard(self._module)
        named = [*self._module.parameters(), *self._module.buffers()]
        tensors = [to_local(tensor.detach()) for tensor in named]
        copies = [tensor.to("cpu", copy=True) for tensor in tensors]
        loggers = self._trainer._loggers if hasattr(self._trainer, "_loggers") else []
        try:
            self._trainer._loggers = [DummyLogger() for _ in loggers]
            with isolate_rng(), kept_attributes(self._module), _silent(self._module):
                yield
        finally:
            self._trainer._loggers = loggers
            reshard(self._module)
            _write(tensors, copies)


@torch.no_grad()
def _write(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """No ``self.log`` of the module or of the LightningModules in it has an effect."""
    silenced = [part for part in module.modules() if hasattr(part, "log_dict") and hasattr(part, "log")]
    before = [{name: vars(part)[name] for name in ("log", "log_dict") if name in vars(part)} for part in silenced]
    for part in silenced:
        vars(part).update(log=_log_nothing, log_dict=_log_nothing)
    try:
        yield
    finally:
        for part, own in zip(silenced, before, strict=True):
            for name in ("log", "log_dict"):
                vars(part).pop(name, None)
            vars(part).update(own)


def _log_nothing(*_: Any, **__: Any) -> None:
    """Take the place of ``self.log``."""
