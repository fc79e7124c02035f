"""Tables of 80 columns, the page and the maps, from planted runs."""

import csv
import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_norms.reports.comparison.console import comparison_csv, comparison_text
from lightning_norms.reports.comparison.data import Comparison, Run
from lightning_norms.reports.comparison.exponents import exponents, slope
from lightning_norms.reports.comparison.figures import score_plots
from lightning_norms.reports.comparison.page import comparison_page, results
from lightning_norms.reports.comparison.tables import RULE, map_tables

SEEDS = (1337, 1338, 1339)


def run(variant, seed, code, **changes):
    given = {
        "steps": 400, "parameters": 3_740_160, "seconds_per_step": 0.4, "kv_cache_bytes": 2**24, "spike_score": 0.0,
        "events": {"skip": 1}, "losses": tuple(6 - 4 * i / 400 for i in range(400)),
        "curve": ({"step": 200.0, "code": code + 1, "prose": code + 1}, {"step": 400.0, "code": code, "prose": code}),
        "gradient_first": {"embedding": 1.0, "block_00": 0.1, "block_01": 0.2},
    }  # fmt: skip
    return Run(variant, seed, scores={"code": code, "prose": code + 0.3}, **{**given, **changes})


NAMES = ("pre, normal", "post, Xavier + rescale", "attention residuals [x]")


def planted():
    runs = [run(name, seed, 2.5 + i * 0.3 + (seed - 1338) * 0.02) for seed in SEEDS for i, name in enumerate(NAMES)]
    runs += [Run("broken", seed, "error " * 26) for seed in SEEDS]
    titles = dict.fromkeys((*NAMES, "broken"), "with [red]brackets[/] and quite some words")
    return Comparison("planted", NAMES[0], titles, tuple(runs))


def texts(svg):
    return re.findall("<text[^>]*>([^<]*)</text>", svg)


def printed(parts):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    return console.file.getvalue()


def test_tables_fit_80_columns_and_nothing_is_cut():
    text = printed(comparison_text(planted()))
    rows = [line for line in text.splitlines() if "error error" not in line]
    assert max(map(len, rows)) <= 80
    assert "…" not in text
    assert "2.500 ± 0.020" in text
    assert "3,740,160" in text
    assert re.search(r"code +\+0\.300 +\+0\.300 to \+0\.300 +3 +worse +revert", text)
    assert re.search(r"prose +\+0\.300 +\+0\.300 to \+0\.300 +3 +worse *\n", text)  # the verdict stands once
    assert text.count("revert") == 2
    assert "0 of 3" in text
    assert "[red]" in text


def test_csv_has_a_line_a_run_in_full_digits():
    rows = list(csv.DictReader(io.StringIO(comparison_csv(planted()))))
    assert len(rows) == 12
    assert float(rows[0]["code"]) == 2.5 - 0.02
    assert rows[-1]["failure"].startswith("error error")
    assert [row["verdict"] for row in rows[:4]] == ["", "revert", "revert", ""]


def test_the_page_is_whole_and_loads_nothing():
    page = comparison_page(planted())
    assert not re.search(r"://|<script|src=|url\(", page)
    assert "default-src 'none'" in page
    said = "Revert (worse than pre, normal, in bits/byte): post, Xavier + rescale: +0.300 on code, +0.300 on prose; "
    assert said in page
    titles = (
        "Missing",
        "Scores",
        "Difference to pre, normal",
        "Learning curves",
        "Gradient by depth",
        "Sizes and costs",
    )
    assert [heading.partition(", bits")[0].partition(" (")[0] for heading in re.findall("<h2>(.*)</h2>", page)] == [
        *titles
    ]
    assert page.count("<svg") >= 6
    assert "attention residuals [x]" in page


def test_one_seed_is_said_to_be_no_result():
    found = Comparison("one", "pre", {"pre": "pre", "post": "post"}, (run("pre", 1, 2.5), run("post", 1, 3.5)))
    assert list(results(found)) == ["Undecided: 1 of 1 variants, one seed is no result."]
    for page in (comparison_page(found), printed(comparison_text(found))):
        assert not re.search(r"\b(keep|revert|mixed|worse)\b", page.replace(RULE, ""))


def test_a_mixed_variant_says_where():
    runs = [run(name, seed, 2.5 + (seed - 1338) * 0.02) for seed in SEEDS for name in ("pre", "post")]
    moved = {"code": -0.3, "prose": 0.2}
    shifted = [
        replace(each, scores={key: value + moved[key] for key, value in each.scores.items()})
        if each.variant == "post"
        else each
        for each in runs
    ]
    found = Comparison("planted", "pre", {"pre": "pre", "post": "post"}, tuple(shifted))
    said = "Mixed (better here and worse there than pre, in bits/byte): post: -0.300 on code, +0.200 on prose."
    assert list(results(found)) == [said]
    assert re.search(r"post +code .* better +mixed *\n *prose .* worse *\n", printed(comparison_text(found)))


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_run_that_diverged_is_drawn_and_counted_as_missing(score):
    bad = run("post", 1, score, failure="diverged: code ended as nan", losses=(5.0, 6.0, math.inf, math.nan))
    found = Comparison("one", "pre", {"pre": "pre", "post": "post"}, (run("pre", 1, 2.5), bad))
    assert "diverged: code ended as nan" in comparison_page(found)
    assert Comparison.from_json(found.to_json()).runs[1].failure == bad.failure


def test_nothing_finished_is_a_page_too():
    found = Comparison("none", "pre", {"pre": "pre", "post": "post"}, (Run("pre", 1, "no"), Run("post", 1, "no")))
    assert "There is nothing to compare to the baseline yet." in comparison_page(found)
    assert "pre, seed 1: no" in printed(comparison_text(found))


# --- two axes ---------------------------------------------------------------------------------------------------------


def crossed(powers):
    """Gradient of the top block ~ blocks ^ power, exactly."""
    runs, labels = [], {}
    for row, power in powers.items():
        for blocks in (2, 4, 8, 16):
            name = f"{row}, blocks {blocks}"
            labels[name] = (row, str(blocks))
            gradient = {"block_00": 1.0, "block_01": 3.0 * blocks**power, "head": 9.0}
            runs += [run(name, seed, 2.0 + blocks / 100, gradient_first=gradient) for seed in (1, 2)]
    titles = {name: name for name in labels}
    published = {"pre": -0.5, "post": 0.0}
    return Comparison(
        "x", "pre, blocks 2", titles, tuple(runs), axes=("placement", "blocks"), labels=labels, published=published
    )


def test_exponents_are_fitted():
    fits = {(each.label, each.block): each for each in exponents(crossed({"pre": -0.5, "post": 0.25}))}
    assert {key: each.fitted.mean for key, each in fits.items()} == {
        ("pre", "top"): pytest.approx(-0.5), ("pre", "bottom"): pytest.approx(0.0),
        ("post", "top"): pytest.approx(0.25), ("post", "bottom"): pytest.approx(0.0),
    }  # fmt: skip
    assert fits["pre", "top"].fitted.count == 2
    assert (fits["pre", "top"].published, fits["post", "top"].published, fits["pre", "bottom"].published) == (-0.5, 0.0, None)  # noqa: E501  # fmt: skip


def test_a_slope_needs_two_places():
    assert slope([(2.0, 1.0), (2.0, 3.0)]) is None
    assert slope([(2.0, 0.0), (4.0, 1.0)]) is None


def test_a_map_has_a_cell_a_pair():
    found = crossed({"pre": -0.5, "post": 0.25})
    text = printed(comparison_text(found))
    assert re.search(r"pre +2\.020 +2\.040 +2\.080 +2\.160", text)
    assert re.search(r"pre +top +-0\.500 ± 0\.000 +-0\.5", text)
    shades = [cell.shade for _, cell in next(next(map_tables(found)).cells())[1:]]
    assert shades == sorted(set(shades))  # the larger the loss, the fuller the colour
    assert "Pale is good" in comparison_page(found)
    assert "Pale is good" not in comparison_page(planted())


def test_a_cell_without_a_finished_run_is_a_dash():
    found = crossed({"pre": -0.5})
    runs = tuple(replace(each, failure="no") if each.variant == "pre, blocks 4" else each for each in found.runs)
    cells = next(next(map_tables(replace(found, runs=runs))).cells())
    assert [cell.text for _, cell in cells] == ["pre", "2.020", "-", "2.080", "2.160"]
    assert cells[2][1].shade is None


def test_beside_the_bars_names_that_differ_in_their_ends_stay_apart():
    names = (
        "warmup 100, lr 0.0003",
        "warmup 100, lr 0.001",
        "a name of many words, ending in 1",
        "a name of many words, ending in 2",
    )
    found = Comparison("long", names[0], dict(zip(names, names, strict=True)), tuple(run(n, 1, 2.5) for n in names))
    labels = texts(next(score_plots(found)).svg)
    assert [*names[:2], "a name of many …nding in 1", "a name of many …nding in 2"] == labels[-4:]


def test_a_title_is_said_where_it_says_more_than_the_name():
    text = printed(comparison_text(planted()))
    assert "pre, normal *: with" in text
    same = replace(planted(), titles={name: name for name in planted().titles})
    assert "pre, normal *  " in printed(comparison_text(same))
