"""Batches for PyTorch's DataLoader: batch number -> {"inputs", "targets"}, in an order that Lightning leaves alone.

The dataset's items are whole batches and the sampler yields their numbers. So the content of a batch is a pure function
of its number and rank, in whatever worker process it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_norms.data.encoding import TokenFile
from lightning_norms.data.sampling import ValidationOrder, WindowOrder
from lightning_norms.data.tokenizing import BOUNDARY

NOT_SCORED = -100  # the target that torch's cross_entropy ignores

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingBatches(Dataset[Batch]):
    """Batches of one rank's endless training data: inputs and targets of [batch_size, context_length].

    Args:
        tokens: The training stream.
        order: Which windows are in which batch.
        rank: Rank of this process.
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
    """Batches of one rank's share of a validation set: inputs and targets of [1 ... batch_size, context_length].

    Boundaries are not text and so never scored: the scored bytes are exactly the bytes of the text. A short window is
    padded with boundaries; a rank with no window left gets one row of them.

    Args:
        tokens: The validation stream.
        order: Which windows are in which batch.
        rank: Rank of this process.
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
            tokens = self.tokens.array[start : start + len(row)]
            row[: len(tokens)] = tokens
        inputs, targets = torch.from_numpy(windows).split_with_sizes([1, self.order.context_length], dim=1)
        inputs = torch.cat([inputs, targets[:, :-1]], dim=1)
        return {"inputs": inputs, "targets": targets.masked_fill(targets == BOUNDARY, NOT_SCORED)}


class BatchNumbers(DistributedSampler[int]):
    """Yields the numbers of as many batches as the dataset has, from ``start()`` on.

    It subclasses DistributedSampler only so that Lightning leaves it in place; the dataset already differs by rank.

    Args:
        dataset: The batches of one rank.
        start: Returns the first number; called at the start of every epoch.
    """

    def __init__(self, dataset: Dataset[Batch], start: Callable[[], int] = int) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=False)
        self._start = start

    def __iter__(self) -> Iterator[int]:
        start = self._start()
        return iter(range(start, start + len(self)))


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader that Lightning may resume in the middle of an epoch; it recognizes one by these two methods.

    The loader has no state of its own: the position is in the data module's state, which Lightning restores earlier,
    and also when ``configure_optimizers`` has made it build the loaders before the loops' states are back.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing."""


def build_loader(batches: Dataset[Batch], workers: int, start: Callable[[], int] = int) -> ResumableLoader:
    """Build a loader of whole batches that draws nothing from torch's global random numbers.

    Args:
        batches: The batches of one rank.
        workers: Processes that prepare batches ahead; 0 for none.
        start: Returns the number of the first batch; called at the start of every epoch.
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
