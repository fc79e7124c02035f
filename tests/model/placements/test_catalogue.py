"""The table of designs: every class once, its source with an identifier, and the page that is written from it."""

import re
from pathlib import Path

from lightning_norms import placements
from lightning_norms.model.placements import catalogue
from tests.model.placements.stacks import all_placements

PAGE = Path(__file__).parents[3] / "lightning_norms" / "model" / "placements.md"


def test_every_design_can_be_imported_by_name():
    """A new file of placements needs a line in model/placements/__init__.py, which type checkers read."""
    for placement in all_placements():
        assert getattr(placements, type(placement).__name__) is type(placement)
        assert type(placement).__name__ in placements.__all__


def test_every_line_has_a_source():
    lines = [line for line in catalogue.table("lightning_norms.").splitlines() if line.startswith("| `")]
    assert len(lines) == len(all_placements()) >= 32
    for line in lines:
        source = line.split(" | ")[-1]
        assert re.search(r"arXiv:\d{4}\.\d{5}|ICML|code\.", source), line
        assert len(line.split(" | ")) == 4, line


def test_the_page_is_the_table():
    """To write it again, print ``catalogue.table("lightning_norms.")`` into it."""
    assert PAGE.read_text(encoding="utf-8") == catalogue.table("lightning_norms.") + "\n"
