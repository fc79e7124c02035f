"""The house: a room imports only from lower floors, nothing under model/ knows Lightning, and there are no circles."""

import ast
from pathlib import Path

import pytest

from lightning_norms.model import designs

PACKAGE = Path(__file__).parents[1] / "lightning_norms"
FLOORS = {
    "metrics": 0, "schedules": 0, "rescale_rules": 0, "depth_history": 0, "plain": 0,
    "wrapping": 0, "projections": 1, "fused": 2, "sublayers": 2, "stacks": 3, "depth": 4, "descriptions": 4,
    "measure": 5, "writers": 5, "initial_weights": 6, "detection": 0, "ladder": 0, "watch": 1, "skipping": 0,
    "events": 0, "strategies": 0, "trained": 0,
    "recipes": 0, "patching": 0, "mistakes": 0, "model.norms": 0, "model.residual": 1, "model.positions": 0,
    "model.half_precision_attention": 0, "model.attention": 2, "model.feed_forward": 2,
    "model.placements": 2, "model.scales": 2, "model.gates": 2,
    "model.streams": 2, "model.hyper_connections": 2, "model.attention_residuals": 2, "model.hypersphere": 2,
    "model.combinations": 3,
    "arguments": 0, "from_environment": 10,
    "model.designs": 4,
    "model.initialization": 2, "model.decoder": 5, "model.sharding": 6,
    "model.token_by_token": 6, "model.generation": 7,
    "data": 7, "learning_rate": 7, "observing": 7, "snapshot_sources": 6, "snapshots": 7,
    "snapshot_keeper": 8, "module": 8,
    "diagnosing.depth_probe": 6, "diagnosing.labels": 7, "diagnosing.borrowing": 8,
    "callbacks": 9, "reports": 9, "generate": 9,
    "diagnosing.initial_flags": 10, "diagnosing.pass_flags": 10, "diagnosing.run_facts": 10,
    "diagnosing.counterfactual": 9, "diagnosing.trials": 10, "diagnosing.trial_progress": 10,
    "diagnosing.looking": 11, "diagnosing.changes": 11, "diagnosing.diagnose": 12,
    "comparing.locks": 0, "comparing.launchers": 1, "comparing.grid": 1,
    "comparing.grid_runner": 10, "comparing.compare": 11,
    "trainer": 13, "cli": 14, "__main__": 15,
}  # fmt: skip
"""Longest prefix wins. A package (data, callbacks, reports) is one floor; what its files may import is said below."""
EMPTY = {"", "model", "data", "callbacks", "reports", "diagnosing", "comparing"}
"""Package files: public names and a docstring; nobody inside imports them."""


def rooms():
    """Dotted name inside the package -> path."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[dotted.removesuffix(".__init__").removesuffix("__init__")] = path
    return found


ROOMS = rooms()


def floor(room):
    prefixes = [name for name in FLOORS if room == name or room.startswith(name + ".")]
    return FLOORS[max(prefixes, key=len)] if prefixes else None


def imported(path):
    """Dotted names of everything that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(path):
    """Rooms of the package that a file imports."""
    names = {name.removeprefix("lightning_norms").removeprefix(".") for name in imported(path) if name.split(".")[0] == "lightning_norms"}  # noqa: E501  # fmt: skip
    return {name for name in names if name in ROOMS and name not in EMPTY}


@pytest.mark.parametrize("room", sorted(set(ROOMS) - EMPTY))
def test_imports_go_down(room):
    assert floor(room) is not None, f"{room} stands on no floor: add it to FLOORS"
    for target in inside(ROOMS[room]) - {room}:
        same_package = room.split(".")[0] == target.split(".")[0] and "." in room and room.split(".")[0] != "model"
        assert floor(target) < floor(room) or same_package or (room.startswith("callbacks.") and target.startswith("reports.")), f"{room} imports {target}"  # noqa: E501  # fmt: skip


@pytest.mark.parametrize("room", [room for room in ROOMS if room.startswith("callbacks.")])
def test_callbacks_stand_alone(room):
    """They work on anybody's LightningModule: no model, no module of ours, no data, and not each other."""
    targets = inside(ROOMS[room])
    assert not {target for target in targets if target.split(".")[0] in ("callbacks", "model", "module", "data")}


@pytest.mark.parametrize("room", [room for room in ROOMS if room.startswith("reports.")])
def test_reports_know_no_training(room):
    outside = {name.split(".")[0] for name in imported(ROOMS[room])}
    assert not outside & {"lightning", "pytorch_lightning"}
    assert not {
        target for target in inside(ROOMS[room]) if target.split(".")[0] in ("callbacks", "model", "module", "data")
    }


@pytest.mark.parametrize("room", [room for room in ROOMS if (floor(room) or 0) < FLOORS["data"]])
def test_lightning_starts_above_the_model(room):
    if room in EMPTY:
        return
    assert not {name.split(".")[0] for name in imported(ROOMS[room])} & {"lightning", "pytorch_lightning"}


def test_no_circles():
    edges = {room: inside(path) - {room} for room, path in ROOMS.items() if room not in EMPTY}
    done = set()

    def visit(room, trail):
        assert room not in trail, " -> ".join([*trail, room])
        if room not in done:
            for target in edges.get(room, ()):
                visit(target, [*trail, room])
            done.add(room)

    for room in edges:
        visit(room, [])
    assert len(done) > 20


def test_no_room_has_a_name_that_says_nothing():
    assert not {path.stem for path in ROOMS.values()} & {"utils", "common", "helpers", "base", "misc"}


def test_no_placement_names_outside_its_page():
    """One forward: the decoder, its blocks and the sublayers know no placement by name."""
    names = set(designs.__all__) - {"PreNorm"}  # the default of a DecoderConfig
    assert {"PostNorm", "KEEL", "NGPT"} <= names
    for room in ("model.decoder", "model.residual", "model.attention", "model.feed_forward", "model.generation"):
        words = {node.id for node in ast.walk(ast.parse(ROOMS[room].read_text())) if isinstance(node, ast.Name)}
        assert not words & names, room
