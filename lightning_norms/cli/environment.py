"""Callbacks for somebody else's training script, named by an environment variable: no line of the script changes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_norms.anatomy.names import has_class_name
from lightning_norms.cli import error_messages
from lightning_norms.rescale_rules import RescaleRule
from lightning_norms.schedules import Schedule
from lightning_norms_entry_point import VARIABLE

CHOICES: dict[str, type] = {"callbacks": Callback, "schedule": Schedule, "rule": RescaleRule}
KEY = "--trainer.callbacks"  # as in a LightningCLI file, which is what the short messages know
FORM = (
    "[LRFallback, {class_path: DepthMonitor, init_args: {every_n_steps: 30}}], or the path of a YAML file with a list"
)


class FromEnvironment(Callback):
    """Puts the callbacks that ``LIGHTNING_NORMS_CALLBACKS`` names in front of the Trainer's own, when it starts.

    ::

        LIGHTNING_NORMS_CALLBACKS='[{class_path: Warmup, init_args: {schedule: {class_path: Noam, ...}}}, LRFallback]'
        LIGHTNING_NORMS_CALLBACKS=callbacks.yaml

    The list is that of ``trainer.callbacks`` in a LightningCLI file. A callback of a kind that the script, or its
    module's ``configure_callbacks``, has already is not added again; one line says what was added and what was not.
    They stand before the script's own, in the order of the list, so a ``LearningRateMonitor`` of the script shows the
    effective learning rate. Processes that Lightning starts inherit the variable.

    Args:
        text: what the variable says.

    Raises:
        ValueError: it is no such list; in one sentence.

    Example:
        >>> [type(callback).__name__ for callback in FromEnvironment("[LRFallback, DepthMonitor]").named]
        ['LRFallback', 'DepthMonitor']
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.named = read_callbacks(text)
        self._is_settled = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Here the module's ``configure_callbacks`` has had its say, and no state has been restored."""
        if self._is_settled:
            return  # a second fit
        self._is_settled = True
        present: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        added = [callback for callback in self.named if not any(_is_a(each, callback) for each in present)]
        _say(added, [callback for callback in self.named if callback not in added])
        # A new list: Lightning is on its way through the old one, and would call the next one's setup twice.
        tuners = [each for each in present if type(each).__name__ in ("LearningRateFinder", "BatchSizeFinder")]
        others = [each for each in present if each not in tuners]
        trainer.callbacks = [*tuners, *added, *others]  # type: ignore[attr-defined]
        for callback in added:
            callback.log, callback.log_dict = pl_module.log, pl_module.log_dict  # type: ignore[attr-defined]
            callback.setup(trainer, pl_module, stage)


def read_callbacks(text: str) -> list[Callback]:
    """The callbacks that a YAML list, or a file with one, names; built.

    Args:
        text: the list itself, or a path. The syntax is that of LightningCLI: a class by one word, by its path, or with
            ``class_path`` and ``init_args``.

    Raises:
        ValueError: in one sentence.
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
    """The list, from the text or from the file that it names."""
    is_file = len(text.splitlines()) == 1 and Path(text).is_file()
    try:
        data = yaml.safe_load(Path(text).read_text(encoding="utf-8") if is_file else text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refusal(f"{text if is_file else 'its value'} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, list) or not data:
        raise _refusal(f"{text} holds no list" if is_file else f"{text!r} is neither a list nor a file here")
    for entry in data:
        if not isinstance(entry, str) and not (isinstance(entry, dict) and "class_path" in entry):
            raise _refusal(f"{entry!r} names no callback")
        if data.count(entry) > 1:
            raise _refusal(f"{entry!r} stands there twice")
    return data


def _refusal(reason: str) -> ValueError:
    end = "" if reason.endswith((".", "?")) else "."
    return ValueError(f"{VARIABLE}: {reason}{end} Give a list such as {FORM}.")


def _is_a(present: Callback, named: Callback) -> bool:
    # By name: `lightning.pytorch` and `pytorch_lightning` are two copies of the same classes.
    return has_class_name(present, type(named).__name__)


def _say(added: list[Callback], left_out: list[Callback]) -> None:
    words = [", ".join(type(callback).__name__ for callback in each) for each in (added, left_out)]
    parts = [f"adds {words[0]}"] if added else []
    parts += [f"leaves out {words[1]}, which the script has already"] if left_out else []
    rank_zero_info(f"{VARIABLE} {'; '.join(parts)}.")
