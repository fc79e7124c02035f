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


def derive_key(*parts: object) -> int:
    """Hash the parts to 64 bits that are the same in every run, unlike Python's own ``hash``."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Rounds of splitmix64: shift to the right and exclusive or, then multiply."""
BLOCK = 1 << 15  # numbers that stay in the processor's cache through all rounds


@lru_cache(maxsize=16)
def permutation(key: int, count: int) -> NDArray[np.int64]:
    """The numbers 0 ... count - 1 in an order that depends on ``key`` alone, on every machine and version.

    The numbers are sorted by a hash, because numpy and torch do not promise the same permutation in their next
    version. The hash is one-to-one, so it is sorted in place and inverted: one array of ``count`` instead of three.

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
    # Odd factors have an inverse modulo 2^64, and two shifts in a row leave the 64 bits.
    for shift, factor in reversed(ROUNDS):
        numbers *= np.uint64(pow(factor, -1, 2**64))
        numbers ^= (numbers >> np.uint64(shift)) ^ (numbers >> np.uint64(2 * shift))
    numbers -= np.uint64(start)
    numbers *= np.uint64(pow(GOLDEN, -1, 2**64))


@dataclass(frozen=True)
class WindowOrder:
    """Training order: a pure function of (seed, step, rank).

    Pass p starts at a phase hashed from (seed, p), cuts the stream into windows that do not overlap, and visits them
    in a permutation of its own, each at most once; the next pass cuts elsewhere.

    Args:
        tokens: Tokens in the stream, boundaries included.
        context_length: Tokens per window; a window also needs the one token after it, as its last target.
        batch_size: Windows per batch and rank.
        ranks: Number of processes, which share the windows.
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
        """Windows of one pass: as many as fit at any phase, so that every pass is equally long."""
        return max(1, (self.tokens - self.context_length) // self.context_length)

    @property
    def steps_per_pass(self) -> int:
        """Batches of one pass, the same for every rank; windows that fill no batch wait for another pass."""
        return self.windows // (self.batch_size * self.ranks)

    def phase(self, number: int) -> int:
        """Start of pass ``number``, in tokens from the start of the stream."""
        last = self.tokens - 1 - self.windows * self.context_length
        return derive_key("phase", self.seed, number) % (min(self.context_length - 1, last) + 1)

    def offsets(self, step: int, rank: int) -> NDArray[np.int64]:
        """Starts of the windows of one rank's batch in the stream: [batch_size], in tokens."""
        number, batch = divmod(step, self.steps_per_pass)
        order = permutation(derive_key("order", self.seed, number), self.windows)
        return self.phase(number) + _share(order, batch, rank, self) * self.context_length


@dataclass(frozen=True)
class ValidationOrder:
    """Validation order: every token is a target exactly once, in one fixed pseudo-random order of windows.

    The order does not depend on the training seed, so the first k batches (Lightning's ``limit_val_batches=k``) are
    always the same representative sample, not the start of the first file.

    Args:
        tokens: Tokens in the stream, boundaries included.
        context_length: Tokens per window.
        batch_size: Windows per batch and rank.
        ranks: Number of processes, which share the windows.

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
        """Batches per rank, the same for every rank; the last one of a rank may be empty."""
        return -(-self.windows // (self.batch_size * self.ranks))

    def offsets(self, batch: int, rank: int) -> NDArray[np.int64]:
        """Starts of the windows of one rank's batch in the stream: [0 ... batch_size], in tokens."""
        order = permutation(derive_key("validation"), self.windows)
        return _share(order, batch, rank, self) * self.context_length


def _share(order: NDArray[np.int64], batch: int, rank: int, of: WindowOrder | ValidationOrder) -> NDArray[np.int64]:
    shared = of.batch_size * of.ranks
    return order[batch * shared : (batch + 1) * shared][rank :: of.ranks]
