"""README: tables are what the code says, and its commands are the ones that CI runs.

``python -m tests.test_readme`` writes the tables again.
"""

import re
from pathlib import Path

import pytest

from lightning_norms import recipes
from lightning_norms.metrics import KEYS
from lightning_norms.reports.comparison.data import Comparison
from lightning_norms.reports.comparison.markdown import comparison_markdown
from tests.anatomy import families

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
KEPT = ROOT / "benchmarks" / "comparisons"


def tables():
    """Marker -> the table that stands below it."""
    return {
        "recipes": _recipes(recipes.names()),
        "comparisons": _recipes(recipes.comparisons()),
        "families": families.table(),
        **{f"comparison {path.stem}": _comparison(path) for path in sorted(KEPT.glob("*.json"))},
        "metrics": "\n".join(
            ["| key | unit | meaning |", "|---|---|---|"]
            + [f"| `{key.name}` | {key.unit} | {key.meaning} |" for key in KEYS]
        ),
    }


def _comparison(path):
    return comparison_markdown(Comparison.from_json(path.read_text())).strip()


def _recipes(names):
    runtime = {name: recipes.find(name).read_text().splitlines()[2].split("runtime   ")[1] for name in names}
    rows = [f"| {name} | {recipes.title(name)} | {runtime[name]} |" for name in names]
    return "\n".join(["| recipe | what it is | runtime |", "|---|---|---|", *rows])


def placed(text, marker, table):
    return re.sub(rf"(<!-- {marker} -->\n).*?(?=\n\n)", lambda found: found[1] + table, text, flags=re.DOTALL)


@pytest.mark.parametrize("marker", tables())
def test_tables_are_generated(marker):
    text = README.read_text()
    assert f"<!-- {marker} -->" in text
    assert placed(text, marker, tables()[marker]) == text, "run python -m tests.test_readme"


def test_ci_runs_the_commands_of_the_readme():
    """.ci/run takes its test command from here, so it must be found."""
    commands = re.findall(r"<!-- command (\d) -->\n```bash\n(.+)\n```", README.read_text())
    assert [number for number, _ in commands] == ["1", "2"]
    assert "fit --config post48.yaml" in commands[0][1]
    assert "pytest" in commands[1][1]
    assert all("-c constraints.txt" in command for _, command in commands)
    assert "<!-- command 2 -->" in (ROOT / ".ci/run").read_text()


def test_every_room_that_the_readme_names_is_there():
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", README.read_text(), flags=re.DOTALL)[1]
    names = re.findall(r"\b(\w+(?:\.py|/(?!\*)))", tree)
    assert len(names) > 15
    for name in names:
        assert (ROOT / name).exists() or list((ROOT / "lightning_norms").rglob(name.rstrip("/"))), name


if __name__ == "__main__":
    text = README.read_text()
    for marker, table in tables().items():
        text = placed(text, marker, table)
    README.write_text(text)
