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
    """One residual branch of a block."""

    kind: str
    """``"attention"`` (something reads query, key or value) or ``"feed_forward"``."""
    writer: Projection
    """Its output is added to the stream."""
    readers: tuple[Projection, ...]
    """Query, key and value matrices, or up and gate."""


def sublayers(block: nn.Module) -> tuple[Sublayer, ...]:
    """The sublayers of ``block`` in the order in which they were registered; empty where none is recognised.

    Example:
        >>> block = nn.TransformerDecoderLayer(8, 2, 16)
        >>> [(sublayer.kind, sublayer.writer.name) for sublayer in sublayers(block)]  # doctest: +NORMALIZE_WHITESPACE
        [('attention', 'self_attn.out_proj.weight'), ('attention', 'multihead_attn.out_proj.weight'),
         ('feed_forward', 'linear2.weight')]
    """
    found, _ = _visit(unwrap(block), "", _width(unwrap(block), ""))
    return tuple(found)


def _width(module: nn.Module, path: str) -> int:
    """What the first query, key or value matrix of a block reads: the width of the stream; 0 if there is none."""
    widths = (each.inputs for each in projections_of(module, path) if each.reads)
    below = (_width(child, name) for name, child in children_of(module, path))
    return next((width for width in (*widths, *below) if width), 0)


def _visit(module: nn.Module, path: str, width: int) -> tuple[list[Sublayer], list[Projection]]:
    """Complete sublayers under ``module``, and the matrices that wait for a partner further up the tree."""
    complete: list[Sublayer] = []
    loose = projections_of(module, path)
    for name, child in children_of(module, path):
        below, left = _visit(child, name, width)
        complete += below
        loose += left
    attention, loose = _attention(loose)
    forward, loose = _feed_forwards(loose, width)
    return complete + attention + forward, loose


def _attention(loose: list[Projection]) -> tuple[list[Sublayer], list[Projection]]:
    """One attention, if its readers and its writer have met at this height of the tree."""
    readers = [each for each in loose if each.reads]
    others = [each for each in loose if not each.reads]
    width = readers[0].inputs if readers else 0
    candidates = [each for each in others if each.outputs == width > 0]
    if not candidates:
        return [], loose
    writer = next((each for each in candidates if OUTPUT.search(each.word)), candidates[0])
    return [Sublayer("attention", writer, tuple(readers))], [each for each in others if each is not writer]


def _feed_forwards(loose: list[Projection], width: int) -> tuple[list[Sublayer], list[Projection]]:
    """Every feed-forward whose matrices have met; what is left goes up, readers without a writer among it."""
    found = _stacked([each for each in loose if each.inputs == 0])
    rest = [each for each in loose if each.inputs > 0 and not each.reads]
    if rest and not any(each.outputs == width for each in rest):
        width = rest[0].inputs  # a mixer of tokens has a width of its own
    candidates = [each for each in rest if each.outputs == width]
    narrow = [each for each in candidates if each.inputs != width and _fed(each, rest)]
    for writer in narrow or [each for each in candidates if _fed(each, rest[: rest.index(each)])][-1:]:
        ups = tuple(each for each in rest if each is not writer and _feeds(each, writer))
        found.append(Sublayer("feed_forward", writer, ups))
    used = {id(each.parameter) for sublayer in found for each in (sublayer.writer, *sublayer.readers)}
    return found, [each for each in loose if id(each.parameter) not in used]


def _stacked(experts: Sequence[Projection]) -> list[Sublayer]:
    writers = [each for each in experts if EXPERTS_OUT.fullmatch(each.word)]
    ups = tuple(each for each in experts if each not in writers)
    return [Sublayer("feed_forward", writer, ups) for writer in writers]


def _fed(writer: Projection, rest: Sequence[Projection]) -> bool:
    return any(_feeds(up, writer) for up in rest if up is not writer)


def _feeds(up: Projection, writer: Projection) -> bool:
    """Whether ``up`` maps the stream to what ``writer`` reads, possibly several gates in one matrix."""
    return up.inputs == writer.outputs and up.outputs % writer.inputs == 0
