import math
from dataclasses import FrozenInstanceError

import pytest

from lightning_norms.rescale_rules import ConstantRescale, DeepNormRescale, DepthRescale, GPT2Rescale


@pytest.mark.parametrize(
    ("rule", "layer", "layers", "gain"),
    [
        (GPT2Rescale(), 1, 8, 0.25),
        (GPT2Rescale(), 48, 48, 96**-0.5),
        (DepthRescale(), 1, 48, 1.0),
        (DepthRescale(), 16, 48, 0.25),
        (DeepNormRescale(), 3, 24, 0.26864),  # case 5
        (ConstantRescale(2), 1, 1, 2.0),
    ],
)
def test_gains(rule, layer, layers, gain):
    assert rule.gain(layer, layers) == pytest.approx(gain, abs=5e-6)


@pytest.mark.parametrize("factor", [math.nan, None, 0, -1.0, math.inf, "0.5", True])
def test_constant_refuses_what_is_no_factor(factor):
    with pytest.raises(ValueError, match="finite number above 0"):
        ConstantRescale(factor)


def test_rules_are_frozen_and_compare():
    assert GPT2Rescale() == GPT2Rescale()
    with pytest.raises(FrozenInstanceError):
        ConstantRescale(0.5).factor = 1.0
