"""Where a configuration file may stand: before the command with a section for it, or behind it without one."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

FLAGS = ("--config", "-c")


def arrange(words: list[str], commands: Collection[str]) -> list[str]:
    """Move configuration files to the side of the command where the parser takes them.

    ::

        --config flat.yaml fit              ->  fit --config flat.yaml
        fit --config with_section.yaml ...  ->  --config with_section.yaml fit ...

    Args:
        words: The command line; the values of ``--config`` are paths.
        commands: Names of the commands, which are also the names of sections.

    Raises:
        ValueError: If a file cannot be moved without a change of what overrides what, or has no section for the
            command.
    """
    options = _options(words)
    at = next((i for i, option in enumerate(options) if option[0] in commands), None)
    if at is None:
        return words
    command, before, behind = options[at][0], options[:at], options[at + 1 :]
    flat = [option for option in before if _is_config(option) and not _has_section(option, command, commands)]
    if flat and flat != before[-len(flat) :]:
        raise ValueError(f"put {flat[0][-1]} after {command}: it has no section {command!r}.")
    divided = [option for option in behind if _is_config(option) and _has_section(option, command, commands)]
    if divided and (flat or divided != behind[: len(divided)]):
        raise ValueError(f"put {divided[0][-1]} before {command}: it has a section {command!r}.")
    first = [*before[: len(before) - len(flat)], *divided]
    return list(chain(*first, [command], *flat, *behind[len(divided) :]))


def read_yaml(file: str) -> Any:
    """Return what a file holds.

    Raises:
        ValueError: If it is not YAML in UTF-8, in one sentence.
    """
    try:
        return yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from None


def _options(words: list[str]) -> list[list[str]]:
    """Return the words, a ``--config`` together with its value."""
    options: list[list[str]] = []
    for word in words:
        if options and options[-1] in ([flag] for flag in FLAGS):
            options[-1].append(word)
        else:
            options.append([word])
    return options


def _is_config(option: list[str]) -> bool:
    return len(option) == 2 or option[0].startswith("--config=")


def _has_section(option: list[str], command: str, commands: Collection[str]) -> bool:
    """Return whether a file is divided by commands.

    Raises:
        ValueError: If it has other sections only, or keys beside them.
    """
    file = option[-1].removeprefix("--config=")
    data = read_yaml(file)
    sections = [key for key in data if key in commands] if isinstance(data, dict) else []
    if sections and command not in sections:
        raise ValueError(
            f"{file} has no section {command!r}, only {', '.join(sections)}: rename it, or put its keys at the top."
        )
    if sections and len(sections) < len(data):
        beside = ", ".join(str(key) for key in data if key not in commands)
        raise ValueError(f"{file} has keys beside its section {command!r}: move {beside} into it.")
    return bool(sections)
