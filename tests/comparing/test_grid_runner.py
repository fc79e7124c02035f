"""Running a grid with runs that only pretend: what is repeated, what goes on, what a failure costs."""

import json
import math
import threading

import pytest

from lightning_norms.comparing import compare
from lightning_norms.comparing.grid import Grid, Variant
from lightning_norms.comparing.grid_runner import GridRunner
from lightning_norms.reports.comparison.differences import Result, Verdict

VARIANTS = {"pre": Variant("as it was", {}), "post": Variant("moved", {"model": {"x": 1}})}
GRID = Grid(name="planted", base={}, baseline="pre", variants=VARIANTS, seeds=(7, 8))


class Pretended(GridRunner):
    """Writes the record that it is told to, in place of a process.

    ``outcome``: (variant, seed, checkpoint or None) -> scores, or the words of a crash.
    """

    def __init__(self, folder, outcome, grid=GRID, **kwargs):
        super().__init__(grid=grid, folder=folder, **kwargs)
        self.outcome, self.calls, self.lock = outcome, [], threading.Lock()

    def _fit(self, place, lock, checkpoint):
        variant, seed = place.name.split("_")[:2]
        with self.lock:
            self.calls.append((variant, int(seed), checkpoint))
        outcome = self.outcome(variant, int(seed), checkpoint)
        attempt = place / f"attempt_{len(list(place.glob('attempt_*'))) + 1}"
        attempt.mkdir()
        if isinstance(outcome, dict):
            (attempt / "record.json").write_text(json.dumps({"scores": outcome, "steps": 4, "losses": [1.0, 0.5]}))
            return 0
        (place / "output.txt").write_text(outcome)
        return 1


def fine(variant, seed, checkpoint):
    return {"code": 2.5 + (variant == "post") * 0.25 + seed / 64}


def test_a_grid_becomes_a_comparison(tmp_path):
    found = Pretended(tmp_path, fine).run()
    assert [(run.variant, run.seed, run.scores["code"]) for run in found.runs] == [
        ("pre", 7, 2.609375), ("post", 7, 2.859375), ("pre", 8, 2.625), ("post", 8, 2.875)
    ]  # fmt: skip
    (difference,) = found.differences()
    assert (difference.mean, difference.result) == (0.25, Result.WORSE)
    assert [row.verdict for row in found.rows()] == [None, Verdict.REVERT]


def test_finished_runs_are_not_repeated(tmp_path):
    first = Pretended(tmp_path, fine)
    second = Pretended(tmp_path, fine)
    assert first.run() == second.run()
    assert (len(first.calls), second.calls) == (4, [])


def test_a_grid_that_died_goes_on(tmp_path):
    def dies(variant, seed, checkpoint):
        if (variant, seed) == ("pre", 8):
            raise KeyboardInterrupt
        return fine(variant, seed, checkpoint)

    with pytest.raises(KeyboardInterrupt):
        Pretended(tmp_path, dies).run()
    second = Pretended(tmp_path, fine)
    found = second.run()
    assert ("pre", 7, None) not in second.calls
    assert found == Pretended(tmp_path / "other", fine).run()


def test_an_interrupted_run_goes_on_from_its_newest_checkpoint(tmp_path):
    place = tmp_path / "runs" / GRID.runs()[0].folder / "attempt_1" / "checkpoints"
    place.mkdir(parents=True)
    (place / "last.ckpt").write_text("weights")
    runner = Pretended(tmp_path, fine)
    runner.run()
    assert ("pre", 7, place / "last.ckpt") in runner.calls
    assert ("post", 7, None) in runner.calls


def test_a_checkpoint_that_cannot_be_used_costs_a_new_start_only(tmp_path):
    place = tmp_path / "runs" / GRID.runs()[0].folder / "attempt_1" / "checkpoints"
    place.mkdir(parents=True)
    (place / "last.ckpt").write_text("cut short")
    runner = Pretended(tmp_path, lambda v, s, checkpoint: "broken zip" if checkpoint else fine(v, s, None))
    assert runner.run().complete
    assert [call for call in runner.calls if call[:2] == ("pre", 7)] == [("pre", 7, place / "last.ckpt"), ("pre", 7, None)]  # noqa: E501  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("Traceback ...\n  File x\nValueError: no such thing\n", "seeds 7, 8: ValueError: no such thing"),
        ("usage\nerror: d_model is 3\n", "seeds 7, 8: d_model is 3"),
        ("one\ntwo\n", "seeds 7, 8: two"),
        ("", "seeds 7, 8: it printed nothing"),
        ({"code": math.nan}, "seeds 7, 8: diverged: code ended as nan"),
        ({}, "seeds 7, 8: logged no number of a validation set: nothing to compare"),
    ],
)
def test_a_bad_variant_costs_its_row_and_says_why(tmp_path, outcome, reason):
    found = Pretended(tmp_path, lambda v, s, c: outcome if v == "post" else fine(v, s, c)).run()
    pre, post = found.rows()
    assert (pre.seeds, pre.failures, post.seeds, post.failures) == (2, (), 0, (reason,))


def test_a_configuration_that_fit_refuses_is_known_before_the_first_run(tmp_path):
    seen = []

    def check(path):
        seen.append(path)
        return "there is no key 'x'" if "x: 1" in path.read_text() else None

    runner = Pretended(tmp_path, fine, check=check)
    found = runner.run()
    assert len(seen) == 2
    assert [call[0] for call in runner.calls] == ["pre", "pre"]
    assert found.rows()[1].failures == ("seeds 7, 8: there is no key 'x'",)


def test_a_run_that_a_killed_grid_left_going_on_is_waited_for(tmp_path):
    """Its process holds the lock; when it ends its record is there, and nothing is run twice."""
    fcntl = pytest.importorskip("fcntl")
    place = tmp_path / "runs" / GRID.runs()[0].folder
    (place / "attempt_1").mkdir(parents=True)
    left = (place / "lock").open("w")
    fcntl.flock(left, fcntl.LOCK_EX)

    def ends(planned):
        (place / "attempt_1/record.json").write_text(json.dumps({"scores": {"code": 9.0}}))
        left.close()

    runner = Pretended(tmp_path, fine, on_wait=ends)
    assert runner.run().runs[0].scores == {"code": 9.0}
    assert ("pre", 7, None) not in runner.calls


OTHERS = {"base": Variant("", {}), "new": Variant("", {"model": {"x": 2}})}
OTHER = Grid(name="other", base={}, baseline="base", variants=OTHERS, seeds=(7, 8))


def test_a_finished_run_of_another_grid_is_used_under_another_name(tmp_path):
    first, second = Pretended(tmp_path, fine), Pretended(tmp_path, fine, OTHER)
    first.run()
    found = second.run()
    assert [call[:2] for call in second.calls] == [("new", 7), ("new", 8)]
    (base, _) = found.rows()
    assert (base.variant, base.seeds, found.runs[0].scores) == ("base", 2, {"code": 2.609375})
    again = Pretended(tmp_path, fine, OTHER)
    assert (again.run(), again.calls) == (found, [])


def test_a_with_a_runs_twice_even_if_another_grid_has_it(tmp_path):
    Pretended(tmp_path, fine).run()
    equal = {"one": Variant("", {}), "two": Variant("", {})}
    twice = Grid(name="twice", base={}, baseline="one", variants=equal, seeds=(7,))
    runner = Pretended(tmp_path, fine, twice)
    runner.run()
    assert sorted(call[:2] for call in runner.calls) == [("one", 7), ("two", 7)]


def test_an_unfinished_run_of_another_grid_and_one_with_the_same_digest_by_chance_are_not_used(tmp_path):
    first = Pretended(tmp_path, lambda v, s, c: "error: it crashed" if s == 7 else fine(v, s, c))
    first.run()
    (chance,) = (tmp_path / "runs").glob("pre_8_*/run.yaml")
    chance.write_text("another: text")
    second = Pretended(tmp_path, fine, OTHER)
    second.run()
    assert [call[:2] for call in second.calls if call[0] == "base"] == [("base", 7), ("base", 8)]


def test_a_run_that_starts_while_the_grid_is_stopped_is_stopped_too(tmp_path):
    class Late:
        stopped = 0

        def start(self, words, place, lock, done):
            runner._stop()  # another thread's Ctrl-C, at the worst moment
            return self

        def wait(self):
            return -15

        def terminate(self):
            self.stopped += 1

    late = Late()
    runner = GridRunner(grid=GRID, folder=tmp_path, launcher=late)
    assert (runner._fit(tmp_path, None, None), late.stopped) == (-15, 1)


def test_two_jobs_give_the_same(tmp_path):
    assert Pretended(tmp_path / "a", fine, jobs=2).run() == Pretended(tmp_path / "b", fine).run()


def test_a_base_that_is_no_configuration_ends_it_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.yaml").write_text("{base: {y: 1}, baseline: a, seeds: [1], variants: {a: {}}}")
    with pytest.raises(ValueError, match="fit does not accept the base of g: no y"):
        compare.command(["--config", "g.yaml"], lambda _: "no y")
