"""The table of designs: every class once, its source with an identifier, and the page that is written from it."""

import re
from pathlib import Path

from lightning_norms.model.placements import catalogue
from tests.model.placements.stacks import all_placements

PAGE = Path(__file__).parents[3] / "lightning_norms" / "model" / "placements.md"


def test_every_design_has_one_line():
    classes = {type(placement) for placement in all_placements()}
    assert set(catalogue.DESIGNS) == classes
    assert {cls.__name__ for cls in classes} == set(catalogue.__all__)
    assert catalogue.__all__ == sorted(catalogue.__all__, key=lambda name: (not name.isupper() and name != "B2T", name))


def test_every_line_has_a_source():
    for line in catalogue.table().splitlines():
        if line.startswith("| `"):
            source = line.split(" | ")[-1]
            assert re.search(r"arXiv:\d{4}\.\d{5}|ICML|code\.", source), line
            assert len(line.split(" | ")) == 4, line


def test_the_page_is_the_table():
    """Write it again with: python -c "from lightning_norms.model.placements.catalogue import table; print(table())"."""
    assert PAGE.read_text(encoding="utf-8") == catalogue.table() + "\n"
