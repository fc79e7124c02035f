"""LightningCLI with our classes known by one word, our defaults, and ``diagnose`` as a further subcommand."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from typing_extensions import override

from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.cli import error_messages
from lightning_norms.cli.configuration_wins import ConfigurationWins
from lightning_norms.cli.write_fix import write_fix
from lightning_norms.data.text import TextDataModule
from lightning_norms.data.tokens import Tokens
from lightning_norms.diagnosing.trainer import NormsTrainer
from lightning_norms.model.decoder import DecoderConfig
from lightning_norms.model.feed_forward import FeedForward
from lightning_norms.model.initialization import Initialization
from lightning_norms.model.norms import Norm
from lightning_norms.model.positions import Positions
from lightning_norms.model.residual import Placement
from lightning_norms.module import DecoderModule
from lightning_norms.reports.diagnosis.data import Diagnosis
from lightning_norms.reports.run_results import results_table
from lightning_norms.rescale_rules import RescaleRule
from lightning_norms.schedules import Schedule

CHOICES: dict[str, type] = {
    "model": LightningModule,
    "data": LightningDataModule,
    "trainer": Trainer,
    "callbacks": Callback,
    "decoder": DecoderConfig,
    "placement": Placement,
    "norm": Norm,
    "positions": Positions,
    "feed_forward": FeedForward,
    "initialization": Initialization,
    "tokens": Tokens,
    "schedule": Schedule,
    "rule": RescaleRule,
}
"""Key -> the class whose subclasses it accepts."""

DEFAULT_STEPS = 300
"""Length of a run whose configuration has no limit."""
PROGRAM = "lightning_norms"
DESCRIPTION = """\
Train deep Transformers with any norm placement.

  python -m lightning_norms fit --config post48.yaml       train; a shipped recipe or a file of yours
  python -m lightning_norms diagnose --config post48.yaml  will it train? if not: why, and what fixes it
  python -m lightning_norms compare --config exp015.yaml   variants by seeds: a table, and which gap is a result
  python -m lightning_norms recipes                        list the shipped recipes; show or cp one
  python -m lightning_norms generate --ckpt_path run.ckpt  text from a trained model

Options are not read from the environment, but three variables are: LIGHTNING_NORMS_CALLBACKS, a YAML list of
callbacks that every Trainer gets, also in other people's scripts; LIGHTNING_NORMS_CACHE, the folder of encoded text
(default ~/.cache/lightning_norms); PL_GLOBAL_SEED, which Lightning writes for the processes of a run.
"""


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds types and defaults to the help, and keeps our lines as they are written."""


class NormsCLI(LightningCLI):
    """LightningCLI for any LightningModule and data module, with ours as the defaults.

    Args:
        args: Words of the command line.
    """

    def __init__(self, args: list[str]) -> None:
        self.words = args
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=None if args[:1] == ["diagnose"] else SaveConfigCallback,
            trainer_class=NormsTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},  # without a logger, every run writes ./config.yaml
            trainer_defaults={"callbacks": [AfterStep()]},  # does nothing unless a placement asks for it
            parser_kwargs=_parser_options(self.subcommands()),
            args=args,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Our module and data are the default, so that --model.decoder.placement=DeepNorm is enough.
        parser.set_defaults(
            {"model": {"class_path": _path(DecoderModule)}, "data": {"class_path": _path(TextDataModule)}}
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "diagnose": {"model", "datamodule"}}

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "diagnose":
            text = "write the configuration with a fix in it to this file, for fit --config"
            parser.add_argument("--write_fix", type=str | None, default=None, help=text)
            text = "name of the change that --write_fix writes; the best one that was tried by default"
            parser.add_argument("--fix", type=str | None, default=None, help=text)
        return parser

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        # Without Lightning's warning about arguments from Python: main has resolved the names of recipes.
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # always a list of words here

    @override
    def _parse_ckpt_path(self) -> None:
        # Lightning lets the hyper-parameters in the checkpoint override the YAML file silently. The YAML file is what
        # the user wrote, so it wins; a shape that does not fit then fails when the weights are loaded.
        return

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # Lightning's own default is 1000 epochs.
        if not _limits(self._get(self.config_init, "trainer")):
            kwargs["max_steps"] = DEFAULT_STEPS
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Say what is about to be trained, and let the YAML file win over the optimizers in the checkpoint, too."""
        self.trainer.callbacks.insert(0, ConfigurationWins())  # type: ignore[attr-defined] # before those that warn
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            is_bare = self.words == ["fit"]
            limits = _limits(self._get(self.config_init, "trainer"))
            rank_zero_info(describe_fit(self.model, self.datamodule, limits, is_bare))

    def before_diagnose(self) -> None:
        """Let trials of other seeds start from weights and data of their own."""
        if self._get(self.config, "fix") is not None and self._get(self.config, "write_fix") is None:
            raise ValueError("--fix says which change --write_fix FILE takes, but --write_fix is not given.")

        def rebuild(_: int) -> tuple[Any, Any]:  # called with the seed already set
            anew = self.parser.instantiate_classes(self.config)
            return self._get(anew, "model"), self._get(anew, "data")

        self.trainer.rebuild = rebuild  # type: ignore[attr-defined]  # ours, by trainer_class

    def after_diagnose(self) -> None:
        """Write the fix, and exit with 3 if the configuration does not train."""
        if not self.trainer.is_global_zero:
            return  # Lightning's launcher takes another rank's exit code for a crash
        diagnosis: Diagnosis = self.trainer.diagnosis  # type: ignore[attr-defined]
        file = self._get(self.config, "write_fix")
        if file is not None:
            sentence = write_fix(diagnosis, Path(file), self._get(self.config, "fix"), self._user_config())
            print(sentence, file=sys.stderr if self._get(self.config, "format") == "json" else sys.stdout)
        if not diagnosis.trains and (diagnosis.trials or not diagnosis.facts.trainable):
            raise SystemExit(3)

    def _user_config(self) -> dict[str, Any]:
        """The configuration in the user's own words if one file holds all of it, else all that is not a default."""
        own = {*self._subcommand_method_arguments["diagnose"], "write_fix", "fix", "config"}
        options = {word[2:].partition("=")[0] for word in self.words if word.startswith("--")}
        files = self.config["diagnose"].config or []
        if len(files) == 1 and options <= own:
            return dict(yaml.safe_load(Path(str(files[0])).read_text(encoding="utf-8")))
        config = self.config["diagnose"].clone()
        for key in own:
            config.pop(key, None)
        text = self._subcommand_parsers["diagnose"].dump(config, skip_validation=True, skip_default=True)
        return dict(yaml.safe_load(text))

    def after_fit(self) -> None:
        """Print the last validation's numbers."""
        metrics = self.trainer.callback_metrics
        if self.trainer.is_global_zero and metrics:
            Console().print(results_table({name: float(value) for name, value in metrics.items()}))


class ParseOnlyCLI(NormsCLI):
    """Reads a configuration as ``fit`` would, and stops before anything is built."""

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {"fit": NormsCLI.subcommands()["fit"]}  # each of the others costs a tenth of a second

    @override
    def _set_seed(self) -> None:
        return

    @override
    def instantiate_classes(self) -> None:
        return

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        return


def find_mistake(config: Path) -> str | None:
    """Return why ``fit`` would refuse a configuration; None if it would not."""
    try:
        ParseOnlyCLI(["fit", "--config", str(config)])
    except (argparse.ArgumentError, ValueError, TypeError, OSError) as error:
        return error_messages.explain(str(error), CHOICES)
    return None


def describe_fit(model: object, data: object, limits: Mapping[str, Any], is_bare: bool) -> str:
    """Return one line about a fit that begins.

    Example:
        >>> describe_fit("a model", None, {"max_steps": 30, "max_epochs": 2}, False)
        'fit: trains str until max_steps 30 or max_epochs 2.'
    """
    text = f"fit: trains {type(model).__name__}" + ("" if data is None else f" on {type(data).__name__}")
    text += " until " + " or ".join(f"{name} {value}" for name, value in limits.items()) if limits else ""
    if not limits:
        text += f" for {DEFAULT_STEPS} steps, since neither max_steps nor max_epochs nor max_time is set"
    if is_bare:
        text += f". Everything is a default: {PROGRAM} recipes lists complete files for --config"
    return f"{text}."


def _limits(trainer: Any) -> dict[str, Any]:
    """Return what ends a run of this configuration."""
    limits = {name: trainer.get(name) for name in ("max_steps", "max_epochs", "max_time")}
    return {name: value for name, value in limits.items() if value is not None and (name, value) != ("max_steps", -1)}


def _parser_options(names: Iterable[str]) -> dict[str, Any]:
    words = "\n".join(textwrap.wrap(", ".join(error_messages.subclasses(Placement)), 76, break_on_hyphens=False))
    shared = {"prog": PROGRAM, "formatter_class": _Help, "exit_on_error": False}
    epilog = f"--model.decoder.placement is one word of:\n{words}"
    usage = f"{PROGRAM} {{}} [--config FILE] [--key value ...]"
    subcommands = {name: {**shared, "usage": usage.format(name), "epilog": epilog} for name in names}
    return {**shared, "description": DESCRIPTION, **subcommands}


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
