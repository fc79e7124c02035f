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

from lightning_norms.anatomy.matrices import (
    EXPERTS_IN,
    EXPERTS_OUT,
    SURE_WRITER,
    WRITER,
    Projection,
    all_projections,
    children_of,
    projections_of,
)
from lightning_norms.anatomy.names import unwrap

VALUES = re.compile(r"v|attn|in_proj", re.IGNORECASE)
NORM = re.compile(r"norm_?\d*$", re.IGNORECASE)


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


def find_unclaimed(block: nn.Module, sublayers: Sequence[Sublayer]) -> tuple[Projection, ...]:
    """The matrices of ``block`` that may write into its stream or read it for attention, and are in no sublayer.

    A matrix that gives another width than the stream's writes nowhere by itself: a router, a step of a state space.
    A block that changes the width is a stage, whose blocks are the layers.
    """
    claimed = {id(matrix.parameter) for sublayer in sublayers for matrix in (sublayer.writer, *sublayer.readers)}
    widths = {_width(unwrap(block), ""), *(sublayer.writer.outputs for sublayer in sublayers)}
    return tuple(
        matrix
        for matrix in all_projections(unwrap(block))
        if id(matrix.parameter) not in claimed
        and not matrix.only_modulates
        and (
            matrix.reads
            or not matrix.outputs
            or matrix.outputs in widths
            or not sublayers
            or "downsample" in matrix.name
        )
    )


def _width(module: nn.Module, path: str) -> int:
    """Width of the stream: what the first query, key or value matrix of a block reads; 0 if there is none."""
    widths = (matrix.inputs for matrix in projections_of(module, path) if matrix.reads)
    below = (_width(child, name) for name, child in children_of(module, path))
    return next((width for width in (*widths, *below) if width), 0)


def _visit(module: nn.Module, path: str, width: int, complete: list[Sublayer]) -> list[Projection]:
    """Append the sublayers under ``module`` to ``complete``; return what waits for a partner further up the tree."""
    loose = [matrix for matrix in projections_of(module, path) if not matrix.is_of_positions]
    for name, child in children_of(module, path):
        if not NORM.search(name.rpartition(".")[2]):  # a norm with a network of its own writes nowhere
            loose += _visit(child, name, width, complete)
    attention = _attention(loose, by_name_only=bool(path))
    loose = _without(loose, attention)
    feed_forwards = _feed_forwards(loose, width, among_others=bool(attention) or any(m.reads for m in loose))
    complete += attention + feed_forwards
    # What an attention leaves is its own business: its gates are no half of a feed-forward further up.
    return [] if attention and path else _without(loose, feed_forwards)


def _without(loose: Sequence[Projection], sublayers: Sequence[Sublayer]) -> list[Projection]:
    used = {id(matrix.parameter) for sublayer in sublayers for matrix in (sublayer.writer, *sublayer.readers)}
    return [matrix for matrix in loose if id(matrix.parameter) not in used]


def _attention(loose: Sequence[Projection], by_name_only: bool) -> list[Sublayer]:
    """One attention, if its readers and its writer have met at this height of the tree, which may lack a usual name."""
    readers = tuple(matrix for matrix in loose if matrix.reads)
    width = readers[0].inputs if readers else 0
    others = [matrix for matrix in loose if not matrix.reads and not matrix.only_modulates]
    if not any(VALUES.search(matrix.word) for matrix in readers):
        return []  # an index over keys, as of DeepSeek's sparse attention, gives weights and no values
    if readers and not width:  # bare parameters: only their names say what they are
        candidates = [matrix for matrix in others if not matrix.inputs and WRITER.search(matrix.word)]
    else:
        candidates = [matrix for matrix in others if matrix.outputs == width > 0]
    if candidates:
        named = [matrix for word in (SURE_WRITER, WRITER) for matrix in candidates if word.search(matrix.word)]
        if named or not by_name_only:
            return [Sublayer("attention", (named or candidates)[0], readers)]
        return []
    # RWKV mixes channels by key and value: the value reads what the key gives.
    values = [m for m in readers if m.word == "value" and m.outputs == width]
    if values and {m.word for m in readers} == {"key", "receptance", "value"}:
        return [Sublayer("feed_forward", values[0], tuple(m for m in readers if m is not values[0]))]
    return []


def _feed_forwards(loose: Sequence[Projection], width: int, among_others: bool) -> list[Sublayer]:
    """Every feed-forward whose matrices have met at this height; beside an attention only one that narrows."""
    experts = [matrix for matrix in loose if matrix.inputs == 0]
    downs = [matrix for matrix in experts if EXPERTS_OUT.fullmatch(matrix.word)]
    ups = tuple(matrix for matrix in experts if matrix not in downs and EXPERTS_IN.fullmatch(matrix.word))
    sublayers = [Sublayer("feed_forward", writer, ups) for writer in downs if ups]
    rest = [matrix for matrix in loose if matrix.inputs > 0 and not matrix.reads]
    if rest and not any(matrix.outputs == width for matrix in rest):
        width = rest[0].inputs  # MLP-Mixer: the token-mixing MLP maps tokens, not features
    candidates = [matrix for matrix in rest if matrix.outputs == width]
    writers = [matrix for matrix in candidates if matrix.inputs != width and _is_fed(matrix, rest)]
    narrowing = [matrix for matrix in writers if matrix.inputs > matrix.outputs]
    alike = len({matrix.inputs for matrix in writers}) == 1  # MobileBERT also maps into a stream of its own
    writers = narrowing or (writers if alike and not among_others else [])
    if not writers and not among_others:
        writers = [matrix for matrix in candidates if _is_fed(matrix, rest[: rest.index(matrix)])][-1:]
    for writer in writers:
        ups = tuple(matrix for matrix in rest if matrix is not writer and _feeds(matrix, writer))
        sublayers.append(Sublayer("feed_forward", writer, ups))
    return sublayers


def _is_fed(writer: Projection, rest: Sequence[Projection]) -> bool:
    return any(_feeds(up, writer) for up in rest if up is not writer)


def _feeds(up: Projection, writer: Projection) -> bool:
    """Whether ``up`` maps the stream to what ``writer`` reads, possibly several gates in one matrix."""
    return up.inputs == writer.outputs and up.outputs % writer.inputs == 0
