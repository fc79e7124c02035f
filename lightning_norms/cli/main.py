"""``python -m lightning_norms``: LightningCLI with our classes known by one word, shipped recipes, and short errors."""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from rich.console import Console

from lightning_norms import recipes
from lightning_norms.callbacks import AfterStep, FallbackExhaustedError
from lightning_norms.cli import error_messages, generate
from lightning_norms.comparing import compare
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
from lightning_norms.recipes import overlay
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
"""What a key's value must be a subclass of."""

PROGRAM = "lightning_norms"
LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict", "diagnose")
PLAIN_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "recipes": recipes.command,
    "generate": generate.command,
    "compare": lambda arguments: compare.command(arguments, refusal),
}
DESCRIPTION = """\
Train deep Transformers whatever the norm placement.

  python -m lightning_norms fit --config post48.yaml       train; a shipped recipe or a file of yours
  python -m lightning_norms diagnose --config post48.yaml  will it train? if not: why, and what fixes it
  python -m lightning_norms compare --config exp015.yaml   variants by seeds: a table, and which gap is a result
  python -m lightning_norms recipes                        list the shipped recipes; show or cp one
  python -m lightning_norms generate --ckpt_path run.ckpt  text from a trained model

Options are not read from the environment. What is read: LIGHTNING_NORMS_CALLBACKS, a YAML list of callbacks that
every Trainer gets, also in other people's scripts; LIGHTNING_NORMS_CACHE, the folder of encoded text (default
~/.cache/lightning_norms); PL_GLOBAL_SEED, which Lightning writes for the processes of a run.
"""


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The parser's own help, types and defaults included, with our lines as they are written."""


class NormsCLI(LightningCLI):
    """LightningCLI for any LightningModule and data module; ours are the defaults."""

    def __init__(self, args: list[str]) -> None:
        self.words = args
        usages = {name: f"{PROGRAM} {name} [--config FILE] [--key value ...]" for name in LIGHTNING_COMMANDS}
        words = "\n".join(textwrap.wrap(", ".join(error_messages.subclasses(Placement)), 76, break_on_hyphens=False))
        quiet = {"exit_on_error": False, "epilog": f"--model.decoder.placement is one word of:\n{words}"}
        quiet["formatter_class"] = _Help
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
            # Lightning's own default is 1000 epochs; AfterStep does nothing unless a placement asks for it.
            trainer_defaults={"max_steps": 300, "callbacks": [AfterStep()]},
            parser_kwargs={
                "prog": PROGRAM,
                "description": DESCRIPTION,
                "formatter_class": _Help,
                "exit_on_error": False,
                **{name: {"prog": PROGRAM, "usage": usage, **quiet} for name, usage in usages.items()},
            },
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make our module and data the default, so that ``--model.decoder.placement=DeepNorm`` is enough."""
        parser.set_defaults(
            {"model": {"class_path": _path(DecoderModule)}, "data": {"class_path": _path(TextDataModule)}}
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and ours."""
        return {**LightningCLI.subcommands(), "diagnose": {"model", "datamodule"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "diagnose":
            text = "write the configuration with a fix in it to this file, for fit --config"
            parser.add_argument("--write_fix", type=str | None, default=None, help=text)
            text = "which of the changes that were tried --write_fix takes, by name; the best one without it"
            parser.add_argument("--fix", type=str | None, default=None, help=text)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Without Lightning's warning that arguments were given from Python: :func:`main` has resolved recipe names."""
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # always a list of words here

    def _parse_ckpt_path(self) -> None:
        # Lightning lets the hyper-parameters in the checkpoint win over the YAML file without a word. The YAML file is
        # what the user wrote, so it wins; a shape that does not fit then fails when the weights are loaded.
        return

    def before_diagnose(self) -> None:
        """Let trials of other seeds start from weights and data of their own."""
        if self._get(self.config, "fix") is not None and self._get(self.config, "write_fix") is None:
            raise ValueError("--fix says which change --write_fix FILE takes, but --write_fix is not given.")

        def rebuild(_: int) -> tuple[Any, Any]:  # the seed is in force when this is called
            anew = self.parser.instantiate_classes(self.config)
            return self._get(anew, "model"), self._get(anew, "data")

        self.trainer.rebuild = rebuild  # type: ignore[attr-defined]  # ours, by trainer_class

    def after_diagnose(self) -> None:
        """Write the fix, and tell the shell: 0 trains, 3 does not."""
        found: Diagnosis = self.trainer.diagnosis  # type: ignore[attr-defined]
        file = self._get(self.config, "write_fix")
        if not self.trainer.is_global_zero:
            return  # Lightning's launcher takes another rank's exit code for a crash
        if file is not None:
            said = self._write_fix(found, Path(file))
            print(said, file=sys.stderr if self._get(self.config, "format") == "json" else sys.stdout)
        if not found.trains and (found.trials or not found.facts.trainable):
            raise SystemExit(3)

    def _write_fix(self, found: Diagnosis, file: Path) -> str:
        name = self._get(self.config, "fix")
        chosen = found.best if name is None else next((fix for fix in found.fixes if fix.name == name), None)
        if name is not None and chosen is None:
            raise ValueError(f"--fix is {name!r}, but what was tried is {', '.join(fix.name for fix in found.fixes)}.")
        if name is None and found.trains:
            return f"{file} was not written: the configuration trains as it is."
        if chosen is None:
            return f"{file} was not written: no change that was tried trains."
        if not chosen.patch:
            return f"{file} was not written: {chosen.change} has no key in this file; it is set in the module's code."
        ended = ", ".join(dict.fromkeys(verdict.value for verdict in chosen.verdicts))
        comments = (
            f"{chosen.name}: {chosen.change}",
            f"in short trials: {ended}; without this change: {found.verdict.value}",
        )
        whole = overlay.patched(self._as_given(), chosen.patch)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(overlay.as_yaml(whole, comments), encoding="utf-8")
        return f"The configuration with {chosen.name}: {file}"

    def _as_given(self) -> dict[str, Any]:
        """The configuration in the user's own words if one file says it all, else all that is not a default."""
        own = {*self._subcommand_method_arguments["diagnose"], "write_fix", "fix", "config"}
        options = [word[2:].partition("=") for word in self.words if word.startswith("--")]
        files = self.config["diagnose"].config or []
        if len(files) == 1 and {name for name, _, _ in options} <= own:
            return dict(yaml.safe_load(Path(str(files[0])).read_text(encoding="utf-8")))
        given = self.config["diagnose"].clone()
        for key in own:
            given.pop(key, None)
        text = self._subcommand_parsers["diagnose"].dump(given, skip_validation=True, skip_default=True)
        return dict(yaml.safe_load(text))

    def after_fit(self) -> None:
        """Print the last validation's numbers."""
        if self.trainer.is_global_zero and self.trainer.callback_metrics:
            Console().print(
                results_table({name: float(value) for name, value in self.trainer.callback_metrics.items()})
            )


class _ParsedOnly(NormsCLI):
    """Reads a configuration as ``fit`` would, and stops before anything is built."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        """Nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        return


def refusal(config: Path) -> str | None:
    """Why ``fit`` would refuse a configuration; None if it would not."""
    try:
        _ParsedOnly(["fit", "--config", str(config)])
    except (argparse.ArgumentError, ValueError, TypeError, OSError) as error:
        return error_messages.explain(str(error), CHOICES)
    return None


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exits with 2 after a short message on the input, with 3 if no fallback could save a run."""
    given = sys.argv[1:] if arguments is None else arguments
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # --model mine.Module, also by the console script
    try:
        with _messages_on_console():
            _run(given)
    except argparse.ArgumentError as error:
        _exit(error_messages.explain(str(error), CHOICES))
    except FallbackExhaustedError as error:
        _exit(str(error), code=3)
    except (ValueError, TypeError, OSError, MisconfigurationException) as error:
        if not _is_mistake(error):
            raise
        _exit(error_messages.explain(str(error), CHOICES))


def _run(given: list[str]) -> None:
    if not given:
        raise argparse.ArgumentError(None, f"no command was given.\n\n{DESCRIPTION}")
    if given[0] in PLAIN_COMMANDS:
        raise SystemExit(PLAIN_COMMANDS[given[0]](given[1:]))
    if given[0] == "diagnose":
        given = ["--no_trials=true" if word == "--no_trials" else word for word in given]
    NormsCLI(list(_with_recipes(given)))


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _with_recipes(arguments: list[str]) -> Iterator[str]:
    """The arguments with each ``--config NAME`` replaced by the file that it means."""
    after_flag = False
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        if after_flag:
            yield _check_yaml(recipes.resolve(argument))
        elif flag == "--config" and separator:
            yield f"--config={_check_yaml(recipes.resolve(value))}"
        else:
            yield argument
        after_flag = not after_flag and argument in ("--config", "-c")


def _is_mistake(error: BaseException) -> bool:
    """Whether a message was written for the user: raised by us, by Lightning, or by the parser that builds classes."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("lightning_norms", "lightning", "jsonargparse")


@contextmanager
def _messages_on_console() -> Iterator[None]:
    """Our log messages go to the console while a command runs, as Lightning's do."""
    logger = logging.getLogger("lightning_norms")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.INFO
    # Lightning 2.6 on torch 2.13, nothing that a user could change.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


def _check_yaml(file: str) -> str:
    """The file's name again, if it can be read as YAML."""
    try:
        yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    return file


def _exit(message: str, code: int = 2) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
