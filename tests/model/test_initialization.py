"""The table of initialization.py, tensor by tensor, on wide matrices."""

import math

import pytest
import torch

from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import GELU, ReLU, SwiGLU
from lightning_norms.model.initialization import GPT2, Normal, Xavier
from lightning_norms.placements import (
    B2T,
    NGPT,
    DeepNorm,
    DSInit,
    GLMDeepNorm,
    MixNorm,
    PostNorm,
    PreNorm,
    ProRes,
    SubNorm,
    TFixup,
)

WIDTH, HIDDEN, LAYERS = 256, 1024, 2


def built(recipe, placement=None, feed_forward=None):
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(
            vocab_size=2048, d_model=WIDTH, n_layers=LAYERS, tied_head=False, bias=True, context_length=256,
            initialization=recipe, placement=placement or PreNorm(), feed_forward=feed_forward or GELU(),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "embedding", "attention", "attention_writer", "up", "writer", "head"),
    [
        (Normal(0.02), 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
        (GPT2(0.02), 0.02, 0.02, 0.01, 0.02, 0.01, 0.02),
        (Xavier(), 0.02, 1 / 16, 1 / 16, math.sqrt(2 / 1280), math.sqrt(2 / 1280), 1 / 16),
    ],
    ids=["Normal", "GPT2", "Xavier"],
)
def test_table(recipe, embedding, attention, attention_writer, up, writer, head):
    decoder = built(recipe)
    assert decoder.embedding.weight.std().item() == pytest.approx(embedding, rel=0.02)
    assert decoder.positions.weight.std().item() == pytest.approx(embedding, rel=0.02)
    assert decoder.head.weight.std().item() == pytest.approx(head, rel=0.02)
    for block in decoder.blocks:
        for matrix in (block.attention.query, block.attention.key, block.attention.value):
            assert matrix.weight.std().item() == pytest.approx(attention, rel=0.02)
        assert block.attention.writer.weight.std().item() == pytest.approx(attention_writer, rel=0.02)
        assert block.feed_forward.up.weight.std().item() == pytest.approx(up, rel=0.02)
        assert block.feed_forward.writer.weight.std().item() == pytest.approx(writer, rel=0.02)
    biases = [p for name, p in decoder.named_parameters() if name.endswith("bias")]
    assert all(torch.equal(bias, torch.zeros_like(bias)) for bias in biases)


@pytest.mark.parametrize("feed_forward", [GELU(), ReLU(), SwiGLU()], ids=repr)
def test_deepnorm_gain_reaches_the_value_path_and_nothing_else(feed_forward):
    """Case 5: beta on value, writers, up (and gate); queries, keys and everything else bit for bit as in post-norm."""
    beta = (8 * LAYERS) ** -0.25
    deep = dict(built(Xavier(), DeepNorm(), feed_forward).named_parameters())
    post = dict(built(Xavier(), PostNorm(), feed_forward).named_parameters())
    scaled = {name for name, p in deep.items() if not torch.equal(p, post[name])}
    assert scaled == {
        name
        for name in post
        if name.endswith(("value.weight", "writer.weight", "up.weight", "gate.weight"))
    }  # fmt: skip
    for name in scaled:
        torch.testing.assert_close(deep[name], post[name] * beta)


GAINS = [  # placement, gain of the value path and of queries and keys in blocks 1 and 2 of 2
    (DeepNorm(), (16**-0.25, 16**-0.25), (1.0, 1.0)),
    (GLMDeepNorm(), (0.5, 0.5), (1.0, 1.0)),
    (SubNorm(), (math.log(4) ** 0.5, math.log(4) ** 0.5), (1.0, 1.0)),
    (TFixup(), (18**-0.25, 18**-0.25), (1.0, 1.0)),
    (DSInit(0.8), (0.8, 0.8 * 2**-0.5), (0.8, 0.8 * 2**-0.5)),
    (B2T(rescale=True), (2**-0.5, 2**-0.5), (2**-0.5, 2**-0.5)),
    (MixNorm(fraction=0.5, first=DeepNorm()), (16**-0.25, 1.0), (1.0, 1.0)),
    (ProRes(DSInit()), (1.0, 2**-0.5), (1.0, 2**-0.5)),
    (PreNorm(), (1.0, 1.0), (1.0, 1.0)),
    (NGPT(), (1.0, 1.0), (1.0, 1.0)),
]


@pytest.mark.parametrize(("placement", "value_path", "query_key"), GAINS, ids=[repr(row[0]) for row in GAINS])
def test_gains_of_a_placement_within_2_percent(placement, value_path, query_key):
    for block, gain, other in zip(built(Xavier(), placement).blocks, value_path, query_key, strict=True):
        square, wide = 1 / 16, math.sqrt(2 / 1280)
        for matrix in (block.attention.value, block.attention.writer):
            assert matrix.weight.std().item() == pytest.approx(gain * square, rel=0.02)
        for matrix in (block.feed_forward.up, block.feed_forward.writer):
            assert matrix.weight.std().item() == pytest.approx(gain * wide, rel=0.02)
        for matrix in (block.attention.query, block.attention.key):
            assert matrix.weight.std().item() == pytest.approx(other * square, rel=0.02)


@pytest.mark.parametrize("std", [-0.1, float("nan"), float("inf")])
def test_senseless_std_is_refused(std):
    for make in (Normal, GPT2, Xavier):
        with pytest.raises(ValueError, match="std is"):
            make(std)
