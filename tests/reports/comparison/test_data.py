"""The rules of a comparison, on planted numbers."""

import json
import math
import random
from statistics import fmean, stdev

import pytest

from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.comparison.differences import Result, Verdict, difference, verdict
from lightning_norms.reports.comparison.markdown import comparison_markdown
from lightning_norms.reports.statistics import t_quantile

SEEDS = (1337, 1338, 1339)
NOISE = (0.05, -0.05, 0.0)  # standard deviation 0.05


def comparison(values, baseline="pre", **failures):
    """``values``: variant -> one score a seed; None is a run that failed."""
    runs = tuple(
        Run(variant, seed, *(("it crashed",) if score is None else (None, {"code": score})))
        for variant, scores in values.items()
        for seed, score in zip(SEEDS, scores, strict=False)
    )
    return Comparison("planted", baseline, {name: name for name in values}, runs)


def planted(gap, noise=NOISE):
    return comparison({"pre": [2.5 + each for each in NOISE], "post": [2.5 + gap + each for each in noise]})


def test_a_with_a_is_exactly_zero():
    (found,) = planted(0.0).differences()
    assert (found.mean, found.low, found.high, found.result) == (0.0, 0.0, 0.0, Result.SAME)
    assert verdicts(planted(0.0)) == {"pre": None, "post": Verdict.SAME}


def verdicts(found):
    return {row.variant: row.verdict for row in found.rows()}


@pytest.mark.parametrize(
    ("gap", "noise", "result", "word"),
    [
        (0.2, NOISE, Result.WORSE, Verdict.REVERT),
        (-0.2, NOISE, Result.BETTER, Verdict.KEEP),
        (0.2, (0.05, -0.04, -0.01), Result.WORSE, Verdict.REVERT),
        # Every seed agrees to the last digit, and still: inside the seed spread.
        (0.02, NOISE, Result.UNDECIDED, Verdict.UNDECIDED),
        (-0.02, NOISE, Result.UNDECIDED, Verdict.UNDECIDED),
        (0.2, (-0.4, 0.4, 0.0), Result.UNDECIDED, Verdict.UNDECIDED),
    ],
)
def test_a_gap_inside_the_seed_spread_is_no_result(gap, noise, result, word):
    (found,) = planted(gap, noise).differences()
    assert found.mean == pytest.approx(gap)
    assert found.result is result
    assert verdicts(planted(gap, noise))["post"] is word


BETTER, WORSE, OPEN, SAME = Result.BETTER, Result.WORSE, Result.UNDECIDED, Result.SAME


@pytest.mark.parametrize(
    ("results", "word"),
    [
        ((BETTER, BETTER), Verdict.KEEP),
        ((OPEN, BETTER), Verdict.KEEP),
        ((BETTER, SAME), Verdict.KEEP),
        ((WORSE, WORSE), Verdict.REVERT),
        ((OPEN, WORSE), Verdict.REVERT),
        ((BETTER, WORSE), Verdict.MIXED),
        ((WORSE, OPEN, BETTER), Verdict.MIXED),
        ((OPEN, OPEN), Verdict.UNDECIDED),
        ((SAME, OPEN), Verdict.UNDECIDED),
        ((SAME, SAME), Verdict.SAME),
    ],
)
def test_several_validation_sets_have_one_verdict(results, word):
    assert verdict(results) is verdict(results[::-1]) is word


def test_better_here_and_worse_there_is_mixed():
    runs = [Run("pre", seed, None, {"code": 2.5 + n, "prose": 3.0 + n}) for seed, n in zip(SEEDS, NOISE, strict=True)]
    runs += [Run("post", seed, None, {"code": 2.2 + n, "prose": 3.3 + n}) for seed, n in zip(SEEDS, NOISE, strict=True)]
    found = Comparison("planted", "pre", {"pre": "pre", "post": "post"}, tuple(runs))
    assert [each.result for each in found.differences()] == [Result.BETTER, Result.WORSE]
    assert verdicts(found)["post"] is Verdict.MIXED


def test_a_variant_that_dies_with_some_seeds_is_not_to_be_kept():
    """Those that survived are better beyond doubt; but a bad one is a bad one."""
    values = {"pre": [2.5, 2.51, 2.52], "post": [2.0, 2.01, None], "hot": [3.0, 3.01, None]}
    found = comparison(values)
    assert [each.result for each in found.differences()] == [Result.BETTER, Result.WORSE]
    assert verdicts(found) == {"pre": None, "post": Verdict.UNDECIDED, "hot": Verdict.REVERT}


def test_the_interval_is_students():
    """Three differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t(0.975, 2) = 4.303."""
    found = difference("post", "code", [2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.high - found.mean == pytest.approx(4.303 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(4.303 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_the_interval_covers_19_of_20(count):
    """The quantiles are the right ones: of 4,000 samples about 95 % of the intervals hold the true mean."""
    draw, inside = random.Random(count), 0
    for _ in range(4000):
        sample = [draw.gauss(0, 1) for _ in range(count)]
        inside += abs(fmean(sample)) <= t_quantile(count - 1) * stdev(sample) / math.sqrt(count)
    assert inside / 4000 == pytest.approx(0.95, abs=0.012)


def test_three_seeds_of_noise_are_called_a_result_in_at_most_one_grid_of_twenty():
    draw, called = random.Random(0), 0
    for _ in range(4000):
        ours, theirs = ([draw.gauss(2.5, 0.05) for _ in SEEDS] for _ in range(2))
        called += difference("post", "code", ours, theirs).result is not Result.UNDECIDED
    assert called / 4000 < 0.05


@pytest.mark.parametrize("gap", [1.0, -1.0, 0.0])
def test_one_seed_has_no_interval_and_is_always_undecided(gap):
    whole = comparison({"pre": [2.5], "post": [2.5 + gap]})
    (found,) = whole.differences()
    assert (found.mean, found.low, found.high, found.result) == (gap, None, None, Result.UNDECIDED)
    assert verdicts(whole)["post"] is Verdict.UNDECIDED


def test_a_failed_seed_costs_its_pair_only():
    found = comparison({"pre": [2.5, 2.6, 2.4], "post": [2.8, None, 2.7], "keel": [2.5, 2.6, 2.4]})
    rows = {row.variant: row for row in found.rows()}
    assert (rows["pre"].seeds, rows["post"].seeds, rows["keel"].seeds) == (3, 2, 3)
    assert rows["post"].failures == ("seed 1338: it crashed",)
    assert rows["post"].scores["code"].mean == pytest.approx(2.75)
    post, keel = found.differences()
    assert (post.seeds, post.mean) == (2, pytest.approx(0.3))
    assert (keel.seeds, keel.result) == (3, Result.SAME)
    assert not found.complete


def test_without_the_baseline_there_is_no_difference_but_rows():
    found = comparison({"pre": [None, None], "post": [2.8, 2.9]})
    assert found.differences() == ()
    assert [row.seeds for row in found.rows()] == [0, 2]
    assert found.rows()[0].failures == ("seeds 1337, 1338: it crashed",)
    assert verdicts(found) == {"pre": None, "post": None}


def test_json_there_and_back():
    found = planted(0.2)
    assert Comparison.from_json(found.to_json()) == found
    written = json.loads(found.to_json())
    assert [row["verdict"] for row in written["rows"]] == [None, "revert"]
    assert [each["result"] for each in written["differences"]] == ["worse"]


def test_markdown_has_every_row_once_with_gap_and_verdict():
    runs = [Run("pre", seed, None, {"code": value}) for seed, value in enumerate([2.5, 2.55, 2.45])]
    runs += [Run("post|x", seed, None, {"code": value}) for seed, value in enumerate([2.7, 2.76, 2.65])]
    runs += [Run("dead", seed, "it crashed") for seed in range(3)]
    found = Comparison("grid", "pre", {"pre": "as it was", "post|x": "post|x", "dead": "no luck"}, tuple(runs))
    head, rule, *rows = comparison_markdown(found).splitlines()
    assert head == "| variant | seeds | code, bits/byte | gap on code | verdict |"
    assert rule == "| --- | --- | --- | --- | --- |"
    assert rows == [
        "| pre: as it was | 3 | 2.500 ± 0.050 |  | baseline |",
        "| post\\|x | 3 | 2.703 ± 0.055 | +0.203 (+0.189 to +0.218) | revert |",
        "| dead: no luck | 0 of 3 | - |  | seeds 0, 1, 2: it crashed |",
    ]
