import io
import math

import pytest
from rich.console import Console

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.console import depth_table, number, ratio_readings, spaced


def text(profile):
    stream = io.StringIO()
    Console(file=stream, width=80).print(depth_table(profile, "Gradient norm"))
    return stream.getvalue()


def test_table_of_a_deep_long_run_fits_80_columns():
    groups = ("embedding", *(f"encoder.block_{i:02d}" for i in range(48)), "final_norm", "head")
    values = tuple(tuple(1.2345e-7 * (row + 1) for _ in range(400)) for row in range(len(groups)))
    shown = text(Profile(groups, tuple(range(0, 400_000, 1000)), values))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown
    rows = [line.split()[0] for line in lines if line.strip()][3:]
    assert rows[:3] == ["head", "final_norm", "encoder.block_47"]
    assert rows[-2:] == ["encoder.block_00", "embedding"]
    assert len(rows) == 11
    assert lines[2].split() == ["depth", "\\", "step", "0", "80000", "160000", "239000", "319000", "399000"]


def test_small_and_empty_tables():
    assert "block_00" in text(Profile(("block_00",), (0,), ((math.nan,),)))
    text(Profile((), (), ()))


def test_ratio_readings():
    profile = Profile(("encoder.block_00", "encoder.block_01"), (0, 90), ((3.2, 0.0), (1.0, 0.0)))
    assert ratio_readings(profile, "gradient") == ["encoder bottom/top gradient ratio: 3.2 at step 0 -> nan at step 90"]
    one = Profile(("block_00", "block_01"), (0,), ((1.0,), (0.0,)))
    assert ratio_readings(one, "gradient") == ["bottom/top gradient ratio: inf at step 0"]
    assert ratio_readings(Profile(("block_00", "head"), (0,), ((1.0,), (1.0,))), "gradient") == []


def test_spaced_keeps_both_ends():
    assert spaced([5, 6, 7], 8) == [5, 6, 7]
    assert spaced(range(100), 6)[::5] == [0, 99]


@pytest.mark.parametrize(("value", "shown"), [(0.01, "0.01"), (999.4, "999"), (1000.0, "1.0e+03"), (math.inf, "inf")])
def test_number(value, shown):
    assert number(value) == shown
