"""The page of a diagnosis: every number is a number of the data, nothing is loaded, and any part may be missing."""

import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lightning_norms.measuring.depth_history import Profile
from lightning_norms.reports.diagnosis.conclusions import conclude
from lightning_norms.reports.diagnosis.data import (
    AS_GIVEN,
    Claim,
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
from lightning_norms.reports.diagnosis.page import diagnosis_page
from lightning_norms.reports.pages import stylesheet

NAN, INF = math.nan, math.inf
FACTS = Facts(
    module="Net", parameters=4321, trainable=4320, blocks={"": 3}, optimizer="AdamW", learning_rate=3e-3, beta2=0.98,
    warmup_steps=77, total_steps=310, precision="32-true", ranks=2, accumulate=5, callbacks=("EMA",), left_out=("Bar",),
)  # fmt: skip
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Text, attributes and tables of a page; fails where a tag is not closed in order."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.attributes, self.tables = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({key for key, _ in attrs}) == len(attrs)
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        return "".join(self.texts)

    def table(self, head):
        return next(table for table in self.tables if head in table[0])

    def of(self, tag, key):
        return [value for t, k, value in self.attributes if (t, k) == (tag, key)]


def blocks(name, *values, stack="", before=(), after=()):
    groups = [*before, *(f"{stack}block_{i:02d}" for i in range(len(values))), *after]
    filled = (*(0.125 for _ in before), *values, *(0.25 for _ in after))
    return DepthProfile(name=name, unit="1", meaning=f"meaning of {name}", groups=tuple(groups), values=filled)


def look(*profiles, **changes):
    given = {"first_loss": 5.613, "classes": 256, "uniform_loss": math.log(256), "constant_loss": 3.171, "labels": 0}
    given |= {"logits_rms": 1.375, "logit_change": 0.515, "post_norm": True, "profiles": profiles}
    return Look(**(given | changes))


def trial(name, verdict, losses, bottom=(1.0, 1.0), **changes):
    profile = Profile(("block_00", "block_01", "block_02"), (0, 2), (bottom, (1.0, 0.5), (1.0, 1.0)))
    events = (TrialEvent(2, "stall", "said"),) if verdict is Verdict.STALLS else ()
    given = {"losses": losses, "gradients": profile, "events": events, "end_loss": losses[-1], "verdict": verdict}
    given |= {"change": f"change of {name}", "patch": {"trainer": {"callbacks": [{"class_path": name.title()}]}}}
    return Trial(name=name, seed=0, planned_steps=3, reason=f"why {name}", **(given | changes))


DEAD = trial(AS_GIVEN, Verdict.STALLS, (5.6, 4.0, 3.333), bottom=(0.5, 2e-6), change="")
FIXED = trial("warmup", Verdict.TRAINS, (5.6, 4.0, 2.875))
WORSE = trial("lr/3", Verdict.UNDECIDED, (5.6, 5.5, 5.444))
PROFILES = (
    blocks("stream_rms", 1.0, 1.0, 1.0),
    blocks("parameter_gradient", 0.31, 0.62, 1.24, before=("embedding",), after=("head",)),
    blocks("stream_gradient", 2.5e-7, 1e-3, 1.0),
    blocks("first_update", 0.011, 0.012, 0.013),
)


def dead(**changes):
    growth = Growth(name="stream_gradient", stack="", blocks=3, factor=1.2345, low=1.1, high=1.4)
    seen = look(*PROFILES, growths=(growth,), flags=(Flag("eps", "the eps is large"),))
    found = conclude(FACTS, seen, (DEAD, FIXED, WORSE), ("placements were not tried",))
    return replace(found, **changes)


def page_of(found):
    return Page(diagnosis_page(found))


# --- what it says -----------------------------------------------------------------------------------------------------


def test_the_verdict_the_reason_and_the_losses_stand_on_top():
    page = page_of(dead())
    top = page.text[: page.text.index("The fix")]
    assert "Dead on arrival: this configuration stalls silently" in top
    assert "Why as given." in top
    for number in ("5.613", "5.545", "3.171", "3.333", "2.875", "1.38", "0.515"):
        assert number in top
    run = "Net · 3 blocks · 4,321 parameters · AdamW at 0.003 · warmup of 77 steps"
    assert run in " ".join(top.split())


def test_the_fix_is_said_with_its_gain_and_its_yaml():
    page = page_of(dead())
    sentence = "warmup: change of warmup. End loss 2.875, -0.458 nats against the run as given (one seed)."
    assert sentence in " ".join(page.text.split())
    assert "trainer:\n  callbacks:\n  - class_path: Warmup\n" in page.text


def test_trials_are_numbered_as_their_curves_the_given_one_first():
    page = page_of(dead())
    rows = page.table("verdict")[1:]
    assert [row[0] for row in rows] == [
        "0 as givennothing is changed",
        "1 warmupchange of warmup",
        "2 lr/3change of lr/3",
    ]
    assert rows[0][1:] == ["✗\xa0stalls\xa0silently", "3.333", "", "2.0e-06", "3", "why as given"]
    assert rows[1][1:6] == ["✓\xa0trains", "2.875", "+0.458", "1", "3"]
    assert rows[2][1:4] == ["?\xa0undecided", "5.444", "-2.111"]
    legend = page.text[page.text.index("optimizer step") :]
    assert all(words in legend for words in ("0 as given", "1 warmup", "2 lr/3"))


def test_claims_say_whether_they_hold():
    claims = (
        Claim(name="a", popular="It is so.", holds=True, measured="1.75"),
        Claim(name="b", popular="Or so.", holds=False, measured="0.25"),
        Claim(name="c", popular="Or not.", holds=None, measured="0"),
    )
    rows = page_of(dead(claims=claims)).table("popular sentence")[1:]
    assert rows == [
        ["It is so.", "✓\xa0holds", "1.75"],
        ["Or so.", "✗\xa0does\xa0not\xa0hold", "0.25"],
        ["Or not.", "?\xa0not\xa0decided", "0"],
    ]


def test_facts_growth_flags_and_notes_are_all_there():
    page = page_of(dead())
    facts = dict(page.table("fact")[1:])
    assert facts["parameters"] == "4,321, of them 4,320 trainable"
    assert facts["precision, ranks, accumulation"] == "32-true, 2, 5"
    assert (facts["steps of the run"], facts["warmup"], facts["blocks"]) == ("310", "77 steps", "3")
    assert (facts["callbacks in the trials"], facts["callbacks left out"]) == ("EMA", "Bar")
    growth = ["meaning of stream_gradient", "x 1.234", "1.100 to 1.400", "3"]
    assert page.table("factor")[1] == growth
    assert "the eps is large." in page.text
    assert "placements were not tried" in page.text


def test_every_picture_says_in_words_what_it_shows():
    page = page_of(dead())
    said = page.of("svg", "aria-label")
    assert page.of("svg", "role") == ["img"] * len(said)
    assert any("meaning of stream_gradient, by block. 2.5e-07 in block 0, 1 in block 2." in words for words in said)
    assert any(
        words.startswith("as given: gradient norm") and "2.0e-06 at step 2 (block_00)" in words for words in said
    )
    assert any(words.startswith("warmup: gradient norm") for words in said)
    assert any("as given ends at 3.333. warmup ends at 2.875." in words for words in said)
    assert "Outside the blocks: embedding 0.125, head 0.25." in page.text


def test_every_number_of_the_page_is_one_of_the_data():
    """Change every number that was measured, and all that stays is ticks of the plots and what the format says."""

    def numbers(found):
        page = re.sub(r"<(style|svg).*?</\1>", "", diagnosis_page(found), flags=re.DOTALL)
        return set(re.findall(r"\d+\.\d+(?:e-?\d+)?", html.unescape(re.sub("<[^>]*>", " ", page))))

    values = set()

    def collect(item):
        if isinstance(item, float):
            values.add(item)
        elif isinstance(item, dict):
            list(map(collect, item.values()))
        elif isinstance(item, list):
            list(map(collect, item))

    found = dead()
    collect(json.loads(found.to_json()))
    derived = {2e-6, 0.458, 2.111, 0.5 / 1.0, 5.545, 0.515 / 1.375, 0.31 / 1.24}  # ratios, gains
    for shown in numbers(found):
        close = [v for v in values | derived if math.isclose(abs(v), float(shown), rel_tol=0.06, abs_tol=6e-4)]
        assert close, shown


# --- the curves are where the numbers are ---------------------------------------------------------------------------


def test_the_loss_curve_of_the_given_run_goes_through_its_losses():
    page = diagnosis_page(dead())
    picture = re.search(r'aria-label="Training loss.*?</svg>', page, re.DOTALL).group(0)
    (curve,) = re.findall(r'<path d="([^"]*)" style="[^"]*stroke-dasharray: 7[^"]*var\(--ink\)', picture)
    heights = [float(height) for height in re.findall(r" ([\d.]+)", curve)]
    assert len(heights) == 3
    first, second = heights[1] - heights[0], heights[2] - heights[1]
    assert first / second == pytest.approx((5.6 - 4.0) / (4.0 - 3.333), rel=0.01)


@pytest.mark.parametrize(("losses", "cut"), [((1.0,) * 10 + (6.0,) * 90, 0), ((1.0,) * 99 + (900.0,), 1)])
def test_a_run_that_rises_is_seen_and_a_spike_does_not_flatten_it(losses, cut):
    given = replace(DEAD, losses=losses, verdict=Verdict.DIVERGES)
    page = page_of(conclude(FACTS, look(uniform_loss=None, constant_loss=None), (given,)))
    assert ("Drawn at the upper edge" in page.text) == bool(cut)
    assert not cut or "losses above 1.5 (1)." in page.text


def test_dead_cells_are_dark_and_zero_infinite_and_nan_have_their_own_colours():
    rows = ((1.0, 1e-8), (1.0, 0.0), (INF, NAN))
    strange = replace(DEAD, gradients=Profile(("block_00", "block_01", "block_02"), (0, 2), rows))
    page = diagnosis_page(dead(trials=(strange,), fixes=()))
    picture = re.search(r'aria-label="as given: gradient norm.*?</svg>', page, re.DOTALL).group(0)
    colours = set(re.findall(r"fill: (#\w{6})", picture))
    assert {"#ff69b4", "#ff0000", "#d3d3d3"} <= colours  # zero, infinite, NaN
    assert "#440154" in picture  # the least
    assert all(words in page for words in ("exactly 0", "infinite", "NaN"))


# --- what may come ----------------------------------------------------------------------------------------------------


HOSTILE = '</style><script>alert("x")</script>&lt;\'"<img src=x onerror=y>]]>\x00\x1b'


def test_hostile_names_are_only_text():
    name = HOSTILE
    trials = (replace(DEAD, reason=name), trial(name, Verdict.TRAINS, (5.0, 2.0), change=name, patch={name: name}))
    groups = (f"{name}block_00", f"{name}block_01")
    profile = DepthProfile(name="stream_rms", unit=name, meaning=name, groups=groups, values=(1.0, 2.0))
    flags = (Flag(name, name),)
    growth = Growth(name=name, stack=name, blocks=4, factor=1.0, low=1.0, high=1.0)
    facts = replace(FACTS, module=name, optimizer=name, scheduler=name, callbacks=(name,), blocks={name: 2})
    found = conclude(facts, look(profile, flags=flags, growths=(growth,)), trials, (name,))
    claim = Claim(name=name, popular=name, holds=None, measured=name)
    text = diagnosis_page(replace(found, claims=(claim,), summary=(name,)))
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert not any(key.startswith("on") for _, key, _ in page.attributes)
    assert '<script>alert("x")</script>' in page.text
    assert "\x00" not in text
    assert text.count("</style>") == 1


@pytest.mark.parametrize("found", [dead(), dead(trials=(), fixes=())], ids=["dead", "look only"])
def test_nothing_is_loaded(found):
    text = diagnosis_page(found)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "use"} & set(page.tags)
    assert not {key for _, key, _ in page.attributes} & {"src", "href", "srcset", "action", "data"}
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert page.of("meta", "content")[1] == "default-src 'none'; style-src 'unsafe-inline'"


def test_a_look_without_trials_says_so():
    page = page_of(conclude(FACTS, look(*PROFILES), ()))
    assert "No verdict yet" in page.text
    assert "Only the first step was looked at" in page.text
    assert "The fix" not in page.text
    assert "Short trials" not in page.text


def test_a_healthy_run_needs_no_fix():
    page = page_of(conclude(FACTS, look(*PROFILES), (replace(DEAD, verdict=Verdict.TRAINS), FIXED)))
    assert "This configuration trains" in page.text
    assert "Nothing needs to be fixed" in page.text
    assert [words for words in page.of("svg", "aria-label") if words.startswith("warmup: gradient")] == []


def test_nothing_helps():
    page = page_of(conclude(FACTS, look(), (DEAD, WORSE)))
    assert "None of the changes that were tried makes it train: lr/3." in page.text
    assert "pre" not in page.tags


def test_no_blocks_shows_the_parts_in_a_table():
    flat = DepthProfile(
        name="parameter_gradient", unit="1", meaning="m", groups=("layer_1", "layer_2"), values=(0.125, 2.5)
    )
    page = page_of(conclude(replace(FACTS, blocks={}), look(flat), (replace(DEAD, gradients=Profile((), (), ())),)))
    assert page.table("part")[1:] == [["layer_1", "0.125"], ["layer_2", "2.5"]]
    assert dict(page.table("fact")[1:])["blocks"] == "none found"
    assert "Gradient by depth over time" not in page.text


def test_losses_that_are_not_finite():
    losses = (5.6, INF, NAN)
    broken = replace(DEAD, losses=losses, end_loss=None, verdict=Verdict.NON_FINITE)
    none = trial("warmup", Verdict.NON_FINITE, (NAN, NAN), end_loss=None)
    page = page_of(conclude(FACTS, look(first_loss=NAN, constant_loss=None, uniform_loss=INF), (broken, none)))
    assert "NaN or infinity" in page.text
    assert any("as given ends at no finite loss" in words for words in page.of("svg", "aria-label"))
    assert not any("nan" in value or "inf " in value for value in page.of("path", "d"))


def test_several_stacks_have_a_line_each_and_their_names():
    groups = ("encoder.block_00", "encoder.block_01", "decoder.block_00")
    both = DepthProfile(name="stream_rms", unit="1", meaning="rms", groups=groups, values=(1.0, 0.0, INF))
    found = conclude(replace(FACTS, blocks={"encoder.": 2, "decoder.": 1}), look(both), ())
    page = page_of(found)
    assert "encoder: 1 in block 0, 0 in block 1." in page.text
    assert "decoder: inf in block 0." in page.text
    assert "Blocks at exactly 0, drawn at the lower edge: 1. Not finite: 1." in page.text
    (picture,) = re.findall("<svg.*?</svg>", diagnosis_page(found), re.DOTALL)
    assert {"var(--s1)", "var(--s2)"} <= set(re.findall(r"stroke: (var\(--s\d\))", picture))


def test_nothing_at_all():
    page = page_of(Diagnosis(facts=replace(FACTS, trainable=0), look=Look(), verdict=Verdict.STALLS))
    assert "No parameter is trainable" in page.text


def test_a_thousand_blocks_and_long_trials_stay_below_a_megabyte():
    many, steps = 1000, tuple(range(0, 2000, 5))
    profile = Profile(tuple(f"block_{i:04d}" for i in range(many)), steps, ((1e-3,) * len(steps),) * many)
    runs = [
        trial(
            name,
            Verdict.TRAINS if i else Verdict.STALLS,
            tuple(3 + math.sin(t) for t in range(2000)),
            gradients=profile,
        )
        for i, name in enumerate([AS_GIVEN, *(f"change {i}" for i in range(9))])
    ]
    text = diagnosis_page(conclude(FACTS, look(blocks("stream_rms", *(1.0 + i for i in range(many)))), runs))
    assert len(text.encode()) < 1_000_000
    assert "100 of 1000 blocks are drawn." in text


def test_the_page_fits_a_phone_and_follows_the_dark():
    page = page_of(dead())
    assert "width=device-width, initial-scale=1" in page.of("meta", "content")
    assert "prefers-color-scheme: dark" in stylesheet()
    assert page.of("div", "class").count("wide") == len(page.tables)


def contrast(one, other):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_contrast_is_that_of_wcag(mode):
    """4.5 for text, 3 for lines and their large numbers."""
    colours = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in stylesheet().split("@media")][mode]
    for name, least in [(n, 4.5) for n in ("ink", "soft", "good", "bad", "open", "link")] + [
        (f"s{i}", 3) for i in range(1, 9)
    ]:
        for ground in ("back", "card"):
            assert contrast(colours[name], colours[ground]) >= least, (name, ground)
