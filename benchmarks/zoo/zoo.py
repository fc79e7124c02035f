"""All kinds of runs, collected from the families."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.zoo import (
    changing,
    dense,
    hugging_face,
    language,
    moving_targets,
    recurrent,
    set_ups,
    sick,
    vision,
)
from benchmarks.zoo.kinds import Kind

HEALTHY: tuple[Kind, ...] = (
    *language.KINDS, *hugging_face.KINDS, *vision.KINDS, *recurrent.KINDS, *dense.KINDS, *set_ups.KINDS,
    *changing.KINDS, *moving_targets.KINDS,
)  # fmt: skip
SICK: tuple[Kind, ...] = sick.KINDS
ALL = HEALTHY + SICK


def select(names: Sequence[str] | None, kinds: Sequence[Kind] = ALL) -> list[Kind]:
    """The kinds with these names, or whose name holds one of them; all of them for None.

    Raises:
        ValueError: a name fits no kind.
    """
    if names is None:
        return list(kinds)
    all_names = {kind.name for kind in kinds}
    missing = [name for name in names if not any(name in kind.name for kind in kinds)]
    if missing:
        raise ValueError(f"No kind is called {', '.join(missing)}. There are: {', '.join(sorted(all_names))}.")
    exact, parts = [name for name in names if name in all_names], [name for name in names if name not in all_names]
    return [kind for kind in kinds if kind.name in exact or any(part in kind.name for part in parts)]
