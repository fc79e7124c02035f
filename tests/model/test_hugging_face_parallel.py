"""Parity with Hugging Face's parallel blocks (Cohere, Phi, GPT-NeoX) and with DeepSeek-V4's hyper-connections.

Partial rotary is set to 1 in theirs, and Cohere's neighbour-wise rotation is undone by the order of rows: neither is
about norms. Phi's head has a bias, which is set to 0.
"""

import pytest
import torch

from lightning_norms.model.feed_forward import GELU, SwiGLU
from lightning_norms.model.norms import LayerNorm
from lightning_norms.model.positions import Rotary
from lightning_norms.model.residual import Site
from lightning_norms.placements import MHC, ParallelBlock, PreNorm
from tests.model.hugging_face import (
    LLAMA_ATTENTION,
    LLAMA_FEED_FORWARD,
    Comparison,
    assert_equal,
    built,
    decoder,
    halves,
    linears,
    of,
)

transformers = pytest.importorskip("transformers")
ROTARY = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default"}}
OURS = {"positions": Rotary(), "tied_head": False}


def cohere():
    theirs = built(
        transformers.CohereForCausalLM, transformers.CohereConfig, intermediate_size=88, num_key_value_heads=4,
        logit_scale=1.0, layer_norm_eps=1e-5, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )  # fmt: skip
    norm = LayerNorm(eps=1e-5, bias=False)
    ours = decoder(**OURS, norm=norm, feed_forward=SwiGLU(), placement=ParallelBlock())
    pairs = [(ours.embedding.weight, theirs.model.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        attention = linears(block.attention, layer.self_attn, LLAMA_ATTENTION)
        pairs += halves(attention[:2]) + attention[2:]
        pairs += linears(block.feed_forward, layer.mlp, LLAMA_FEED_FORWARD)
        pairs += of(block.attention_residual, layer.input_layernorm)
    return Comparison(theirs, ours, pairs + of(ours.exit, theirs.model.norm), list(theirs.model.layers))


def phi():
    theirs = built(transformers.PhiForCausalLM, transformers.PhiConfig, intermediate_size=64, **ROTARY)
    torch.nn.init.zeros_(theirs.lm_head.bias)
    ours = decoder(**OURS, bias=True, feed_forward=GELU("tanh"), ff_multiplier=2, placement=ParallelBlock())
    pairs = [(ours.embedding.weight, theirs.model.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        pairs += linears(block.attention, layer.self_attn, LLAMA_ATTENTION | {"writer": "dense"})
        pairs += linears(block.feed_forward, layer.mlp, {"up": "fc1", "writer": "fc2"})
        pairs += of(block.attention_residual, layer.input_layernorm)
    return Comparison(theirs, ours, pairs + of(ours.exit, theirs.model.final_layernorm), list(theirs.model.layers))


def neox(parallel):
    theirs = built(
        transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, intermediate_size=64,
        use_parallel_residual=parallel, **ROTARY,
    )  # fmt: skip
    body = theirs.gpt_neox
    placement = ParallelBlock(norms=2) if parallel else PreNorm()
    ours = decoder(**OURS, bias=True, feed_forward=GELU(), ff_multiplier=2, placement=placement)
    pairs = [(ours.embedding.weight, body.embed_in.weight), (ours.head.weight, theirs.lm_head.weight)]
    for block, layer in zip(ours.blocks, body.layers, strict=True):
        fused, attention = layer.attention.query_key_value, block.attention
        for i, mine in enumerate((attention.query, attention.key, attention.value)):
            pairs += [(mine.weight, fused.weight.detach().view(4, 3, 8, 32)[:, i].flatten(0, 1))]
            pairs += [(mine.bias, fused.bias.detach().view(4, 3, 8)[:, i].flatten())]
        pairs += of(attention.writer, layer.attention.dense)
        pairs += linears(block.feed_forward, layer.mlp, {"up": "dense_h_to_4h", "writer": "dense_4h_to_h"})
        pairs += of(block.attention_residual, layer.input_layernorm)
        pairs += of(block.feed_forward_residual, layer.post_attention_layernorm)
    return Comparison(theirs, ours, pairs + of(ours.exit, body.final_layer_norm), list(body.layers))


CASES = {  # name: how to build it, gains and biases whose gradients are compared
    "Cohere": (cohere, 3),
    "Phi": (phi, 18),
    "GPTNeoX-parallel": (lambda: neox(parallel=True), 16),
    "GPTNeoX-sequential": (lambda: neox(parallel=False), 16),
}


@pytest.mark.parametrize(("case", "gains"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
def test_logits_blocks_and_gradients_are_equal(case, gains, dtype, tolerance):
    torch.manual_seed(0)
    assert assert_equal(case(), dtype, tolerance) == gains


def test_deepseek_v4_hyper_connection(monkeypatch):
    """Theirs normalises rows first and is used transposed: with their eps at 0, ours with phi and b transposed."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    n, width = 4, 16
    config = transformers.DeepseekV4Config(
        hc_mult=n, hc_sinkhorn_iters=20, hc_eps=0.0, rms_norm_eps=1e-20, hidden_size=width
    )
    theirs = DeepseekV4HyperConnection(config).double()
    ours = MHC(n).wrap(Site("attention", width, 1, 2), LayerNorm()).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        ours.size.copy_(theirs.scale)
        for mine, other in ((ours.map, theirs.fn), (ours.offset, theirs.base)):
            mine.copy_(other)
            mine[2 * n :] = other[2 * n :].view(n, n, -1).transpose(0, 1).reshape(mine[2 * n :].shape)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # theirs computes in float32
    streams = torch.randn(2, 3, n, width, generator=generator, dtype=torch.float64)
    post, comb, collapsed = theirs(streams)
    read, spread, mix = ours.maps(streams)
    torch.testing.assert_close(spread, post, atol=1e-12, rtol=0)
    torch.testing.assert_close(mix, comb.transpose(-2, -1), atol=1e-12, rtol=0)
    torch.testing.assert_close((read.unsqueeze(-1) * streams).sum(-2), collapsed, atol=1e-12, rtol=0)
