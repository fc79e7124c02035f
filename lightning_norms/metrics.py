"""Every logged number once, with its key, unit and meaning; and the one metric that has state.

A key with ``{}`` is filled in by :meth:`Key.of`, for instance ``GRAD_NORM.of("block_00")``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric


@dataclass(frozen=True)
class Key:
    """One logged series: its ``name`` in the logger, its ``unit``, and its ``meaning`` in a sentence.

    Example:
        >>> GRAD_NORM.of("total")
        'grad_norm/total'
    """

    name: str
    unit: str
    meaning: str

    def of(self, part: str) -> str:
        """Fill ``part`` into the name's ``{}``."""
        return self.name.format(part)


TRAIN_LOSS = Key("train/loss", "nats/token", "mean cross-entropy of the training batch")
TOKENS_PER_SECOND = Key("train/tokens_per_second", "tokens/s", "training tokens of all ranks per second of wall time")
VAL_LOSS = Key("val/{}/loss", "nats/token", "cross-entropy over every scored token of a validation set")
VAL_PERPLEXITY = Key("val/{}/perplexity", "1", "exp of the validation loss in nats per token")
VAL_BITS_PER_BYTE = Key("val/{}/bits_per_byte", "bits/byte", "sum of nats / (ln 2 x UTF-8 bytes scored)")
EFFECTIVE_LEARNING_RATE = Key(
    "learning_rate/effective/{}", "1", "learning rate that the optimizer used: the scheduler's x all factors, by group"
)
GRAD_NORM = Key("grad_norm/{}", "1", "L2 norm of the gradient, float32, unscaled, before clipping, by depth")
STREAM_RMS = Key("stream_rms/{}", "1", "root mean square of the residual stream after a block")
UPDATE_RATIO = Key("update_ratio/{}", "1", "L2 norm of the step's weight change / L2 norm of the weights, by depth")
FALLBACK = Key("fallback/{}", "1", "counts of LRFallback's skips, rollbacks and restarts so far, and its factor")
SPIKE_SCORE = Key("spike_score/{}", "1", "share of steps beyond 6 standard deviations of the 128 before them")

KEYS: tuple[Key, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Key))


class BitsPerByte(Metric):
    r"""Bits per byte of text: comparable over vocabularies and tokenizers.

    .. math:: \text{bits per byte} = \frac{\sum \text{nats}}{\ln 2 \cdot \sum \text{UTF-8 bytes scored}}

    A second number keeps what float32 rounds away from the nats, and the bytes are whole: the result does not depend on
    how the text was batched, also on devices without float64, such as Apple GPUs.

    Example:
        >>> metric = BitsPerByte()
        >>> metric.update(torch.tensor(2.0), torch.tensor(3))  # 1 nat a character on "aé": 2 characters, 3 bytes
        >>> round(metric.compute().item(), 5)
        0.9618
    """

    full_state_update = False
    higher_is_better = False
    nats: Tensor
    rounded: Tensor
    text_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("rounded", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("text_bytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nats: Tensor, text_bytes: Tensor) -> None:
        """Add one batch: ``nats`` the summed negative log-likelihood, ``text_bytes`` the UTF-8 bytes it was for."""
        term = nats.to(self.nats)
        total = self.nats + term
        other = total - self.nats
        self.rounded += (self.nats - (total - other)) + (term - other)  # exactly what the addition has lost
        self.nats = total
        self.text_bytes += text_bytes.to(self.text_bytes)

    def compute(self) -> Tensor:
        """Compute bits per byte since the last reset."""
        return (self.nats + self.rounded) / (math.log(2) * self.text_bytes)
