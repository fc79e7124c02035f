"""Cases 3, 9: trained weights and an init that already has the factor are told from fresh ones."""

import pytest
import torch
from torch import nn

from lightning_norms.anatomy.fresh_weights import already_scaled, evidence_of_training, looks_trained
from lightning_norms.anatomy.writers import residual_writers, value_path
from lightning_norms.rescale_rules import ConstantRescale, DeepNormRescale, DepthRescale, GPT2Rescale
from tests.anatomy.families import FAMILIES, causal
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


class Plain(nn.Module):
    """Blocks whose norms have neither gain nor bias."""

    def __init__(self, width=32, init=None):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, bias=True) for _ in range(3)]
        for layer in layers:
            layer.norm1, layer.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.embedding, self.layers, self.head = nn.Embedding(16, width), nn.Sequential(*layers), nn.Linear(width, 16)
        for parameter in self.parameters() if init else ():
            (init if parameter.ndim > 1 else nn.init.zeros_)(parameter)

    def forward(self, input_ids):
        return self.head(self.layers(self.embedding(input_ids)))


def small_normal(weight):
    nn.init.normal_(weight, std=0.02)


def olmo():
    return causal("Olmo", vocab_size=16, hidden_size=64, intermediate_size=128)()


INITS = [nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_, nn.init.trunc_normal_, small_normal]
NETS = [Plain, olmo, *(lambda init=init: Plain(init=init) for init in INITS)]


def train(net, steps, optimizer):
    torch.manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(0, 16, (8, 8))
        output = net(input_ids=tokens)
        loss = nn.functional.cross_entropy(getattr(output, "logits", output).flatten(0, 1), (5 * tokens.flatten()) % 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("build", NETS)
def test_twenty_steps_show_without_affine_norms(build):
    for seed in range(3):
        net = seeded(build, seed)
        assert evidence_of_training(net) is None
        train(net, 20, torch.optim.Adam(net.parameters(), lr=1e-3))
        assert evidence_of_training(net) is not None


def test_biases_of_an_init_are_no_training():
    net = Plain()
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            seeded(lambda parameter=parameter: nn.init.normal_(parameter, std=1e-6))  # a ViT of JAX
    assert evidence_of_training(net) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_no_fresh_family_is_taken_for_trained():
    taken = [(f.name, seed) for f in FAMILIES for seed in range(8) if evidence_of_training(seeded(f.build, seed))]
    assert not taken
