import math
from dataclasses import FrozenInstanceError

import pytest

from lightning_norms.model.residual import Site
from lightning_norms.placements import SubNorm, TFixup
from lightning_norms.rescale_rules import (
    AdminRescale,
    ConstantRescale,
    DeepNormRescale,
    DepthRescale,
    GPT2Rescale,
    SubNormRescale,
    TFixupRescale,
)


@pytest.mark.parametrize(
    ("rule", "layer", "layers", "gain"),
    [
        (GPT2Rescale(), 1, 8, 0.25),
        (GPT2Rescale(), 48, 48, 96**-0.5),
        (DepthRescale(), 1, 48, 1.0),
        (DepthRescale(), 16, 48, 0.25),
        (DeepNormRescale(), 3, 24, 0.26864),  # case 5
        (TFixupRescale(), 3, 6, 0.36889),
        (TFixupRescale(), 96, 96, 864**-0.25),
        (SubNormRescale(), 1, 6, 1.57636),
        (SubNormRescale(), 1, 1, 0.83255),
        (AdminRescale(), 1, 48, 1.5**-0.5),
        (AdminRescale(0.5), 3, 48, 3.25**-0.5),
        (ConstantRescale(2), 1, 1, 2.0),
    ],
)
def test_gains(rule, layer, layers, gain):
    assert rule.gain(layer, layers) == pytest.approx(gain, abs=5e-6)


@pytest.mark.parametrize(("rule", "placement"), [(TFixupRescale(), TFixup()), (SubNormRescale(), SubNorm())])
def test_a_rule_is_its_placements_gain(rule, placement):
    assert rule.gain(3, 24) == pytest.approx(placement.gain(Site("attention", 8, 3, 24)))
    assert rule.whole_value_path


@pytest.mark.parametrize("variance", [0.0, math.inf, "1"])
def test_admin_refuses_what_is_no_variance(variance):
    with pytest.raises(ValueError, match="variance must be"):
        AdminRescale(variance)


@pytest.mark.parametrize("factor", [math.nan, None, 0, -1.0, math.inf, "0.5", True])
def test_constant_refuses_what_is_no_factor(factor):
    with pytest.raises(ValueError, match="finite number above 0"):
        ConstantRescale(factor)


def test_rules_are_frozen_and_compare():
    assert GPT2Rescale() == GPT2Rescale()
    with pytest.raises(FrozenInstanceError):
        ConstantRescale(0.5).factor = 1.0
