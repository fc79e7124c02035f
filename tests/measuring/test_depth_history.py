import math
import pickle

from lightning_norms.measuring.depth_history import DepthHistory


def test_round_trip_with_late_columns_and_nan():
    history = DepthHistory()
    history.declare(["g/embedding", "g/block_00"])
    history.add(0, 0, {"g/block_00": 0.1, "g/total": 1.0})
    history.add(10, 12, {"g/embedding": math.nan, "g/block_00": 1e-7, "g/block_01": 3.0})
    other = DepthHistory()
    other.load_state_dict(pickle.loads(pickle.dumps(history.state_dict())))
    assert (other.columns, other.steps, other.logged_steps) == (history.columns, [0, 10], [0, 12])
    profile = other.profile("g/")
    assert profile.groups == ("embedding", "block_00", "block_01")
    assert profile.values[1] == (0.1, 1e-7)
    assert math.isnan(profile.values[2][0])


def test_never_measured_is_absent_but_measured_nan_stays():
    history = DepthHistory()
    history.declare(["g/embedding", "g/block_00"])
    history.add(0, 0, {"g/block_00": math.nan})
    assert history.profile("g/").groups == ("block_00",)


def test_a_long_run_is_thinned():
    history = DepthHistory(limit=8)
    for step in range(100):
        history.add(step, step, {"x": float(step)})
    assert len(history.rows) <= 8
    assert history.steps[0] == 0
    assert history.steps[-1] == 99
    assert history.steps == sorted(set(history.steps))
    assert [row[0] for row in history.rows] == history.steps


def test_empty():
    history = DepthHistory()
    history.load_state_dict(history.state_dict())
    assert history.profile("g/").values == ()
