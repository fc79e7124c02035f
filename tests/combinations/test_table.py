"""The table of combinations names tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_in_the_table_is_there():
    rows = (Path(__file__).parent / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.startswith("| ")][1:]
    there = set()
    for path in [*TESTS.glob("combinations/*.py"), *TESTS.glob("callbacks/*.py")]:
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, row
        assert set(named) <= there, row
    refused = [sentence for row in rows for sentence in re.findall(r'refused: "([^"]+)"', row)]
    rooms = [TESTS.parent / "lightning_norms" / room for room in ("callbacks", "rescue")]
    source = "\n".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [sentence for sentence in refused if sentence not in source] == []
