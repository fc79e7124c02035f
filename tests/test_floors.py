"""The house: a room imports only from lower floors, nothing under model/ knows Lightning, and there are no circles."""

import ast
from pathlib import Path

import pytest

from lightning_norms.model.placements.catalogue import designs

PACKAGE = Path(__file__).parents[1] / "lightning_norms"
FLOORS = {
    "metrics": 0, "schedules": 0, "rescale_rules": 0, "checks": 0, "files": 0,
    "anatomy": 1, "data": 1, "model": 1, "recipes": 1,
    "measuring": 2, "module": 2, "learning_rate": 2, "norms": 2, "placements": 2,
    "rescue": 3, "reports": 3,
    "callbacks": 4,
    "diagnosing": 5, "comparing": 5,
    "cli": 6, "__main__": 7,
}  # fmt: skip
"""One entry a room. Rooms of one floor do not import each other; inside a folder imports form no circle."""


def modules():
    """Dotted name inside the package -> path."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        names[dotted.removesuffix(".__init__").removesuffix("__init__")] = path
    return names


MODULES = modules()


def room(module):
    return module.split(".")[0]


def imported(path):
    """Dotted names of everything that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(module):
    """Modules of the package that a module imports; the package files above it are none of them."""
    names = {name.removeprefix("lightning_norms").removeprefix(".") for name in imported(MODULES[module]) if name.split(".")[0] == "lightning_norms"}  # noqa: E501  # fmt: skip
    targets = {name for name in names if name in MODULES and name not in ("", module)}
    # `from package import module` names the package, too; only the module is meant.
    return {name for name in targets if not any(other.startswith(name + ".") for other in targets)}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {""}))
def test_imports_go_down(module):
    assert room(module) in FLOORS, f"{room(module)} stands on no floor: add it to FLOORS"
    for target in inside(module):
        lower = FLOORS[room(target)] < FLOORS[room(module)]
        our_module = room(module) == "module" and room(target) in ("model", "data")
        checks = room(target) == "checks"  # imports nothing of ours, so everybody may import it
        assert lower or our_module or checks or room(target) == room(module), f"{module} imports {target}"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("callbacks.")])
def test_callbacks_stand_alone(module):
    """They work on anybody's LightningModule: no model, no module of ours, no data, and not each other."""
    assert not {room(target) for target in inside(module)} & {"callbacks", "model", "module", "data"}


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("reports.")])
def test_reports_know_no_training(module):
    assert not {name.split(".")[0] for name in imported(MODULES[module])} & {"lightning", "pytorch_lightning"}
    assert not {room(target) for target in inside(module)} & {"model", "module", "data"}


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in ("model", "anatomy")])
def test_lightning_starts_above_the_model(module):
    assert not {name.split(".")[0] for name in imported(MODULES[module])} & {"lightning", "pytorch_lightning"}


def test_no_circles():
    edges = {module: inside(module) for module in MODULES if module}
    done = set()

    def visit(module, trail):
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for target in edges.get(module, ()):
                visit(target, [*trail, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    assert len(done) > 20


def test_no_room_has_a_name_that_says_nothing():
    assert not {path.stem for path in MODULES.values()} & {"utils", "common", "helpers", "base", "misc"}


def test_few_modules_stand_loose():
    assert len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]) <= 9


def test_no_placement_names_outside_its_page():
    """One forward: the decoder, its blocks and the sublayers know no placement by name."""
    names = set(designs()) - {"PreNorm"}  # the default of a DecoderConfig
    assert {"PostNorm", "KEEL", "NGPT"} <= names
    for module in ("model.decoder", "model.residual", "model.attention", "model.feed_forward", "model.generation"):
        words = {node.id for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Name)}
        assert not words & names, module
