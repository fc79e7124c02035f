"""A Trainer for short runs of copies: precision, strategy and callbacks are real, and it is given back as it was."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils._pytree import tree_leaves

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.anatomy.sharding import grad_scaler

LEFT_OUT = frozenset(
    {
        "Checkpoint", "ProgressBar", "ModelSummary", "EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor",
        "Timer", "SaveConfigCallback", "LearningRateFinder", "BatchSizeFinder", "ThroughputMonitor",
        "DepthMonitor", "LRFallback", "SpikeDetection",
    }
)  # fmt: skip
"""Write files, watch, or stop and rescue a run: no part of what a configuration does to the weights."""
KEPT = ("callbacks", "loggers", "limit_val_batches", "num_sanity_val_steps", "fit_loop", "datamodule", "should_stop")


def is_left_out(callback: Callback) -> bool:
    """Whether a callback has no part in short runs."""
    # By name: `lightning.pytorch` and `pytorch_lightning` are two copies of the same classes.
    return has_class_name(callback, *LEFT_OUT)


@contextmanager
def borrowed(trainer: Any) -> Iterator[list[Callback]]:
    """The trainer without loggers, files and validation, for any number of fits; afterwards as it was.

    Yields:
        The callbacks that are part of the configuration; each fit sets ``trainer.callbacks`` to copies of them.
    """
    saved = {name: getattr(trainer, name) for name in KEPT}
    strategy = {name: getattr(trainer.strategy, name, None) for name in ("_lightning_module", "_model")}
    training, state = trainer.training, copy.copy(trainer.state)
    # A module may write to self.logger.experiment: it gets a logger that takes everything and keeps nothing.
    trainer.loggers = [DummyLogger() for _ in saved["loggers"]]
    trainer.limit_val_batches, trainer.num_sanity_val_steps = 0, 0
    try:
        with _silence():
            yield [callback for callback in saved["callbacks"] if not is_left_out(callback)]
    finally:
        for name, value in saved.items():
            setattr(trainer, name, value)
        for name, value in strategy.items():
            setattr(trainer.strategy, name, value)
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs = [], []
        trainer.state, trainer.training = state, training


def fit_afresh(trainer: Any, module: Any, callbacks: Sequence[Callback], data: Any) -> None:
    """One fit from step 0, with loops of its own, so that nothing is left of an earlier one.

    Args:
        trainer: a borrowed one.
        module: a copy, which may change.
        callbacks: of this fit.
        data: a data module, loaders, or None for the module's own.
    """
    old = trainer.fit_loop
    loop = type(old)(trainer, min_epochs=None, max_epochs=old.max_epochs)
    loop.epoch_loop = type(old.epoch_loop)(trainer, min_steps=None, max_steps=old.epoch_loop.max_steps)
    trainer.fit_loop, trainer.callbacks = loop, list(callbacks)
    scaler = grad_scaler(trainer)
    scale = None if scaler is None else copy.deepcopy(scaler.state_dict())
    try:
        trainer.fit(module, **_as_arguments(data))
    finally:
        if scaler is not None and scale:
            scaler.load_state_dict(scale)


@contextmanager
def same_order(data: Any) -> Iterator[None]:
    """Put the generators of given loaders back afterwards, so that the next run is given the same batches."""
    loaders = [each for each in tree_leaves(data) if hasattr(each, "sampler") or hasattr(each, "batch_sampler")]
    parts = [part for each in loaders for part in (each, each.sampler, getattr(each.batch_sampler, "sampler", None))]
    found = [generator for part in parts if isinstance(generator := getattr(part, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, states, strict=True):
            generator.set_state(state)


def _as_arguments(data: Any) -> dict[str, Any]:
    if data is None:
        return {}
    is_module = has_class_name(data, "LightningDataModule")
    return {"datamodule" if is_module else "train_dataloaders": data}


@contextmanager
def _silence() -> Iterator[None]:
    """Ten short runs would say everything ten times."""
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "lightning_norms")
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
