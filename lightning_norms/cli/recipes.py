"""``lightning_norms recipes``: list, show or copy the YAML files that ship in the package."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_norms import recipes


def command(arguments: list[str]) -> int:
    """Run ``lightning_norms recipes [ls | show NAME | cp NAME [TARGET]]``; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.action == "show":
        print(recipes.find(options.show.name).read_text(encoding="utf-8"), end="")
    elif options.action == "cp":
        print(_copy(recipes.find(options.cp.name), Path(options.cp.target)))
    else:
        width = max(len(name) for name in [*recipes.names(), *recipes.comparisons()])
        for word, listed in (("fit", recipes.names()), ("compare", recipes.comparisons())):
            print("\n".join(f"{word:<7}  {name:<{width}}  {recipes.title(name)}" for name in listed))
    return 0


def _parser() -> ArgumentParser:
    prog = "lightning_norms recipes"
    text = "The YAML files that ship in the package: list, show or copy them."
    parser = ArgumentParser(prog=prog, description=text, exit_on_error=False)
    ls, show, cp = (ArgumentParser(exit_on_error=False, description=line) for line in ACTIONS.values())
    show.add_argument("name", type=str, help="name of a recipe, such as post48")
    cp.add_argument("name", type=str, help="name of a recipe, such as post48")
    cp.add_argument("target", type=str, nargs="?", default=".", help="a file or a folder")
    actions = parser.add_subcommands(dest="action", required=False)
    for (name, line), action in zip(ACTIONS.items(), (ls, show, cp), strict=True):
        actions.add_subcommand(name, action, help=line)
    return parser


ACTIONS = {
    "ls": "List all recipes, with one line on each.",
    "show": "Print a recipe.",
    "cp": "Copy a recipe into the working folder, where you can change it.",
}


def _copy(source: Path, target: Path) -> Path:
    target = target / source.name if target.is_dir() else target
    if target.exists():
        raise FileExistsError(f"{target} exists already: give another name, or remove it first.")
    target.write_bytes(source.read_bytes())
    return target
