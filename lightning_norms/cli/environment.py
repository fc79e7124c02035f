"""Callbacks that an environment variable adds to any training script, without a change of the script."""

from __future__ import annotations

import argparse
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.cli import error_messages
from lightning_norms.rescale_rules import RescaleRule
from lightning_norms.schedules import Schedule

VARIABLE = "LIGHTNING_NORMS_CALLBACKS"  # as in the entry point, which imports nothing of us unless it is set
CHOICES: dict[str, type] = {"callbacks": Callback, "schedule": Schedule, "rule": RescaleRule}
KEY = "--trainer.callbacks"  # as in a LightningCLI file, whose keys the short messages know
FORM = (
    "[LRFallback, {class_path: DepthMonitor, init_args: {every_n_steps: 30}}], or the path of a YAML file with a list"
)


class FromEnvironment(Callback):
    """Adds the callbacks that ``LIGHTNING_NORMS_CALLBACKS`` lists in front of the Trainer's own, when it starts.

    ::

        LIGHTNING_NORMS_CALLBACKS='[{class_path: Warmup, init_args: {schedule: {class_path: Noam, ...}}}, LRFallback]'
        LIGHTNING_NORMS_CALLBACKS=callbacks.yaml

    The syntax is that of ``trainer.callbacks`` in a LightningCLI file. A callback whose class the script, or its
    module's ``configure_callbacks``, already uses is not added; one log message lists what was added and what was not.
    Added callbacks come first, in the order of the list, so a ``LearningRateMonitor`` of the script shows the effective
    learning rate; this one then leaves the Trainer. Processes that Lightning starts inherit the variable.

    These callbacks never end a run: where one of ours would raise (several optimizers, LBFGS, DeepSpeed,
    blocks that it does not know, nothing left to try), it says why in one warning, leaves the Trainer, and the run goes
    on without it.

    Args:
        text: Value of the variable.

    Raises:
        ValueError: If it is not such a list, in one sentence.

    Example:
        >>> [type(callback).__name__ for callback in FromEnvironment("[LRFallback, DepthMonitor]").named]
        ['LRFallback', 'DepthMonitor']
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.named = read_callbacks(text)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # By now the module's configure_callbacks has been called, and no state has been restored.
        present = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        # By name: `lightning.pytorch` and `pytorch_lightning` are two copies of the same classes.
        names = [type(callback).__name__ for callback in self.named]
        skipped = {name for name in names if any(has_class_name(callback, name) for callback in present)}
        added = [callback for callback in self.named if type(callback).__name__ not in skipped]
        _log([name for name in names if name not in skipped], [name for name in names if name in skipped])
        # A new list: Lightning is iterating over the old one, and would call the next one's setup twice.
        tuners = [callback for callback in present if has_class_name(callback, "LearningRateFinder", "BatchSizeFinder")]
        others = [callback for callback in present if callback not in tuners]
        trainer.callbacks = [*tuners, *added, *others]  # type: ignore[attr-defined]
        for callback in added:
            callback.log, callback.log_dict = pl_module.log, pl_module.log_dict  # type: ignore[attr-defined]
            _let_it_switch_off(callback)
            callback.setup(trainer, pl_module, stage)


def _let_it_switch_off(callback: Callback) -> None:
    """Make each hook of a callback of ours take it out of the Trainer, in place of raising."""
    cls = type(callback)
    if cls.__module__.partition(".")[0] != "lightning_norms":
        return  # some of Lightning's own raise to end a run, or the search before it
    for name in ("setup", *(name for name in vars(Callback) if name.startswith("on_"))):
        if getattr(cls, name) is not getattr(Callback, name):
            setattr(callback, name, partial(_call_or_leave, callback, name))


def _call_or_leave(callback: Callback, hook: str, trainer: Trainer, *rest: Any, **named: Any) -> None:
    try:
        getattr(type(callback), hook)(callback, trainer, *rest, **named)
    except Exception as error:
        # A new list: Lightning is iterating over the old one.
        trainer.callbacks = [other for other in trainer.callbacks if other is not callback]  # type: ignore[attr-defined]
        rank_zero_warn(f"{VARIABLE}: {type(callback).__name__} is switched off, and the run goes on. {error}")
        with suppress(Exception):
            type(callback).on_exception(callback, trainer, trainer.lightning_module, error)  # undo what has begun


def read_callbacks(text: str) -> list[Callback]:
    """Build the callbacks of a YAML list, or of a file with one.

    Args:
        text: The list itself, or a path. The syntax is that of LightningCLI: a class by one word, by its path, or with
            ``class_path`` and ``init_args``.

    Raises:
        ValueError: If it is not such a list, in one sentence.
    """
    data = _load(text)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(KEY, type=list[Callback])
    try:
        built: Any = parser.instantiate_classes(parser.parse_object({KEY.removeprefix("--"): data}))
    except argparse.ArgumentError as error:
        raise _refusal(error_messages.explain(str(error), CHOICES).replace("trainer.callbacks", "callbacks")) from None
    except (ValueError, TypeError) as error:
        raise _refusal(str(error)) from None
    return list(built.trainer.callbacks)


def _load(text: str) -> list[Any]:
    is_file = len(text.splitlines()) == 1 and Path(text).is_file()
    try:
        data = yaml.safe_load(Path(text).read_text(encoding="utf-8") if is_file else text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refusal(f"{text if is_file else 'its value'} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, list) or not data:
        raise _refusal(f"{text} holds no list" if is_file else f"{text!r} is neither a list nor a file")
    for entry in data:
        if not isinstance(entry, str) and not (isinstance(entry, dict) and "class_path" in entry):
            raise _refusal(f"{entry!r} is not a callback")
        if data.count(entry) > 1:
            raise _refusal(f"{entry!r} is listed twice")
    return data


def _refusal(reason: str) -> ValueError:
    end = "" if reason.endswith((".", "?")) else "."
    return ValueError(f"{VARIABLE}: {reason}{end} Give a list such as {FORM}.")


def _log(added: list[str], skipped: list[str]) -> None:
    parts = [f"adds {', '.join(added)}"] if added else []
    parts += [f"leaves out {', '.join(skipped)}, which the script already has"] if skipped else []
    rank_zero_info(f"{VARIABLE} {'; '.join(parts)}.")
