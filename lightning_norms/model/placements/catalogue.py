"""Every norm placement in one table, read from the classes themselves: nothing is listed here.

:func:`table` writes it as Markdown; ``lightning_norms/model/placements.md`` is its output.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

from lightning_norms.model import placements
from lightning_norms.model.placements.single_stream import PreNorm
from lightning_norms.model.residual import Placement

for _family in pkgutil.iter_modules(placements.__path__, f"{placements.__name__}."):
    importlib.import_module(_family.name)

LEFT_OUT = {
    "SpanNorm (arXiv:2601.22580), GeoNorm (arXiv:2601.22095)": "no formula found that we could verify",
    "Fixup (arXiv:1901.09321)": "made for convolutions; TFixup and SkipInit are its idea here",
    "LayerScale, DenseFormer, GPAS, Frac-Connections": "not built yet: no norm placement, or not verified",
    "B2T without norms, SiameseNorm's form for language models": "variants; the main form is here",
}

INTRODUCTION = """\
# Where norms sit

Each is one word: `--model.decoder.placement=KEEL`. N is a norm, f a sublayer, L the number of blocks, l a block's
number, n a sublayer's. This page is the output of `lightning_norms.model.placements.catalogue.table()`; a test holds it
to that.
"""


def designs() -> dict[str, type[Placement]]:
    """Every concrete placement that is imported, ours and yours, by name; a family's stand together.

    Example:
        >>> designs()["KEEL"].equation
        'N(2L x + f(N x))'
    """
    classes = [cls for cls in _subclasses(Placement) if not inspect.isabstract(cls)]
    plain_first = sorted(classes, key=lambda cls: (cls.__module__ != PreNorm.__module__, cls.__module__))
    return {cls.__name__: cls for cls in plain_first}


def source(placement: type[Placement]) -> str:
    """The paper or code that its docstring names.

    Example:
        >>> source(designs()["KEEL"])
        'Chen, Wei 2026, arXiv:2601.19895.'
    """
    return " ".join((inspect.getdoc(placement) or "").partition("Source: ")[2].split())


def table(package: str = "") -> str:
    """Write the designs as Markdown, one line each.

    Args:
        package: only designs whose module starts with this; all without it.

    Example:
        >>> print(next(line for line in table().splitlines() if "PreNorm" in line))
        | `PreNorm` | `x + f(N x)` | trains at almost any depth; ... | GPT-2 (Radford et al. 2019); ... |
    """
    lines = [INTRODUCTION, "| placement | sublayer | trade-off | source |", "|---|---|---|---|"]
    for name, placement in designs().items():
        if placement.__module__.startswith(package):
            lines.append(f"| `{name}` | `{placement.equation}` | {placement.trade_off} | {source(placement)} |")
    return "\n".join([*lines, "", "Left out:", "", *(f"- {design}: {why}." for design, why in LEFT_OUT.items())])


def _subclasses(base: Any) -> Iterator[type[Placement]]:
    for child in base.__subclasses__():
        yield child
        yield from _subclasses(child)
