"""The examples run, say what they promise, and are listed."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def loss(name, folder):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, cwd=folder, check=True, timeout=240
    )
    return float(re.search(r"loss after 200 steps: ([\d.]+)", done.stdout)[1])


@pytest.mark.slow
def test_two_lines_bring_an_existing_project_to_life(tmp_path):
    """Case 1: dead at ln 32 = 3.466 before, far below 1 after."""
    assert loss("existing_project_before.py", tmp_path) == pytest.approx(3.466, abs=0.1)
    assert loss("existing_project_after.py", tmp_path) < 0.5
    assert (tmp_path / "grad_norm_by_depth.png").exists()


@pytest.mark.slow
def test_a_custom_placement_trains_and_comes_back(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "custom_placement.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert "placement in the checkpoint: HalfBranch(share=0.5)" in done.stdout
    before, after = re.search(r"60 steps: ([\d.]+), loaded again: ([\d.]+)", done.stdout).groups()
    assert before == after
    assert float(before) < 1.0


def test_the_change_is_an_import_and_an_argument():
    code = [re.sub(r'""".*?"""', "", (EXAMPLES / f"existing_project_{name}.py").read_text(), count=1, flags=re.DOTALL).splitlines() for name in ("before", "after")]  # noqa: E501  # fmt: skip
    changes = [line for line in difflib.ndiff(*code) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert [line[:2] for line in changes] == ["+ ", "+ ", "- ", "+ "], changes
    assert "import DepthMonitor" in changes[0]
    assert changes[3].replace("callbacks=ours, ", "")[2:] == changes[2][2:]


def test_every_example_is_in_the_table():
    table = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.glob("*.*")):
        if path.name != "README.md":
            assert f"| {path.name} | " in table
            assert path.read_text().count(f"examples/{path.name}") >= 1, "a file opens with its command"
