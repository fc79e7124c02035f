"""Batches for PyTorch's DataLoader: batch number -> {"inputs", "targets"}, in an order that Lightning leaves alone.

The dataset's items are whole batches and the sampler yields their numbers. So what a batch holds is a pure function
of its number and rank, whoever asks for it, in whatever worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_norms.data.encoding import TokenFile
from lightning_norms.data.sampling import ValidationOrder, WindowOrder
from lightning_norms.data.tokenizing import BOUNDARY

NOT_SCORED = -100  # torch's cross_entropy passes over it

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingBatches(Dataset[Batch]):
    """Batch ``step`` of one rank's endless training data: inputs and targets of [batch_size, context_length].

    Args:
        tokens: The training stream.
        order: Which windows are in which batch.
        rank: Whose batches these are.
    """

    tokens: TokenFile
    order: WindowOrder
    rank: int

    def __len__(self) -> int:
        return self.order.steps_per_pass

    def __getitem__(self, step: int) -> Batch:
        length = self.order.context_length + 1
        rows = [self.tokens.array[start : start + length] for start in self.order.offsets(step, self.rank)]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


@dataclass(frozen=True)
class ValidationBatches(Dataset[Batch]):
    """Batch of one rank's share of a validation set: inputs and targets of [1 ... batch_size, context_length].

    Boundaries are no text and so no scored targets: the scored bytes are the bytes of the text, exactly. A window
    that is short is filled up with boundaries that are not scored; so is one row for a rank with nothing left to do.

    Args:
        tokens: The validation stream.
        order: Which windows are in which batch.
        rank: Whose batches these are.
    """

    tokens: TokenFile
    order: ValidationOrder
    rank: int

    def __len__(self) -> int:
        return self.order.batches

    def __getitem__(self, batch: int) -> Batch:
        offsets = self.order.offsets(batch, self.rank)
        windows = np.full((max(1, len(offsets)), self.order.context_length + 1), BOUNDARY, dtype=np.int64)
        for row, start in zip(windows, offsets, strict=False):
            self._fill(row, int(start))
        inputs, targets = torch.from_numpy(windows).split_with_sizes([1, self.order.context_length], dim=1)
        inputs = torch.cat([inputs, targets[:, :-1]], dim=1)
        return {"inputs": inputs, "targets": targets.masked_fill(targets == BOUNDARY, NOT_SCORED)}

    def _fill(self, row: NDArray[np.int64], start: int) -> None:
        tokens = self.tokens.array[start : start + len(row)]
        row[: len(tokens)] = tokens


class BatchNumbers(DistributedSampler[int]):
    """The numbers of as many batches as the dataset has, from ``start()`` on.

    It is a DistributedSampler only in name: that is how Lightning sees that the ranks' shares are already different,
    and puts no sampler of its own in its place. The ranks are told apart in the dataset.

    Args:
        dataset: The batches of one rank.
        start: Gives the first number, asked at the start of every epoch.
    """

    def __init__(self, dataset: Dataset[Batch], start: Callable[[], int] = int) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=False)
        self._start = start

    def __iter__(self) -> Iterator[int]:
        start = self._start()
        return iter(range(start, start + len(self)))


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader that tells Lightning it can go on in the middle of an epoch.

    It has no state of its own: where to go on is in the data module's state, which Lightning restores earlier and
    also when ``configure_optimizers`` has made it build the loaders before the loops' states are back.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing; its presence is what Lightning looks for."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def loader(batches: Dataset[Batch], workers: int, start: Callable[[], int] = int) -> ResumableLoader:
    """A loader of whole batches from number ``start()`` on that draws nothing from torch's global random numbers.

    Args:
        batches: The batches of one rank.
        workers: Processes that prepare batches ahead; 0 for none.
        start: Gives the first batch's number, asked at the start of every epoch.
    """
    return ResumableLoader(
        batches,
        batch_size=None,
        sampler=BatchNumbers(batches, start),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),
    )
