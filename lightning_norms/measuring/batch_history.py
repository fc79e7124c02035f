"""Loss and duration of the training batches of a run of any length: bounded, and read from the device in blocks."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor

from lightning_norms.anatomy.sharding import to_full
from lightning_norms.measuring.spike_score import SpikeScore


class ThinnedSeries:
    """Every ``stride``-th number of a series, from the first on: at most ``limit`` of them, an even number.

    When the list is full, every second number is dropped and the stride doubles::

        0 1 2 3   ->   0 . 2 . 4 . 6   ->   0 . . . 4 . . . 8        limit = 4
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.values: list[float] = []
        self.stride = 1
        self.count = 0

    def add(self, value: float) -> None:
        """Take in the next number."""
        if self.count % self.stride == 0:
            if len(self.values) == self.limit:
                self.values, self.stride = self.values[::2], 2 * self.stride
            self.values.append(value)
        self.count += 1


class BatchHistory:
    """Loss, seconds and SpikeScore of the batches between :meth:`start` and :meth:`end`.

    Losses stay on the device until :meth:`read`, which :meth:`end` calls every ``BLOCK`` batches. At most ``limit``
    losses and durations are kept, an even number.
    """

    BLOCK = 100
    _PARTS = ("losses", "seconds", "spikes")

    def __init__(self, limit: int = 10_000) -> None:
        self.losses, self.seconds = ThinnedSeries(limit), ThinnedSeries(limit)
        self.spikes = SpikeScore()
        self._losses: list[tuple[Tensor, int]] = []
        self._times: list[tuple[Any, Any]] = []
        self._started: Any = None

    def start(self, device: torch.device) -> None:
        """A batch begins on ``device``."""
        self._started = _now(device)

    def end(self, device: torch.device, loss: Tensor | None, weight: int) -> None:
        """A batch has ended with ``loss``, a scalar that counts times ``weight``; None if it has none."""
        if loss is not None:
            self._losses.append((to_full(loss.detach()).reshape(()).clone(), weight))
        self._times.append((self._started, _now(device)))
        if len(self._times) == self.BLOCK:
            self.read()

    def read(self) -> None:
        """Copy what waits on the device to the host, in one piece."""
        if self._losses:
            losses, weights = zip(*self._losses, strict=True)
            numbers = torch.stack([loss.to(losses[0].device) for loss in losses]).tolist()
            for number, weight in zip(numbers, weights, strict=True):
                self.losses.add(number * weight)
                self.spikes.update(number * weight)
        for start, end in self._times:
            self.seconds.add(_seconds(start, end))
        self._losses, self._times = [], []

    def spike_score(self) -> float | None:
        """SpikeScore of the losses; None before there are enough."""
        return self.spikes.value() if self.spikes.judged else None

    def state_dict(self) -> dict[str, Any]:
        """Everything so far: plain data of bounded size."""
        self.read()
        return {name: copy.deepcopy(vars(getattr(self, name))) for name in self._PARTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the history of a :meth:`state_dict`."""
        for name in self._PARTS:
            vars(getattr(self, name)).update(copy.deepcopy(state[name]))


def _now(device: torch.device) -> Any:
    """This moment in the work of the device; on CUDA an event, which costs no wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000  # from milliseconds
