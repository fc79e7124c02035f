"""The runs that people start: YAML files that ship in the package, and the command to list, show and copy them.

One run for ``fit`` stands in ``recipes/``, a grid of runs for ``compare`` in ``recipes/comparisons/``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

FOLDER = Path(__file__).parent
COMPARISONS = FOLDER / "comparisons"


def names() -> list[str]:
    """Names of the shipped recipes of one run, without ``.yaml``."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def comparisons() -> list[str]:
    """Names of the shipped grids of runs, for ``compare``."""
    return sorted(path.stem for path in COMPARISONS.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe, of one run or of a grid.

    Args:
        name: with or without ``.yaml``.

    Raises:
        FileNotFoundError: if there is none of that name; the message lists those that there are.

    Example:
        >>> find("post48").name
        'post48.yaml'
    """
    stem = name.removesuffix(".yaml")
    for folder, known in ((FOLDER, names()), (COMPARISONS, comparisons())):
        if stem in known:
            return folder / f"{stem}.yaml"
    raise FileNotFoundError(f"{name} is no shipped recipe; those are: {', '.join([*names(), *comparisons()])}.")


def title(name: str) -> str:
    """What a recipe is, from the first line of its file."""
    return find(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(": ")[2]


def resolve(config: str) -> str:
    """What ``--config`` means for a run: a file if it is one, else the shipped recipe of that name.

    Raises:
        FileNotFoundError: if it is neither.
        ValueError: if it is a shipped grid of runs.
    """
    if not Path(config).is_file() and config.removesuffix(".yaml") in comparisons():
        raise ValueError(f"{config} is a grid of runs: python -m lightning_norms compare --config {config}")
    return _resolve(config, names())


def resolve_comparison(config: str) -> str:
    """What ``compare --config`` means: a file if it is one, else the shipped grid of that name.

    Raises:
        FileNotFoundError: if it is neither.
        ValueError: if it is a shipped recipe of one run.
    """
    if not Path(config).is_file() and config.removesuffix(".yaml") in names():
        raise ValueError(f"{config} is one run, not a grid: python -m lightning_norms fit --config {config}")
    return _resolve(config, comparisons())


def _resolve(config: str, known: list[str]) -> str:
    if Path(config).is_file():
        return config
    try:
        return str(find(config))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"config {config} is neither a file in {Path.cwd()} nor a shipped recipe; those are: {', '.join(known)}."
        ) from None


def command(arguments: list[str]) -> int:
    """``lightning_norms recipes [ls | show NAME | cp NAME [TARGET]]``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning_norms recipes", description="The YAML files that ship in the package."
    )
    actions = parser.add_subparsers(dest="action", metavar="ls | show | cp")
    actions.add_parser("ls", help="list them")
    actions.add_parser("show", help="print one").add_argument("name")
    copy = actions.add_parser("cp", help="copy one into the working folder, to be changed")
    copy.add_argument("name")
    copy.add_argument("target", nargs="?", default=".", help="a file or a folder, by default the working folder")
    chosen = parser.parse_args(arguments)
    if chosen.action == "show":
        print(find(chosen.name).read_text(encoding="utf-8"), end="")
    elif chosen.action == "cp":
        print(_copy(find(chosen.name), Path(chosen.target)))
    else:
        width = max(len(name) for name in [*names(), *comparisons()])
        for word, listed in (("fit", names()), ("compare", comparisons())):
            print("\n".join(f"{word:<7}  {name:<{width}}  {title(name)}" for name in listed))
    return 0


def _copy(source: Path, target: Path) -> Path:
    target = target / source.name if target.is_dir() else target
    if target.exists():
        raise FileExistsError(f"{target} is there already: give another name, or remove it first.")
    target.write_bytes(source.read_bytes())
    return target
