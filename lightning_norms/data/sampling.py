"""Which windows of a token stream make up a batch: pure functions of the batch's number and the rank.

::

    stream     0  t1 t2 t3 t4 t5 t6 t7 t8 ...        0 is the boundary before a document
    window     [inputs----]                           context_length tokens
                  [targets---]                        the same, one token later
                           [inputs----]               the next window shares one token, no target twice
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def derived_key(*parts: object) -> int:
    """64 bits that depend on every part and on nothing else (Python's own ``hash`` differs from run to run)."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Splitmix64's: shift to the right and exclusive or, then multiply."""
BLOCK = 1 << 15  # numbers that stay in the processor's cache through all rounds


@lru_cache(maxsize=16)
def permutation(key: int, count: int) -> NDArray[np.int64]:
    """The numbers 0 ... count - 1 in an order that depends on ``key`` alone, on every machine and version.

    Sorts them by a hash (numpy and torch do not promise the same permutation in their next version). The hash is
    one-to-one, so the hashes alone are sorted, where they stand, and then turned back into the numbers: one array of
    ``count``, where sorting positions takes three.

    Example:
        >>> permutation(1, 6).tolist()
        [4, 3, 0, 1, 5, 2]

    Source: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    order = np.arange(count, dtype=np.uint64)
    blocks = [order[start : start + BLOCK] for start in range(0, count, BLOCK)]
    for block in blocks:
        _mix(block, (key + GOLDEN) % 2**64)
    order.sort()
    for block in blocks:
        _unmix(block, (key + GOLDEN) % 2**64)
    order.setflags(write=False)
    return order.view(np.int64)


def _mix(numbers: NDArray[np.uint64], start: int) -> None:
    numbers *= np.uint64(GOLDEN)
    numbers += np.uint64(start)
    for shift, factor in ROUNDS:
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)


def _unmix(numbers: NDArray[np.uint64], start: int) -> None:
    """Undo :func:`_mix`: odd factors have an inverse modulo 2^64, and a shift undone twice has left 64 bits."""
    for shift, factor in reversed(ROUNDS):
        numbers *= np.uint64(pow(factor, -1, 2**64))
        numbers ^= (numbers >> np.uint64(shift)) ^ (numbers >> np.uint64(2 * shift))
    numbers -= np.uint64(start)
    numbers *= np.uint64(pow(GOLDEN, -1, 2**64))


@dataclass(frozen=True)
class WindowOrder:
    """Training order: a pure function of (seed, step, rank).

    Pass p starts at a hash-derived phase, cuts the stream into windows that do not overlap, and visits them in a
    permutation seeded by (seed, p). Each pass sees each window once at most; the next one cuts elsewhere.

    Args:
        tokens: Tokens in the stream, boundaries included.
        context_length: Tokens per window; a window also needs the one token after it, as its last target.
        batch_size: Windows per batch and rank.
        ranks: Processes that each take other windows.
        seed: Another seed gives another order.

    Raises:
        ValueError: If a pass would have no batch, with what to change.

    Example:
        >>> order = WindowOrder(tokens=24, context_length=4, batch_size=2, ranks=1, seed=0)
        >>> order.windows, order.steps_per_pass
        (5, 2)
        >>> order.offsets(step=0, rank=0).tolist(), order.offsets(step=1, rank=0).tolist()
        ([4, 12], [16, 8])
    """

    tokens: int
    context_length: int
    batch_size: int
    ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens <= self.context_length:
            raise ValueError(
                f"{self.tokens} tokens make 0 windows of context_length={self.context_length}: "
                f"at least {self.context_length + 1} tokens are needed; give more text or a smaller context_length"
            )
        if self.steps_per_pass < 1:
            raise ValueError(
                f"{self.tokens} tokens make {self.windows} window(s) of context_length={self.context_length}, "
                f"fewer than batch_size={self.batch_size} x {self.ranks} rank(s): "
                "give more text or a smaller batch_size"
            )

    @property
    def windows(self) -> int:
        """Windows of one pass: what fits whatever the phase, so that every pass is equally long."""
        return max(1, (self.tokens - self.context_length) // self.context_length)

    @property
    def steps_per_pass(self) -> int:
        """Batches of one pass, the same for every rank; windows that fill no batch wait for another pass."""
        return self.windows // (self.batch_size * self.ranks)

    def phase(self, number: int) -> int:
        """Where pass ``number`` starts, in tokens from the start of the stream."""
        last = self.tokens - 1 - self.windows * self.context_length
        return derived_key("phase", self.seed, number) % (min(self.context_length - 1, last) + 1)

    def offsets(self, step: int, rank: int) -> NDArray[np.int64]:
        """Where the windows of one rank's batch start in the stream: [batch_size], in tokens."""
        number, batch = divmod(step, self.steps_per_pass)
        order = permutation(derived_key("order", self.seed, number), self.windows)
        shared = self.batch_size * self.ranks
        chosen = order[batch * shared : (batch + 1) * shared][rank :: self.ranks]
        return self.phase(number) + chosen * self.context_length


@dataclass(frozen=True)
class ValidationOrder:
    """Validation order: every token is a target exactly once, in one fixed pseudo-random order of windows.

    The order is the same in every run, whatever the training seed, so the first k batches (Lightning's
    ``limit_val_batches=k``) are always the same representative sample and not the start of the first file.

    Args:
        tokens: Tokens in the stream, boundaries included.
        context_length: Tokens per window.
        batch_size: Windows per batch and rank.
        ranks: Processes that each take other windows.

    Example:
        >>> order = ValidationOrder(tokens=10, context_length=4, batch_size=2)
        >>> [order.offsets(batch, rank=0).tolist() for batch in range(order.batches)]
        [[0, 4], [8]]
    """

    tokens: int
    context_length: int
    batch_size: int
    ranks: int = 1

    @property
    def windows(self) -> int:
        """Windows, the last short one included; the first token of the stream is an input only."""
        return -(-(self.tokens - 1) // self.context_length)

    @property
    def batches(self) -> int:
        """Batches per rank, the same for every rank (the last of a rank may hold no window at all)."""
        return -(-self.windows // (self.batch_size * self.ranks))

    def offsets(self, batch: int, rank: int) -> NDArray[np.int64]:
        """Where the windows of one rank's batch start in the stream: [0 ... batch_size], in tokens."""
        shared = self.batch_size * self.ranks
        order = permutation(derived_key("validation"), self.windows)
        return order[batch * shared : (batch + 1) * shared][rank :: self.ranks] * self.context_length
