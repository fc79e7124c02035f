"""Cases 3, 9: trained weights and an init that already has the factor are told from fresh ones."""

import pytest
from torch import nn

from lightning_norms.anatomy.fresh_weights import already_scaled, looks_trained
from lightning_norms.anatomy.writers import residual_writers, value_path
from lightning_norms.rescale_rules import ConstantRescale, DeepNormRescale, DepthRescale, GPT2Rescale
from tests.stand_ins import Decoder, seeded


def test_looks_trained():
    decoder = Decoder()
    assert not looks_trained(decoder)
    decoder.blocks[1].norm_2.bias.data[0] = 1e-3
    assert looks_trained(decoder)
    constant = nn.RMSNorm(4)
    constant.weight.data.fill_(0.1)
    assert not looks_trained(constant)


@pytest.mark.parametrize("rule", [GPT2Rescale(), DepthRescale(), DeepNormRescale(), ConstantRescale(0.05)])
@pytest.mark.parametrize(("layers", "width"), [(2, 16), (6, 16), (48, 16), (6, 64)])
def test_an_init_that_has_the_factor_is_told_from_one_that_has_not(rule, layers, width):
    decoder = seeded(lambda: Decoder(layers, width))
    matrices = value_path(decoder) if rule.whole_value_path else residual_writers(decoder)
    assert not already_scaled(matrices, rule)
    others = [other for other in (GPT2Rescale(), DepthRescale(), DeepNormRescale()) if other != rule]
    if layers > 6:  # at a few layers these rules are about the same number
        for other in others:
            for matrix in residual_writers(decoder):
                matrix.parameter.data.mul_(other.gain(matrix.layer, layers))
            assert not already_scaled(matrices, rule)
            for matrix in residual_writers(decoder):
                matrix.parameter.data.div_(other.gain(matrix.layer, layers))
    for matrix in matrices:
        matrix.parameter.data.mul_(rule.gain(matrix.layer, layers))
    assert already_scaled(matrices, rule)
