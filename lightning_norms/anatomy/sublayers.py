"""The sublayers of ANY block: which matrices each has, and which of them writes into the residual stream.

::

    block ──┬── attention      query  key  value ──> [writer]      readers by name, the writer by its shape
            ├── attention      (cross)
            └── feed_forward   up  gate ──> [writer]               width -> inner -> width: the one that narrows

Found from the module tree and from the widths that modules say of themselves, so that it works on sharded weights too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_norms.anatomy.matrices import EXPERTS_OUT, Projection, children_of, projections_of
from lightning_norms.anatomy.names import unwrap

OUTPUT = re.compile(r"(^|_)(o|out|output|proj|dense|c_proj|wo|projection)(_|$)|out_?(proj|lin)|dense$", re.IGNORECASE)


@dataclass(frozen=True)
class Sublayer:
    """One residual branch of a block, whose ``writer`` gives what is added to the stream."""

    kind: str
    """``"attention"`` (something reads query, key or value) or ``"feed_forward"``."""
    writer: Projection
    readers: tuple[Projection, ...]
    """Query, key and value matrices, or up and gate."""


def find_sublayers(block: nn.Module) -> tuple[Sublayer, ...]:
    """The sublayers of ``block`` in the order in which they were registered; empty where none is recognised."""
    complete: list[Sublayer] = []
    _visit(unwrap(block), "", _width(unwrap(block), ""), complete)
    return tuple(complete)


def _width(module: nn.Module, path: str) -> int:
    """Width of the stream: what the first query, key or value matrix of a block reads; 0 if there is none."""
    widths = (matrix.inputs for matrix in projections_of(module, path) if matrix.reads)
    below = (_width(child, name) for name, child in children_of(module, path))
    return next((width for width in (*widths, *below) if width), 0)


def _visit(module: nn.Module, path: str, width: int, complete: list[Sublayer]) -> list[Projection]:
    """Append the sublayers under ``module`` to ``complete``; return what waits for a partner further up the tree."""
    loose = projections_of(module, path)
    for name, child in children_of(module, path):
        loose += _visit(child, name, width, complete)
    for collect in (_attention, _feed_forwards):
        sublayers = collect(loose, width)
        used = {id(matrix.parameter) for sublayer in sublayers for matrix in (sublayer.writer, *sublayer.readers)}
        loose = [matrix for matrix in loose if id(matrix.parameter) not in used]
        complete += sublayers
    return loose


def _attention(loose: Sequence[Projection], _: int) -> list[Sublayer]:
    """One attention, if its readers and its writer have met at this height of the tree."""
    readers = tuple(matrix for matrix in loose if matrix.reads)
    width = readers[0].inputs if readers else 0
    candidates = [matrix for matrix in loose if not matrix.reads and matrix.outputs == width > 0]
    if not candidates:
        return []
    writer = next((matrix for matrix in candidates if OUTPUT.search(matrix.word)), candidates[0])
    return [Sublayer("attention", writer, readers)]


def _feed_forwards(loose: Sequence[Projection], width: int) -> list[Sublayer]:
    """Every feed-forward whose matrices have met at this height of the tree."""
    experts = [matrix for matrix in loose if matrix.inputs == 0]
    downs = [matrix for matrix in experts if EXPERTS_OUT.fullmatch(matrix.word)]
    ups = tuple(matrix for matrix in experts if matrix not in downs)
    sublayers = [Sublayer("feed_forward", writer, ups) for writer in downs]
    rest = [matrix for matrix in loose if matrix.inputs > 0 and not matrix.reads]
    if rest and not any(matrix.outputs == width for matrix in rest):
        width = rest[0].inputs  # MLP-Mixer: the token-mixing MLP maps tokens, not features
    candidates = [matrix for matrix in rest if matrix.outputs == width]
    narrow = [matrix for matrix in candidates if matrix.inputs != width and _is_fed(matrix, rest)]
    for writer in narrow or [matrix for matrix in candidates if _is_fed(matrix, rest[: rest.index(matrix)])][-1:]:
        ups = tuple(matrix for matrix in rest if matrix is not writer and _feeds(matrix, writer))
        sublayers.append(Sublayer("feed_forward", writer, ups))
    return sublayers


def _is_fed(writer: Projection, rest: Sequence[Projection]) -> bool:
    return any(_feeds(up, writer) for up in rest if up is not writer)


def _feeds(up: Projection, writer: Projection) -> bool:
    """Whether ``up`` maps the stream to what ``writer`` reads, possibly several gates in one matrix."""
    return up.inputs == writer.outputs and up.outputs % writer.inputs == 0
