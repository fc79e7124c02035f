"""``RunRecord``: the results of a run in one file, which is complete or absent."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_norms.files.log_folder import Folder, find_log_folder, read_file, write_file
from lightning_norms.measuring.batch_history import BatchHistory
from lightning_norms.measuring.depth_history import DepthHistory
from lightning_norms.measuring.scores import pick_scores
from lightning_norms.metrics import GRAD_NORM
from lightning_norms.reports.typed_json import as_plain

FILE = "record.json"
CACHE_POSITIONS, CACHE_BYTES = 4096, 2
"""The key/value cache size is reported for this many tokens in bfloat16."""
POINTS = 1000
"""Most validations in the record."""


class RunRecord(Callback):
    """Writes ``record.json`` to the log folder when a fit has come to its end: the row that ``compare`` tabulates.

    ==================================  =================================================================
    ``scores``, ``curve``               of every validation set, at the end and at each validation
    ``losses``, ``loss_stride``         training loss of every ``loss_stride``-th batch, at most 10,000
    ``seconds_per_step``                median over the batches, without validation
    ``steps``, ``parameters``           optimizer steps; trained parameters
    ``kv_cache_bytes``                  of our decoder, for 4,096 tokens in bfloat16
    ``spike_score``                     share of batches whose loss is far above the 128 before
    ``events``                          what ``LRFallback`` did, by action
    ``gradient_first``, ``_last``       norms by depth from ``DepthMonitor``
    ==================================  =================================================================

    Its state goes into checkpoints, so that an interrupted run that is resumed ends with the record of an uninterrupted
    one. A fit that crashes, or is interrupted, leaves no record. Losses are read from the device every 100 batches.

    Works on any LightningModule: scores are the bits per byte that validation logs under any usual name, else losses.

    Args:
        folder: where the file goes, a path or a URL; null for the log folder.

    Raises:
        ValueError: if the folder is no path.

    Example:
        >>> import tempfile
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> folder = tempfile.mkdtemp()
        >>> quiet = dict(logger=False, enable_checkpointing=False, enable_model_summary=False)
        >>> trainer = Trainer(max_steps=2, callbacks=[RunRecord(folder)], enable_progress_bar=False, **quiet)
        >>> trainer.fit(BoringModel())
        >>> record = read(folder)
        >>> record["steps"], len(record["losses"]), record["parameters"]
        (2, 2, 66)
    """

    def __init__(self, folder: str | None = None) -> None:
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise ValueError(f"RunRecord: folder must be a path or null, got {folder!r}")
        self.folder = folder
        self._reset()

    def _reset(self) -> None:
        self.history = BatchHistory()
        self.curve: list[dict[str, float]] = []
        self._has_news = False
        self._restored = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._restored:  # a second fit has a record of its own
            self._reset()
        self._restored = self._has_news = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.history.start(pl_module.device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        output = outputs.get("loss") if isinstance(outputs, dict) else outputs
        loss = output if isinstance(output, torch.Tensor) else None
        self.history.end(pl_module.device, loss, trainer.accumulate_grad_batches)  # Lightning has divided by the window
        self._has_news = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            kept = self.curve if len(self.curve) < POINTS else self.curve[::2]
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.curve = [*kept, {"step": float(trainer.global_step), **pick_scores(metrics)}]
            self._has_news = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = self.folder or find_log_folder(trainer)
        # A fit that was resumed behind its last step has neither trained nor validated: it has no news.
        if folder is None or trainer.interrupted or not trainer.is_global_zero or not self._has_news:
            return
        text = json.dumps(as_plain(self._record(trainer, pl_module)), allow_nan=False)
        try:
            write_file(folder, FILE, text.encode())
        except Exception as error:  # the run has ended well
            rank_zero_warn(f"RunRecord: the run is fine, but {FILE} cannot be written to {folder}: {error!r}")

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        self.history.read()
        seconds, last = self.history.seconds.values, self.curve[-1] if self.curve else {}
        first_gradient, last_gradient = _gradients(trainer)
        cache = getattr(pl_module, "kv_cache_bytes", None)
        return {
            "scores": {name: score for name, score in last.items() if name != "step"},
            "steps": trainer.global_step,
            "parameters": sum(p.numel() for p in pl_module.parameters() if p.requires_grad),
            "seconds_per_step": statistics.median(seconds) if seconds else None,
            "kv_cache_bytes": cache(CACHE_POSITIONS, CACHE_BYTES) if cache is not None else None,
            "spike_score": self.history.spike_score(),
            "events": _events(trainer),
            "losses": self.history.losses.values,
            "loss_stride": self.history.losses.stride,
            "curve": self.curve,
            "gradient_first": first_gradient,
            "gradient_last": last_gradient,
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict(), "curve": [dict(point) for point in self.curve]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict["history"])
        self.curve = [dict(point) for point in state_dict["curve"]]
        self._restored = True


def read(folder: Folder) -> dict[str, Any]:
    """The record in a folder; a FileNotFoundError if no fit has ended there."""
    data: dict[str, Any] = json.loads(read_file(folder, FILE))
    return data


def _events(trainer: Trainer) -> dict[str, int] | None:
    """How often LRFallback did what; callbacks recognise each other by their attributes, not by class."""
    logs = [callback.events for callback in trainer.callbacks if hasattr(callback, "events")]  # type: ignore[attr-defined]
    return dict(Counter(event.action for log in logs for event in log)) if logs else None


def _gradients(trainer: Trainer) -> Sequence[dict[str, float] | None]:
    """Gradient norms by depth at the first and at the last step that DepthMonitor has recorded."""
    histories = [getattr(callback, "history", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for history in histories:
        if isinstance(history, DepthHistory) and history.steps:
            profile = history.profile(GRAD_NORM.of(""))
            rows = dict(zip(profile.groups, profile.values, strict=True))
            return [{group: row[at] for group, row in rows.items()} for at in (0, -1)]
    return None, None
