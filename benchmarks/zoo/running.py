"""One fit of a kind on a quiet Trainer, with its losses."""

from __future__ import annotations

import logging
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from benchmarks.zoo.kinds import Kind


@dataclass
class Run:
    """What a fit left behind: losses by optimizer step, the trained module, and the error that ended it, if any."""

    losses: list[float]
    module: LightningModule
    seconds: float
    error: str | None = None
    finite: bool = True


class _Losses(Callback):
    """The training loss of every optimizer step; under accumulation the mean of its batches."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._window: list[float] = []
        self._step = 0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning divides the loss by the number of accumulated batches.
        share = trainer.accumulate_grad_batches
        self._window.append(math.nan if loss is None else share * float(loss))
        if trainer.global_step > self._step:
            self.losses.append(sum(self._window) / len(self._window))
            self._window, self._step = [], trainer.global_step


@contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor the notes of Lightning."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning_norms")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def make_trainer(kind: Kind, steps: int, folder: str, callbacks: Sequence[Callback] = ()) -> Trainer:
    """The Trainer that a kind asks for, on the CPU, without files."""
    options = kind.trainer()
    return Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{**options, "callbacks": [*options.get("callbacks", ()), *callbacks]},
    )  # fmt: skip


def run(kind: Kind, seed: int, steps: int, callbacks: Sequence[Callback] = ()) -> Run:
    """Fit a kind for some optimizer steps; an error ends the run and is kept."""
    recorder, error = _Losses(), None
    with quiet(), tempfile.TemporaryDirectory() as folder:
        seed_everything(seed, verbose=False)
        module, data = kind.build(seed)
        trainer = make_trainer(kind, steps, folder, [*callbacks, recorder])
        start = time.perf_counter()
        try:
            trainer.fit(module, data)
        except (RuntimeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        seconds = time.perf_counter() - start
    finite = all(bool(weight.isfinite().all()) for weight in module.parameters())
    return Run(recorder.losses, module, seconds, error, finite)
