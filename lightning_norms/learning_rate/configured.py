"""What ``configure_optimizers`` gives when a run is resumed, beside what its checkpoint puts back over it.

Lightning restores an optimizer whole, hyper-parameters included, so that a new learning rate is lost without a word.
Checkpoints therefore also hold what was configured: a learning rate that the user's own code changes while training
differs from the configured one, too, and is no change of configuration.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

KEY = "configured_optimizers"
Groups = list[list[dict[str, Any]]]


class Difference(NamedTuple):
    """One hyper-parameter of a parameter group that is configured otherwise than in the checkpoint."""

    group: dict[str, Any]
    key: str
    configured: Any
    restored: Any

    def __str__(self) -> str:
        return f"{self.key} {_short(self.configured)} (checkpoint: {_short(self.restored)})"


class Configured:
    """The hyper-parameters of a run's optimizers as configured, and those of its checkpoint; see :func:`configured_of`.

    ::

        on_load_checkpoint -> load, on_fit_start -> remember, on_train_start -> warn or apply
        on_save_checkpoint -> save
    """

    def __init__(self) -> None:
        self._configured: Groups = []
        self._restored: Groups | None = None
        self._is_judged = True

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what a checkpoint says about the configuration of its run."""
        self._restored = checkpoint.get(KEY)

    def remember(self, trainer: Any) -> None:
        """Take the hyper-parameters from the fresh optimizers."""
        self._configured = [[_hyper_parameters(group) for group in each.param_groups] for each in trainer.optimizers]
        self._is_judged = False

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Put the configuration that is in effect into a checkpoint."""
        if self._configured:
            checkpoint[KEY] = self._configured

    def warn(self, trainer: Any) -> None:
        """Say once, of a resumed run, what is configured but not in effect."""
        differences = self._judge(trainer)
        if differences:
            rank_zero_warn(
                "the run goes on with its checkpoint's optimizer, not with what is configured now: "
                f"{_list(differences)}. To use the new values, set them in on_train_start."
            )
            for difference, now in zip(differences, self._of(differences, trainer), strict=False):
                now[difference.key] = difference.restored

    def apply(self, trainer: Any) -> None:
        """Let a resumed run go on with what is configured now; schedulers go on from where they are."""
        differences = self._judge(trainer)
        for difference in differences:
            if difference.key == "lr":
                _set_base(difference)
            else:
                difference.group[difference.key] = difference.configured
        for config in trainer.lr_scheduler_configs if differences else ():
            _rebase(config.scheduler)
        if differences:
            rank_zero_info(f"resumed with what is configured now: {_list(differences)}")

    def _judge(self, trainer: Any) -> list[Difference]:
        is_resumed, self._is_judged = trainer.ckpt_path is not None and not self._is_judged, True
        return list(self._differences(trainer)) if is_resumed else []

    def _differences(self, trainer: Any) -> Iterator[Difference]:
        # Not strict: BackboneFinetuning adds groups before training starts.
        has_same_groups = self._restored and list(map(len, self._restored)) == list(map(len, self._configured))
        for at, (optimizer, groups) in enumerate(zip(trainer.optimizers, self._configured, strict=False)):
            for number, (group, now) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
                # Without what was configured, the learning rate itself: a guess if the user's code changes it.
                then = self._restored[at][number] if self._restored and has_same_groups else {"lr": _base(group)}
                for key, value in now.items():
                    if key in then and then[key] != value:
                        yield Difference(group, key, value, then[key])

    def _of(self, differences: Sequence[Difference], trainer: Any) -> Iterator[dict[str, Any]]:
        owners = {
            id(group): now
            for optimizer, groups in zip(trainer.optimizers, self._configured, strict=False)
            for group, now in zip(optimizer.param_groups, groups, strict=False)
        }
        return (owners[id(difference.group)] for difference in differences)


_CONFIGURED: weakref.WeakKeyDictionary[Any, Configured] = weakref.WeakKeyDictionary()


def configured_of(trainer: Any) -> Configured:
    """The one :class:`Configured` of a Trainer, whoever asks: a warning comes once a run."""
    return _CONFIGURED.setdefault(trainer, Configured())


class KeepsConfiguration(Callback):
    """A callback whose checkpoints hold what was configured; a subclass warns of a difference or applies it."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        configured_of(trainer).remember(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        configured_of(trainer).save(checkpoint)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        configured_of(trainer).load(checkpoint)


def _base(group: Mapping[str, Any]) -> float:
    """The learning rate before any scheduler."""
    return float(group.get("initial_lr", group["lr"]))


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    others = {key: _plain(value) for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
    rate = {} if group.get("lr") is None else {"lr": _base(group)}
    return {**rate, **{key: value for key, value in others.items() if value is not None}}


def _plain(value: Any) -> Any:
    """A number or a tuple of numbers as safe loading knows it; None for anything else."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) else int(value)


def _set_base(difference: Difference) -> None:
    """Scale the present learning rate, so that a schedule goes on where it stands."""
    group, ratio = difference.group, difference.configured / (difference.restored or 1.0)
    is_constant = not difference.restored or float(group["lr"]) == difference.restored
    rate = difference.configured if is_constant else float(group["lr"]) * ratio
    group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    if "initial_lr" in group:
        group["initial_lr"] = difference.configured


def _rebase(scheduler: Any) -> None:
    for part in getattr(scheduler, "_schedulers", ()):
        _rebase(part)
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is not None:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _list(differences: Sequence[Difference]) -> str:
    return ", ".join(dict.fromkeys(map(str, differences)))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
