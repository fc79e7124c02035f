"""The protections that are compared, all at their defaults: each is a fresh guard for every run."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import SpikeDetection
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.faults.rows import digest

OWN, ARC = "own", "arc"
PACKAGE = Path(__file__).parents[2] / "lightning_norms"
DECIDING = ("rescue", "measuring", "anatomy", "learning_rate", "callbacks/lr_fallback.py")
"""Parts of our package that decide how a protected run ends."""


def _nothing() -> dict[str, int]:
    return {}


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Guard:
    """A protection in one run.

    Attributes:
        callbacks: for the Trainer.
        trainer: more arguments of the Trainer.
        counts: what it did, by name; asked after the run.
        flagged: whether it called for a person other than by an error.
    """

    callbacks: Sequence[Callback] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    counts: Callable[[], dict[str, int]] = _nothing
    flagged: Callable[[], bool] = _never


@dataclass(frozen=True)
class Column:
    """A protection.

    Attributes:
        name: heading in the tables.
        make: a new guard.
        version: what its results depend on besides the row.
        interpreter: the Python that it runs in: this one, or that of its own environment.
    """

    name: str
    make: Callable[[], Guard]
    version: Callable[[], str]
    interpreter: str = OWN


class SkipNonFinite(Callback):
    """Takes no step from a NaN or an Inf, as GradScaler does."""

    def __init__(self) -> None:
        self.skipped = 0

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        if not torch.nn.utils.get_total_norm([weight.grad for weight in weights]).isfinite():
            self.skipped += 1
            for weight in weights:
                weight.grad = None


def no_protection() -> Guard:
    """Nothing."""
    return Guard()


def clipping() -> Guard:
    """Lightning's own clipping of the gradient norm at 1."""
    return Guard(trainer={"gradient_clip_val": 1.0})


def spike_detection() -> Guard:
    """Lightning's SpikeDetection; its list of batches goes to a folder that nobody reads."""
    return Guard([SpikeDetection(exclude_batches_path=str(Path(tempfile.gettempdir(), f"skip{os.getpid()}.json")))])


def skip_non_finite() -> Guard:
    """No step from gradients that are not finite."""
    callback = SkipNonFinite()
    return Guard([callback], counts=lambda: {"skip": callback.skipped} if callback.skipped else {})


def lr_fallback() -> Guard:
    """Ours."""
    from lightning_norms.callbacks.lr_fallback import LRFallback  # peers run where it is not installed

    callback = LRFallback()
    return Guard([callback], counts=lambda: dict(Counter(event.action for event in callback.events)))


def arc_controller() -> Guard:
    """arc-training's Controller, which is shown the loss."""
    from benchmarks.faults.arc_peer import controller_guard  # AGPL: only in its own environment

    return controller_guard()


def arc_callback() -> Guard:
    """arc-training's callback for Lightning, which is not."""
    from benchmarks.faults.arc_peer import callback_guard

    return callback_guard()


def _lightning() -> str:
    return f"lightning {version('lightning')}, torch {version('torch')}"


def _ours() -> str:
    files = [str(file) for part in DECIDING for file in sorted([*(PACKAGE / part).rglob("*.py"), PACKAGE / part])]
    files += [str(PACKAGE / f"{part}.py") for part in DECIDING]
    return f"lightning_norms {digest(*(file for file in files if Path(file).is_file()))}"


def _arc() -> str:
    return f"arc-training {version('arc-training')}"


NONE, OURS = "no protection", "LRFallback"
COLUMNS = (
    Column(NONE, no_protection, _lightning),
    Column("clipping at 1", clipping, _lightning),
    Column("SpikeDetection", spike_detection, _lightning),
    Column("skip non-finite", skip_non_finite, _lightning),
    Column("arc Controller", arc_controller, _arc, ARC),
    Column("arc Lightning", arc_callback, _arc, ARC),
    Column(OURS, lr_fallback, _ours),
)
BY_NAME = {column.name: column for column in COLUMNS}
