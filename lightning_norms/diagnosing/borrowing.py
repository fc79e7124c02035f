"""Short runs of copies on the user's Trainer: precision, strategy and callbacks are real, and nothing of it changes."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils._pytree import tree_leaves

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.anatomy.sharding import grad_scaler
from lightning_norms.diagnosing.stand_in import StandIn

LEFT_OUT = frozenset(
    {
        "Checkpoint", "ProgressBar", "ModelSummary", "EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor",
        "Timer", "SaveConfigCallback", "LearningRateFinder", "BatchSizeFinder", "ThroughputMonitor",
        "DepthMonitor", "LRFallback", "SpikeDetection",
    }
)  # fmt: skip
"""Callbacks that write files, monitor, stop or rescue a run: they take no part in what a configuration does."""
RESTORED = (
    "callbacks",
    "loggers",
    "limit_val_batches",
    "num_sanity_val_steps",
    "fit_loop",
    "datamodule",
    "should_stop",
    "_default_root_dir",
)
LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "lightning_norms")


def is_left_out(callback: Callback) -> bool:
    """Whether a callback takes no part in short runs."""
    # By name: `lightning.pytorch` and `pytorch_lightning` are two copies of the same classes.
    return has_class_name(callback, *LEFT_OUT)


@contextmanager
def borrowed(trainer: Any) -> Iterator[list[Callback]]:
    """Strip a trainer of loggers, files and validation for any number of fits, and restore it afterwards.

    Its folders are temporary ones meanwhile: modules write samples to ``self.trainer.log_dir``.

    Yields:
        The callbacks that are part of the configuration; every fit needs copies of them.
    """
    saved = {name: getattr(trainer, name) for name in RESTORED}
    strategy = {name: getattr(trainer.strategy, name, None) for name in ("_lightning_module", "_model")}
    training, state = trainer.training, copy.copy(trainer.state)
    trainer.limit_val_batches, trainer.num_sanity_val_steps = 0, 0
    try:
        with _silence(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trainer.loggers = [StandIn(logger, folder) for logger in saved["loggers"]]
            trainer._default_root_dir = folder
            yield [callback for callback in saved["callbacks"] if not is_left_out(callback)]
    finally:
        for name, value in saved.items():
            setattr(trainer, name, value)
        for name, value in strategy.items():
            setattr(trainer.strategy, name, value)
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs = [], []
        trainer.state, trainer.training = state, training


def fit_afresh(trainer: Any, module: Any, callbacks: Sequence[Callback], data: Any) -> None:
    """Fit from step 0 with new loops, so that nothing is left of an earlier fit.

    Args:
        trainer: a borrowed trainer.
        module: a copy of the user's module, which will change.
        callbacks: callbacks of this fit.
        data: a data module, loaders, or None for the module's own.
    """
    old = trainer.fit_loop
    loop = type(old)(trainer, min_epochs=None, max_epochs=old.max_epochs)
    loop.epoch_loop = type(old.epoch_loop)(trainer, min_steps=None, max_steps=old.epoch_loop.max_steps)
    trainer.fit_loop, trainer.callbacks = loop, list(callbacks)
    scaler = grad_scaler(trainer)
    scale = None if scaler is None else copy.deepcopy(scaler.state_dict())
    name = "datamodule" if has_class_name(data, "LightningDataModule") else "train_dataloaders"
    try:
        trainer.fit(module, **({} if data is None else {name: data}))
    finally:
        if scaler is not None and scale:
            scaler.load_state_dict(scale)


@contextmanager
def same_order(data: Any) -> Iterator[None]:
    """Restore the generators of loaders afterwards, so that the next run gets the same batches."""
    loaders = [leaf for leaf in tree_leaves(data) if hasattr(leaf, "sampler") or hasattr(leaf, "batch_sampler")]
    parts = [part for x in loaders for part in (x, x.sampler, getattr(x.batch_sampler, "sampler", None))]
    generators = [g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def copy_module(module: Any) -> Any:
    """Copy a module without the trainer it is attached to; the copy shares nothing with it."""
    attached = {name: getattr(module, name) for name in ("_trainer", "_fabric") if getattr(module, name, None)}
    for name in attached:
        setattr(module, name, None)
    try:
        return copy.deepcopy(module)
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        raise ValueError(
            f"diagnose: {type(module).__name__} cannot be copied, and trials need copies: {str(error).splitlines()[0]}"
        ) from error
    finally:
        for name, value in attached.items():
            setattr(module, name, value)


def plain_trainer(module: Any) -> Any:
    """A silent trainer for one process, from the same copy of Lightning as the module."""
    # `lightning.pytorch` and `pytorch_lightning` are two copies, and each refuses the other's modules.
    library = next(parent.__module__ for parent in type(module).__mro__ if parent.__name__ == "LightningModule")
    package = importlib.import_module("lightning.pytorch" if library.startswith("lightning.") else "pytorch_lightning")
    return package.Trainer(
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Silence Lightning during trials."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
