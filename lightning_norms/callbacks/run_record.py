"""``RunRecord``: what a run ended with, in one file that is whole or not there."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_norms.measuring.depth_history import DepthHistory
from lightning_norms.measuring.spike_score import SpikeScore
from lightning_norms.metrics import GRAD_NORM, VAL_BITS_PER_BYTE
from lightning_norms.reports.typed_json import as_plain

FILE = "record.json"
CACHE_POSITIONS, CACHE_BYTES = 4096, 2
"""The key/value cache is told for this many tokens in bfloat16."""
_SCORE_ENDS = VAL_BITS_PER_BYTE.of("{}").rpartition("/")[2]


class RunRecord(Callback):
    """Writes ``record.json`` to the log folder when a fit has come to its end: what ``compare`` puts in its table.

    The record holds scores of every validation set, training loss by batch, seconds a step, trained parameters, bytes
    of the key/value cache, SpikeScore, LRFallback's events and DepthMonitor's gradients where those are there. It goes
    into checkpoints, so that an interrupted run that is resumed ends with the record of an uninterrupted one. A fit
    that crashes, or is interrupted, leaves no record.

    Works on any LightningModule: without our bits per byte, scores are what validation logs with "loss" in its name.

    Args:
        folder: where the file goes; null for the log folder.

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
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.curve: list[dict[str, float]] = []
        self._clock = 0.0
        self._did_something = False
        self._restored = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A second fit has a record of its own; a resumed one goes on."""
        if not self._restored:
            self._reset()
        self._restored = self._did_something = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One loss; reading it waits for the device, so the clock is true there too."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self.losses.append(float(loss.detach()) * trainer.accumulate_grad_batches)  # Lightning has divided it
        self.seconds.append(time.perf_counter() - self._clock)
        self._did_something = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One point of the curve."""
        if not trainer.sanity_checking:
            self.curve.append({"step": float(trainer.global_step), **_scores(trainer)})
            self._did_something = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        folder = self.folder or trainer.log_dir
        # A fit that was resumed behind its last step has not validated: there is nothing that it could tell.
        if folder is None or trainer.interrupted or not trainer.is_global_zero or not self._did_something:
            return
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(as_plain(self._record(trainer, pl_module)), allow_nan=False), encoding="utf-8")
        part.replace(path)

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        last = dict(self.curve[-1]) if self.curve else {}
        last.pop("step", None)
        cache = getattr(pl_module, "kv_cache_bytes", None)
        first_gradient, last_gradient = _gradients(trainer)
        return {
            "scores": last,
            "steps": trainer.global_step,
            "parameters": sum(p.numel() for p in pl_module.parameters() if p.requires_grad),
            "seconds_per_step": statistics.median(self.seconds) if self.seconds else None,
            "kv_cache_bytes": cache(CACHE_POSITIONS, CACHE_BYTES) if cache is not None else None,
            "spike_score": _spike_score(self.losses),
            "events": _events(trainer),
            "losses": self.losses,
            "curve": self.curve,
            "gradient_first": first_gradient,
            "gradient_last": last_gradient,
        }

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far: plain lists."""
        return {
            "losses": list(self.losses),
            "seconds": list(self.seconds),
            "curve": [dict(point) for point in self.curve],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind it."""
        self.losses, self.seconds = list(state_dict["losses"]), list(state_dict["seconds"])
        self.curve = [dict(point) for point in state_dict["curve"]]
        self._restored = True


def read(folder: str | Path) -> dict[str, Any]:
    """The record in a folder.

    Raises:
        FileNotFoundError: if no fit has ended there.
    """
    data: dict[str, Any] = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
    return data


def _scores(trainer: Trainer) -> dict[str, float]:
    """Validation set -> bits per byte; without any, the validation losses by their keys."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    ours = {name.split("/", 1)[1].rpartition("/")[0]: v for name, v in values.items() if name.endswith(_SCORE_ENDS)}
    return ours or {name: value for name, value in values.items() if "loss" in name}


def _spike_score(losses: list[float]) -> float | None:
    score = SpikeScore()
    for loss in losses:
        score.update(loss)
    return score.value() if score.judged else None


def _events(trainer: Trainer) -> dict[str, int] | None:
    """What a fallback says that it has done; callbacks know each other by what they have, not by class."""
    logs = [callback.events for callback in trainer.callbacks if hasattr(callback, "events")]  # type: ignore[attr-defined]
    return dict(Counter(event.action for log in logs for event in log)) if logs else None


def _gradients(trainer: Trainer) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """By depth, at the first and at the last step that a monitor has in its history."""
    histories = [getattr(callback, "history", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for history in (each for each in histories if isinstance(each, DepthHistory)):
        profile = history.profile(GRAD_NORM.of(""))
        if profile.steps:
            ends = ({g: row[at] for g, row in zip(profile.groups, profile.values, strict=True)} for at in (0, -1))
            first, last = ends
            return first, last
    return None, None
