"""What a loss is computed from: logits and labels, recorded on their way into torch's loss functions.

A dead run falls to the loss of the best constant prediction and stays there. That loss is a property of the labels, so
it can be computed for any LightningModule whose ``training_step`` calls a loss of torch.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

CROSS_ENTROPY = inspect.signature(F.cross_entropy)
SQUARED = inspect.signature(F.mse_loss)


class LossWatcher(TorchFunctionMode):
    """Counts the labels of every ``cross_entropy`` and ``mse_loss`` while it is active; changes nothing.

    If a step has several losses, the one with the most labels so far is reported.

    Attributes:
        logits: input of the last loss, detached.
        smoothing: label smoothing of the last cross-entropy.

    Example:
        >>> with LossWatcher() as watcher:
        ...     _ = F.cross_entropy(torch.zeros(4, 3), torch.tensor([0, 0, 1, 1]))
        >>> watcher.classes, watcher.labels, round(watcher.constant_loss(), 3)
        (3, 4, 0.818)
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: Tensor | None = None
        self.smoothing = 0.0
        self._counts: dict[int, Tensor] = {}  # by number of classes: float32 [classes]
        self._steps: list[dict[int, Tensor]] = [{}]  # the same for each step, the last one still open
        self._moments: dict[tuple[int, ...], Tensor] = {}  # by shape: count, sum and sum of squares [3, values]
        self._is_active = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            self._add_classes(CROSS_ENTROPY.bind(*args, **(kwargs or {})))
        elif func is F.mse_loss:
            self._add_values(SQUARED.bind(*args, **(kwargs or {})))
        return result

    def start(self) -> None:
        """Count from here on."""
        self._is_active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop counting, if :meth:`start` was called."""
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """Close a step: the labels since the last call belong to it."""
        self._steps.append({})

    @property
    def classes(self) -> int | None:
        """V, the number of columns of the logits; None without a cross-entropy."""
        return max(self._counts, key=lambda size: float(self._counts[size].sum()), default=None)

    @property
    def labels(self) -> int:
        """Number of labels counted."""
        if self.classes is not None:
            return int(self._counts[self.classes].sum())
        return int(max((moments[0].max() for moments in self._moments.values()), default=0))

    def constant_loss(self) -> float | None:
        r"""Loss of the best constant prediction for the labels counted, in nats (or squared units).

        For classes, the entropy of their frequencies with Miller and Madow's correction :math:`(m - 1) / 2n` for m
        distinct classes in n labels; for values, their variance. None if nothing was counted.
        """
        if self.classes is not None:
            return _entropy(self._counts[self.classes], self.smoothing)
        if not self._moments:
            return None
        count, total, squares = max(self._moments.values(), key=lambda moments: float(moments[0].max())).unbind()
        return float((squares / count - (total / count).square()).mean())

    def constant_loss_over(self, trainer: Any) -> float | None:
        """Return :meth:`constant_loss` over the labels of all ranks; a collective."""
        total = LossWatcher()
        total.smoothing = self.smoothing
        total._counts = {size: _sum(trainer, counts) for size, counts in sorted(self._counts.items())}
        total._moments = {shape: _sum(trainer, moments) for shape, moments in sorted(self._moments.items())}
        return total.constant_loss()

    def constant_losses_over(self, trainer: Any) -> tuple[float, ...]:
        r"""Loss of the best constant prediction on the labels of each step; empty if no classes were counted.

        The prediction is the same for all steps, so a run that follows these losses step by step has learnt nothing
        else. A collective.

        .. math:: -\sum_v \frac{c_{tv}}{n_t} \ln p_v + \frac{m - 1}{2n}
        """
        size = self.classes
        if size is None:
            return ()
        rows = [step.get(size, torch.zeros_like(self._counts[size])) for step in self._steps[:-1]]
        counts = _sum(trainer, torch.stack(rows)) if rows else torch.zeros(0, size)
        total = counts.sum(0)
        shares = (1 - self.smoothing) * total.double() / total.sum() + self.smoothing / size
        logs = shares.clamp(min=1e-300).log()
        mixed = (1 - self.smoothing) * counts.double() + self.smoothing * counts.sum(1, keepdim=True) / size
        optimism = (int((total > 0).sum()) - 1) / (2 * float(total.sum()))
        return tuple((-(mixed * logs).sum(1) / counts.sum(1) + optimism).tolist())

    @torch.no_grad()
    def _add_classes(self, call: inspect.BoundArguments) -> None:
        call.apply_defaults()
        logits, target = call.arguments["input"].detach(), call.arguments["target"]
        self.logits, self.smoothing = logits, float(call.arguments["label_smoothing"])
        size = logits.shape[1 if logits.ndim > 1 else 0]
        if target.is_floating_point():
            rest = [axis for axis in range(target.ndim) if axis != (1 if target.ndim > 1 else 0)]
            counts = target.float().sum(rest)
        else:
            valid = target[(target != call.arguments["ignore_index"]) & (target >= 0) & (target < size)]
            counts = torch.bincount(valid.flatten(), minlength=size).float()
        for sums in (self._counts, self._steps[-1]):
            sums[size] = sums[size] + counts if size in sums else counts

    @torch.no_grad()
    def _add_values(self, call: inspect.BoundArguments) -> None:
        self.logits, target = call.arguments["input"].detach(), call.arguments["target"]
        rows = target.float().reshape(len(target), -1) if target.ndim else target.float().reshape(1, 1)
        moments = torch.stack([torch.full_like(rows[0], len(rows)), rows.sum(0), rows.square().sum(0)])
        shape = tuple(target.shape[1:])
        self._moments[shape] = self._moments[shape] + moments if shape in self._moments else moments


def _entropy(counts: Tensor, smoothing: float) -> float:
    total, size = float(counts.sum()), len(counts)
    if not total:
        return math.nan
    mixed = (1 - smoothing) * (counts.double() / total) + smoothing / size
    entropy = -float((mixed * mixed.clamp(min=1e-300).log()).sum())
    distinct = int((counts > 0).sum())
    return min(entropy + (distinct - 1) / (2 * total), math.log(size))


def _sum(trainer: Any, tensor: Tensor) -> Tensor:
    total: Tensor = trainer.strategy.reduce(tensor.clone(), reduce_op="sum") if trainer.world_size > 1 else tensor
    return total
