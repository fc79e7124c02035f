"""The closed forms of the schedules, their lengths, and what they refuse."""

import math

import pytest

from lightning_norms.schedules import (
    Constant,
    CosineDecay,
    ExponentialWarmup,
    InverseSqrtDecay,
    LinearDecay,
    LinearWarmup,
    Noam,
    Run,
    Schedule,
    Then,
    UntunedWarmup,
    WarmupStableDecay,
)

RUN = Run(total_steps=1000, beta2=0.98, learning_rate=0.003)
ALL = [
    Constant(),
    Constant(3),
    LinearWarmup(7),
    LinearWarmup(0.1),
    InverseSqrtDecay(5),
    Noam(64, 0.05),
    ExponentialWarmup(),
    ExponentialWarmup(0.01),
    UntunedWarmup(),
    CosineDecay(0.3, floor=0.1),
    LinearDecay(10),
    Then(LinearWarmup(0.1), CosineDecay(0.9)),
    Then(UntunedWarmup(), Constant()),
    WarmupStableDecay(0.1, 100, floor=0.2),
]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_contract(schedule):
    resolved = schedule.resolve(RUN)
    factors = [resolved(step) for step in range(1200)]
    assert all(isinstance(factor, float) and factor >= 0 and math.isfinite(factor) for factor in factors)
    assert factors[0] > 0
    assert resolved.resolve(RUN) == resolved
    assert hash(schedule) == hash(schedule)
    length, rise = resolved.length(), resolved.warmup_length()
    assert length is None or (isinstance(length, int) and len({resolved(length + step) for step in range(50)}) == 1)
    assert isinstance(rise, int)
    if not isinstance(schedule, Noam):
        assert max(factors) <= 1


def test_every_schedule_is_in_the_contract_test():
    ours = {cls for cls in Schedule.__subclasses__() if cls.__module__ == "lightning_norms.schedules"}
    assert ours == {type(schedule) for schedule in ALL}


def test_linear():
    assert [LinearWarmup(4)(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert LinearWarmup(0)(0) == LinearWarmup(1)(0) == 1
    assert LinearWarmup(10)(9) == 1
    assert LinearWarmup(20)(9) == 0.5


@pytest.mark.parametrize(("beta2", "steps"), [(0.95, 40), (0.98, 100), (0.99, 200), (0.999, 2000)])
def test_untuned_rounds(beta2, steps):
    assert UntunedWarmup().resolve(Run(None, beta2, 1e-3)) == LinearWarmup(steps)
    tau = ExponentialWarmup().resolve(Run(None, beta2, 1e-3))
    for step in (0, 5, steps):
        assert tau(step) == pytest.approx(1 - math.exp(-(1 - beta2) * (step + 1)), rel=1e-12)


def test_noam_is_the_papers_learning_rate():
    noam = Noam(512, 4000).resolve(RUN)
    for step in (0, 1, 3998, 3999, 4000, 100_000):
        paper = 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
        assert RUN.learning_rate * noam(step) == pytest.approx(paper, rel=1e-12)
    assert RUN.learning_rate * noam(3999) == pytest.approx(6.99e-4, rel=1e-3)
    assert Noam(512, 4000, learning_rate=1.0).resolve(RUN)(3999) == pytest.approx(6.99e-4, rel=1e-3)
    peak = noam(3999)
    for step in (0, 100, 3999, 20_000):
        assert InverseSqrtDecay(4000)(step) == pytest.approx(noam(step) / peak, rel=1e-12)


def test_zero_steps_never_divide():
    assert Noam(4, 0, learning_rate=1.0)(0) == 0.5
    assert InverseSqrtDecay(0)(0) == ExponentialWarmup(0)(0) == 1
    assert LinearDecay(0, 0.5)(0) == CosineDecay(0, 0.5)(0) == 0.5
    assert Then(LinearWarmup(0), LinearDecay(2))(0) == 1


def test_decays_start_at_one_and_end_at_the_floor():
    for decay in (CosineDecay(8, 0.1), LinearDecay(8, 0.1)):
        assert decay(0) == 1
        assert decay(4) == pytest.approx(0.55)
        assert decay(7) > 0.1
        assert decay(8) == decay(9) == pytest.approx(0.1)


def test_then_starts_second_at_its_own_zero():
    both = Then(LinearWarmup(3), Then(Constant(2), LinearDecay(4)))
    assert [both(step) for step in range(11)] == [1 / 3, 2 / 3, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert both.length() == 9
    assert both.warmup_length() == 3
    assert Then(LinearWarmup(3), Constant()).length() is None


def test_warmup_stable_decay_fills_the_run():
    schedule = WarmupStableDecay(0.05, 0.2, floor=0.1).resolve(Run(40, None, 1.0))
    assert schedule == Then(LinearWarmup(2), Then(Constant(30), LinearDecay(8, 0.1)))
    assert schedule.length() == 40
    assert WarmupStableDecay(0.5, 0.5).resolve(Run(3, None, 1.0)).length() == 3
    with pytest.raises(ValueError, match=r"30 \+ 20 steps, but the run has 40"):
        WarmupStableDecay(30, 20).resolve(Run(40, None, 1.0))


def test_shares_of_the_run():
    assert [LinearWarmup(0.29).resolve(Run(total, None, 1.0)).length() for total in (100, 10, 1)] == [29, 3, 1]
    with pytest.raises(ValueError, match=r"LinearWarmup\(warmup_steps=0.1\) depends on the length of the run"):
        LinearWarmup(0.1).resolve(Run(None, 0.98, 1.0))
    with pytest.raises(ValueError, match="length of the run"):
        WarmupStableDecay(10, 10).resolve(Run(None, 0.98, 1.0))
    for schedule in (
        LinearWarmup(0.1),
        UntunedWarmup(),
        WarmupStableDecay(1, 1),
        Noam(4, 4),
        CosineDecay(0.5),
        ExponentialWarmup(),
    ):
        with pytest.raises(ValueError, match=r"call resolve\(run\) first"):
            schedule(0)


BAD = [-1, -0.5, 0.0, 1.0, 1.5, math.nan, math.inf, -math.inf, None, True, False, "10", "0.1", [3]]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize("kind", [LinearWarmup, InverseSqrtDecay, CosineDecay, LinearDecay])
def test_bad_lengths_are_refused_when_built(kind, value):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.\w+_steps must be .*; got ") as error:
        kind(value)
    assert str(error.value).endswith(repr(value))
    assert "\n" not in str(error.value)


def test_other_bad_values_are_refused_when_built():
    for floor in (-0.1, 1.1, math.nan, None, True, "0"):
        for kind in (CosineDecay, LinearDecay):
            with pytest.raises(ValueError, match=rf"{kind.__name__}.floor"):
                kind(10, floor)
        with pytest.raises(ValueError, match=r"WarmupStableDecay.floor"):
            WarmupStableDecay(1, 1, floor)
    for width in (0, -1, 1.5, math.nan, None, True):
        with pytest.raises(ValueError, match=r"Noam: d_model must be"):
            Noam(width, 10)
    for rate in (0, -1, math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match=r"Noam: learning_rate must be"):
            Noam(8, 10, rate)
    with pytest.raises(ValueError, match=r"Noam: learning_rate must be .* got 0"):
        Noam(8, 10).resolve(Run(10, 0.9, 0.0))
    for value in (-1, 0.0, 1.0, math.nan, True):
        with pytest.raises(ValueError, match=r"Constant\.hold_steps"):
            Constant(value)
        with pytest.raises(ValueError, match=r"ExponentialWarmup\.time_steps"):
            ExponentialWarmup(value)


def test_then_needs_an_end_and_schedules():
    for endless in (
        Constant(),
        InverseSqrtDecay(3),
        Noam(4, 4),
        ExponentialWarmup(3),
        Then(LinearWarmup(1), Constant()),
    ):
        with pytest.raises(ValueError, match="goes on for ever"):
            Then(endless, Constant()).resolve(RUN)
    with pytest.raises(ValueError, match=r"Then\.second must be a schedule"):
        Then(LinearWarmup(3), 5)


@pytest.mark.parametrize("schedule", [UntunedWarmup(), ExponentialWarmup()])
def test_beta2_is_asked_for_by_name(schedule):
    with pytest.raises(ValueError, match=r"beta2, but the optimizer has none"):
        schedule.resolve(Run(100, None, 0.1))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("LinearWarmup", LinearWarmup(10)),
        ("{class_path: LinearWarmup, init_args: {warmup_steps: 0.1}}", LinearWarmup(0.1)),
        (
            "{class_path: Then, init_args: {first: {class_path: LinearWarmup, init_args: {warmup_steps: 2}},"
            " second: {class_path: CosineDecay, init_args: {decay_steps: 0.5, floor: 1e-1}}}}",
            Then(LinearWarmup(2), CosineDecay(0.5, 0.1)),
        ),
        ("UntunedWarmup", UntunedWarmup()),
    ],
)
def test_short_names_in_yaml(words, expected):
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--schedule", type=Schedule)
    more = ["--schedule.warmup_steps=10"] if words == "LinearWarmup" else []
    config = parser.parse_args([f"--schedule={words}", *more])
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the newer name
    assert instantiate(config).schedule == expected
    assert instantiate(parser.parse_string(parser.dump(config))).schedule == expected
