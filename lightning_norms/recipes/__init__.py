"""The YAML files that ship in the package, and what ``--config NAME`` means.

A recipe in ``recipes/`` is one run for ``fit``, one in ``recipes/comparisons/`` a grid of runs for ``compare``.
"""

from __future__ import annotations

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
    """Find the file of a recipe, of one run or of a grid.

    Args:
        name: Name of the recipe, with or without ``.yaml``.

    Raises:
        FileNotFoundError: If there is none of that name; the message lists those that there are.

    Example:
        >>> find("post48").name
        'post48.yaml'
    """
    stem = name.removesuffix(".yaml")
    for folder, stems in ((FOLDER, names()), (COMPARISONS, comparisons())):
        if stem in stems:
            return folder / f"{stem}.yaml"
    listed = ", ".join([*names(), *comparisons()])
    raise FileNotFoundError(f"{name} is not a shipped recipe; the recipes are: {listed}.")


def title(name: str) -> str:
    """One line on what a recipe is, from the first line of its file."""
    return find(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(": ")[2]


def resolve(config: str, is_grid: bool = False) -> str:
    """Resolve the value of ``--config`` to a file: itself if it is one, else the shipped recipe of that name.

    Args:
        config: Path of a file or name of a recipe.
        is_grid: Whether the command takes a grid of runs, as ``compare`` does, and not one run.

    Raises:
        FileNotFoundError: If it is neither.
        ValueError: If it is a shipped recipe for the other kind of command.
    """
    stem = config.removesuffix(".yaml")
    if Path(config).is_file():
        return config
    if stem in names() and is_grid:
        raise ValueError(f"{config} is one run, not a grid: python -m lightning_norms fit --config {config}")
    if stem in comparisons() and not is_grid:
        raise ValueError(f"{config} is a grid of runs: python -m lightning_norms compare --config {config}")
    try:
        return str(find(config))
    except FileNotFoundError:
        listed = ", ".join(comparisons() if is_grid else names())
        place = f"neither a file in {Path.cwd()} nor a shipped recipe"
        raise FileNotFoundError(f"config {config} is {place}; the recipes are: {listed}.") from None
