"""What a loss is computed from: logits and labels, recorded on their way into torch's loss functions."""

from __future__ import annotations

import inspect
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

    Example:
        >>> with LossWatcher() as watcher:
        ...     _ = F.cross_entropy(torch.zeros(4, 3), torch.tensor([0, 0, 1, 1]))
        >>> watcher.classes, watcher.labels
        (3, 4)
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: Tensor | None = None
        self._labels: dict[int, Tensor] = {}  # by number of classes, on the device: no read by the host in a step
        self._rows: dict[tuple[int, ...], int] = {}  # by shape of the values of a squared loss
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

    @property
    def classes(self) -> int | None:
        """V, the number of columns of the logits; None without a cross-entropy."""
        return max(self._labels, key=lambda size: float(self._labels[size]), default=None)

    @property
    def labels(self) -> int:
        """Number of labels counted; for squared losses, of rows."""
        return max(self._rows.values(), default=0) if self.classes is None else int(self._labels[self.classes])

    @torch.no_grad()
    def _add_classes(self, call: inspect.BoundArguments) -> None:
        call.apply_defaults()
        logits, target = call.arguments["input"].detach(), call.arguments["target"]
        self.logits = logits
        size = logits.shape[1 if logits.ndim > 1 else 0]
        if target.is_floating_point():
            number = target.float().sum()
        else:
            number = ((target != call.arguments["ignore_index"]) & (target >= 0) & (target < size)).sum()
        self._labels[size] = self._labels.get(size, 0) + number

    def _add_values(self, call: inspect.BoundArguments) -> None:
        self.logits, target = call.arguments["input"].detach(), call.arguments["target"]
        shape = tuple(target.shape[1:])
        self._rows[shape] = self._rows.get(shape, 0) + (len(target) if target.ndim else 1)
