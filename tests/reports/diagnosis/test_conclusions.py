"""From trials to causes, fixes and sentences: every rule on numbers made for it."""

import io
import json
import math

import pytest
from rich.console import Console

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.diagnosis.conclusions import conclude, overall, rank
from lightning_norms.reports.diagnosis.console import diagnosis_text
from lightning_norms.reports.diagnosis.data import (
    DepthProfile,
    Diagnosis,
    Facts,
    Flag,
    Growth,
    Look,
    Trial,
    TrialEvent,
    Verdict,
)
from lightning_norms.reports.statistics import growths, per_block, t_quantile

FACTS = Facts(
    module="Net",
    parameters=90,
    trainable=90,
    blocks={"": 3},
    optimizer="AdamW",
    learning_rate=1e-3,
    beta2=0.98,
    total_steps=300,
    precision="32-true",
)


def blocks(name, *values):
    groups = tuple(f"block_{i:02d}" for i in range(len(values)))
    return DepthProfile(name=name, unit="1", meaning=name, groups=groups, values=values)


def look(*profiles, post_norm=True, **changes):
    given = {"first_loss": 5.6, "classes": 256, "uniform_loss": math.log(256), "constant_loss": 3.17, "labels": 0}
    given |= {"logits_rms": 1.0, "logit_change": 0.5, "post_norm": post_norm, "profiles": profiles}
    return Look(**(given | changes))


def trial(name, verdict, end, seed=0, bottom=(1.0, 1.0), **changes):
    profile = Profile(("block_00", "block_01"), (0, 79), (bottom, (1.0, 1.0)))
    events = (TrialEvent(6, "stall", "said"),) if verdict is Verdict.STALLS else ()
    given = {"losses": (6.0, end), "gradients": profile, "events": events, "end_loss": end, "verdict": verdict}
    patch = {"trainer": {"callbacks": [{"class_path": name}]}}
    given |= {"change": f"change {name}", "patch": patch, "reason": "because"}
    return Trial(name=name, seed=seed, planned_steps=80, **(given | changes))


DEAD = trial("as given", Verdict.STALLS, 3.2, bottom=(0.5, 1e-6))


def text_of(found):
    console = Console(width=80, record=True, file=io.StringIO())
    for part in diagnosis_text(found):
        console.print(part, highlight=False, markup=False)
    return console.export_text()


def test_what_trains_comes_first_then_what_keeps_the_architecture_then_the_lower_loss():
    fixes = rank(
        [
            DEAD,
            trial("dead but lowest", Verdict.STALLS, 1.0),
            trial("other architecture", Verdict.TRAINS, 2.0, keeps_model=False),
            trial("good", Verdict.TRAINS, 2.9),
            trial("better", Verdict.TRAINS, 2.8),
        ]
    )
    assert [fix.name for fix in fixes] == ["better", "good", "other architecture", "dead but lowest"]
    assert fixes[0].gain == pytest.approx(0.4)
    assert fixes[0].spread is None


def test_a_fix_must_train_on_every_seed_and_its_gain_has_a_spread():
    given = [DEAD, trial("as given", Verdict.STALLS, 3.3, seed=1)]
    both = [trial("a", Verdict.TRAINS, 2.8), trial("a", Verdict.TRAINS, 2.7, seed=1)]
    (fix,) = rank([*given, *both])
    assert fix.gain == pytest.approx(0.5)
    assert fix.spread == pytest.approx(math.sqrt(0.02))  # gains 0.4 and 0.6
    (broken,) = rank([*given, both[0], trial("a", Verdict.STALLS, 3.2, seed=1)])
    assert not broken.trains


def test_a_trial_that_stopped_early_has_no_gain():
    (fix,) = rank([DEAD, trial("a", Verdict.STALLS, 4.0, stopped_early=True)])
    assert fix.gain is None


def test_the_worst_seed_is_the_verdict():
    assert overall([DEAD, trial("as given", Verdict.TRAINS, 2.5, seed=1)]) is Verdict.STALLS
    assert overall([]) is Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("trials", "cause", "words"),
    [
        ([DEAD], "cut off by the updates", ["0.5 of", "step 6", "1.0e-06", "nothing vanishes at init"]),
        ([trial("as given", Verdict.STALLS, 3.2, bottom=(1e-3, 1e-6))], "no gradient from the start", ["1.0e-03"]),
        ([DEAD, trial("lr/10", Verdict.TRAINS, 2.5)], "learning rate", ["lr/10", "2.500 against 3.200"]),
        ([DEAD, trial("warmup", Verdict.TRAINS, 2.5)], "no warmup", ["warmup", "2.500"]),
        ([DEAD, trial("rescale", Verdict.TRAINS, 2.5)], "large branches", ["rescale", "2.500"]),
        (
            [
                DEAD,
                trial("warmup", Verdict.STALLS, 3.2),
                trial("rescale", Verdict.STALLS, 3.2),
                trial("warmup + rescale", Verdict.TRAINS, 2.5),
            ],
            "large branches and a cold start",
            ["neither alone"],
        ),
        ([DEAD, trial("warmup", Verdict.STALLS, 3.2)], "not found", ["None of the 1"]),
        ([trial("as given", Verdict.DIVERGES, 9.0)], "diverges", ["because"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_cause_is_named_with_its_numbers(trials, cause, words):
    found = conclude(FACTS, look(), trials)
    sentences = {each.name: each.sentence for each in found.causes}
    assert cause in sentences
    assert [word for word in words if word not in sentences[cause]] == []


def test_what_is_undecided_is_not_said_to_be_of_no_help():
    tried = [DEAD, trial("good", Verdict.TRAINS, 2.8), trial("slow", Verdict.UNDECIDED, 3.1)]
    (fixes,) = (
        line for line in conclude(FACTS, look(), [*tried, trial("bad", Verdict.STALLS, 3.3)]).summary if "Fix:" in line
    )
    assert fixes.endswith("Does not help: bad. Undecided: slow.")


def test_a_healthy_run_has_no_cause_and_no_fix_is_offered():
    found = conclude(FACTS, look(), [trial("as given", Verdict.TRAINS, 2.5), trial("warmup", Verdict.TRAINS, 2.4)])
    assert found.causes == ()
    assert not [line for line in found.summary if line.startswith(("Why", "Fix"))]
    assert "for your YAML" not in text_of(found)


def test_large_logits_are_told_from_the_first_loss():
    found = conclude(FACTS, look(first_loss=40.0, logits_rms=33.0), [trial("as given", Verdict.TRAINS, 2.5)])
    assert [cause.name for cause in found.causes] == ["large logits"]
    assert "33" in found.causes[0].sentence
    assert conclude(FACTS, look(first_loss=6.4), []).causes == ()  # post48-cold: no more than a plain Xavier head


def test_popular_sentences_are_held_against_the_numbers():
    flat = blocks("parameter_gradient", 3.0, 2.0, 1.0)
    claims = {c.name: c for c in conclude(FACTS, look(flat), [DEAD, trial("warmup", Verdict.STALLS, 3.2)]).claims}
    assert claims["bottom gradients at init"].holds is False
    assert "3" in claims["bottom gradients at init"].measured
    assert claims["warmup alone"].holds is False
    undecided = conclude(FACTS, look(flat), [DEAD, trial("warmup", Verdict.UNDECIDED, 3.2)]).claims
    assert {claim.name: claim.holds for claim in undecided}["warmup alone"] is None
    vanishing = conclude(FACTS, look(blocks("parameter_gradient", 0.01, 0.1, 1.0)), [])
    assert vanishing.claims[0].holds is True
    pre = conclude(FACTS, look(blocks("parameter_gradient", 4.0, 2.0, 1.0), post_norm=False), [])
    assert (pre.claims[0].name, pre.claims[0].holds) == ("gradient by depth", False)


def test_the_gradient_near_the_output_is_held_against_another_depth():
    def claim(post_norm, deep, shallow):
        looks = [
            look(blocks("parameter_gradient", *[g] * n), post_norm=post_norm) for g, n in ((deep, 16), (shallow, 4))
        ]
        found = conclude(FACTS, looks[0], [], shallow_look=looks[1])
        return next(claim for claim in found.claims if claim.name == "gradient against depth")

    assert claim(False, 1.0, 2.0).holds is True  # 1/sqrt(16/4)
    assert claim(False, 1.0, 1.0).holds is False
    assert claim(True, 1.0, 1.0).holds is True
    assert claim(True, 1.0, 2.0).holds is False
    assert claim(True, 1.4, 1.0).holds is None  # one batch does not decide that
    assert "x 0.50" in claim(True, 1.0, 2.0).measured


def test_exponential_growth_is_told_from_growth_by_a_power_of_depth():
    root = [math.sqrt(layer) for layer in range(1, 13)]
    doubling = [1.2**layer for layer in range(1, 13)]
    claims = [conclude(FACTS, look(blocks("stream_rms", *v), post_norm=False), []).claims[0] for v in (root, doubling)]
    assert [claim.holds for claim in claims] == [False, True]


def test_near_identity_is_measured_with_and_without_the_rescale():
    found = conclude(
        FACTS,
        look(blocks("block_change", 0.8, 0.9, 1.0)),
        [],
        rescaled_look=look(blocks("block_change", 0.1, 0.1, 9.0)),
    )
    (claim,) = found.claims
    assert claim.holds is True
    assert claim.evidence == {"before": 0.9, "after": 0.1}


def test_frozen_has_a_verdict_without_any_trial():
    frozen = Facts(**{**vars(FACTS), "trainable": 0})
    found = conclude(frozen, look(), [])
    assert found.verdict is Verdict.STALLS
    assert "None of the 90 parameters" in found.causes[0].sentence


def test_a_run_that_lives_by_its_fallback_is_told_so():
    rescued = Facts(**{**vars(FACTS), "left_out": ("LRFallback",)})
    assert "kept alive by LRFallback" in {cause.name for cause in conclude(rescued, look(), [DEAD]).causes}
    alive = [trial("as given", Verdict.TRAINS, 2.5)]
    assert conclude(rescued, look(), alive).causes == ()


def test_json_keeps_everything_and_is_strict():
    found = conclude(
        FACTS,
        look(
            blocks("stream_rms", 1.0, math.inf, math.nan),
            growths=(Growth(name="stream_rms", stack="", blocks=3, factor=1.1, low=1.0, high=1.2),),
            flags=(Flag("frozen", "half", {"share": 0.5}),),
        ),
        [DEAD, trial("warmup", Verdict.TRAINS, 2.5, seed=1)],
        ("a note",),
        look(),
    )
    text = found.to_json()
    again = Diagnosis.from_json(text)
    assert again.to_json() == text
    assert again.trials == found.trials
    assert again.fixes == found.fixes
    assert again.verdict is Verdict.STALLS
    assert math.isnan(again.look.profiles[0].values[2])
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    with pytest.raises(ValueError, match="format 0"):
        Diagnosis.from_json(text.replace('"format": 1', '"format": 0'))


def test_the_report_fits_80_columns():
    names = ["as given", "DeepNorm-style init and more", "warmup + rescale"]
    trials = [
        trial(name, Verdict.STALLS, 1234.5678, seed=seed, bottom=(1.0, 1e-300)) for name in names for seed in (0, 1)
    ]
    profiles = [blocks(n, *[1.5e-7] * 48) for n in ("stream_rms", "block_change", "branch_ratio", "parameter_gradient", "stream_gradient", "first_update")]  # noqa: E501  # fmt: skip
    text = text_of(conclude(FACTS, look(*profiles), trials, ("n " * 100,)))
    assert max(map(len, text.splitlines())) <= 80
    assert "stalls silently" in text


def test_growth_per_block_and_its_interval():
    """Least squares by hand: log values 0, 1, 1, 2 have slope 0.6 and a residual variance of 0.1."""
    factor, low, high = per_block([math.exp(v) for v in (0.0, 1.0, 1.0, 2.0)])
    error = 4.30265 * math.sqrt(0.2 / 2 / 5)
    assert factor == pytest.approx(math.exp(0.6))
    assert (low, high) == pytest.approx((math.exp(0.6 - error), math.exp(0.6 + error)), rel=1e-4)
    assert t_quantile(5) == pytest.approx(2.5706, rel=1e-3)
    assert list(growths(blocks("stream_rms", 1.0, 2.0, 4.0))) == []  # three blocks tell no slope
    assert list(growths(blocks("stream_rms", 1.0, 0.0, 4.0, 8.0))) == []


def test_what_was_not_decided_is_not_said_to_have_failed():
    result = conclude(
        FACTS, look(), [DEAD, trial("warmup", Verdict.UNDECIDED, 3.2), trial("lr/3", Verdict.STALLS, 3.2)]
    )
    text = " ".join(result.summary)
    assert "makes it train" not in text
    assert "is seen to train in so few steps; undecided: 1." in text
    assert "Does not help: lr/3. Undecided in so few steps: warmup." in text
