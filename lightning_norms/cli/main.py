"""``python -m lightning_norms``: commands, the names of recipes, and errors as one message with an exit code."""

from __future__ import annotations

import argparse
import codecs
import locale
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_norms.callbacks import FallbackExhaustedError
from lightning_norms.cli import error_messages, generate, recipes
from lightning_norms.cli.config_files import arrange, read_yaml
from lightning_norms.cli.norms_cli import CHOICES, DESCRIPTION, NormsCLI, find_mistake
from lightning_norms.comparing import compare
from lightning_norms.recipes import resolve

PLAIN_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "recipes": recipes.command,
    "generate": generate.command,
    "compare": lambda arguments: compare.command(arguments, find_mistake),
}
"""The commands that are not subcommands of LightningCLI."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit with 2 after a short message on wrong input, with 3 if no fallback could save a run.

    Args:
        arguments: Words of the command line; None takes those of this process.
    """
    if arguments is None:
        _use_utf8()
    words = sys.argv[1:] if arguments is None else arguments
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # for --model mine.Module, also with the console script
    try:
        with _messages_on_console():
            _run(words)
    except argparse.ArgumentError as error:
        _exit(error_messages.explain(str(error), CHOICES))
    except FallbackExhaustedError as error:
        _exit(str(error), code=3)
    except (ValueError, TypeError, OSError, MisconfigurationException) as error:
        if not _is_for_user(error):
            raise
        _exit(error_messages.explain(str(error), CHOICES))


def _use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode where the locale has another encoding: our files are UTF-8."""
    if sys.flags.utf8_mode or codecs.lookup(locale.getpreferredencoding(False)).name == "utf-8":
        return
    words = [sys.executable, *sys.orig_argv[1:]]
    environment = {**os.environ, "PYTHONUTF8": "1"}  # for the processes of a run, too
    if os.name == "nt":  # where a process cannot become another one
        raise SystemExit(subprocess.call(words, env=environment))
    os.execve(sys.executable, words, environment)


def _run(words: list[str]) -> None:
    if not words:
        raise argparse.ArgumentError(None, f"no command was given.\n\n{DESCRIPTION}")
    if words[0] in PLAIN_COMMANDS:
        raise SystemExit(PLAIN_COMMANDS[words[0]](words[1:]))
    if words[0] == "diagnose":
        words = ["--no_trials=true" if word == "--no_trials" else word for word in words]
    NormsCLI(arrange(list(_resolve_recipes(words)), NormsCLI.subcommands()))


def _resolve_recipes(words: list[str]) -> Iterator[str]:
    """Replace each ``--config NAME`` by the file that it means."""
    is_value = False
    for word in words:
        flag, separator, value = word.partition("=")
        if is_value:
            yield _check_yaml(resolve(word))
        elif flag == "--config" and separator:
            yield f"--config={_check_yaml(resolve(value))}"
        else:
            yield word
        is_value = not is_value and word in ("--config", "-c")


def _check_yaml(file: str) -> str:
    read_yaml(file)
    return file


def _is_for_user(error: BaseException) -> bool:
    """Whether the message was written for the user: raised by us, by Lightning, or by the parser."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("lightning_norms", "lightning", "jsonargparse")


@contextmanager
def _messages_on_console() -> Iterator[None]:
    """Send our log messages to the console while a command runs, as Lightning does with its own."""
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


def _exit(message: str, code: int = 2) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
