"""Parity with Hugging Face's GPT, GPT-2, OPT (pre and post) and Kosmos-2: LayerNorm, biases, added positions."""

import pytest
import torch

from lightning_norms.model.feed_forward import GELU, ReLU
from lightning_norms.model.norms import LayerNorm
from lightning_norms.placements import PostNorm, PreNorm, SubNorm
from tests.model.hugging_face import Comparison, assert_equal, decoder, linears, of, randomised

transformers = pytest.importorskip("transformers")


def gpt(cls, config_cls, **extra):
    config = config_cls(
        vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **extra,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return randomised(cls(config).eval())


def gpt_pairs(body, ours, table, positions):
    """The GPT family's Conv1D weights lie transposed and hold q, k, v in one."""
    pairs = [(ours.embedding.weight, table), (ours.positions.weight, positions)]
    for block, layer in zip(ours.blocks, body.h, strict=True):
        attention, feed_forward = block.attention, block.feed_forward
        heads, fused = (attention.query, attention.key, attention.value), layer.attn.c_attn
        pairs += zip((head.weight for head in heads), fused.weight.detach().T.split(32), strict=True)
        pairs += zip((head.bias for head in heads), fused.bias.detach().split(32), strict=True)
        for linear, conv in (
            (attention.writer, layer.attn.c_proj),
            (feed_forward.up, layer.mlp.c_fc),
            (feed_forward.writer, layer.mlp.c_proj),
        ):
            pairs += [(linear.weight, conv.weight.T), (linear.bias, conv.bias)]
        pairs += of(block.attention_residual, layer.ln_1) + of(block.feed_forward_residual, layer.ln_2)
    return pairs


def gpt2():
    theirs = gpt(transformers.GPT2LMHeadModel, transformers.GPT2Config)
    body, ours = theirs.transformer, decoder(bias=True, placement=PreNorm(), feed_forward=GELU("tanh"))
    pairs = gpt_pairs(body, ours, body.wte.weight, body.wpe.weight) + of(ours.exit, body.ln_f)
    return Comparison(theirs, ours, pairs, list(body.h))


def openai_gpt():
    theirs = gpt(transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTConfig, afn="gelu")
    body, ours = theirs.transformer, decoder(bias=True, placement=PostNorm(), feed_forward=GELU("tanh"))
    pairs = gpt_pairs(body, ours, body.tokens_embed.weight, body.positions_embed.weight)
    return Comparison(theirs, ours, pairs, list(body.h))


FAIRSEQ_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "writer": "out_proj"}


def opt(before):
    config = transformers.OPTConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, do_layer_norm_before=before, activation_function="relu", dropout=0.0,
        pad_token_id=1, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    theirs = randomised(transformers.OPTForCausalLM(config).eval())
    body = theirs.model.decoder
    placement = PreNorm() if before else PostNorm()
    ours = decoder(bias=True, placement=placement, feed_forward=ReLU(), ff_multiplier=2, tied_head=False)
    pairs = [(ours.embedding.weight, body.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    pairs += [(ours.positions.weight, body.embed_positions.weight[2:])]  # the first two rows are never used
    for block, layer in zip(ours.blocks, body.layers, strict=True):
        pairs += linears(block.attention, layer.self_attn, FAIRSEQ_ATTENTION)
        pairs += linears(block.feed_forward, layer, {"up": "fc1", "writer": "fc2"})
        pairs += of(block.attention_residual, layer.self_attn_layer_norm)
        pairs += of(block.feed_forward_residual, layer.final_layer_norm)
    pairs += of(ours.exit, body.final_layer_norm) if before else []
    return Comparison(theirs, ours, pairs, list(body.layers))


def kosmos2():
    """Sub-LN's topology (its class has no gamma at init); positions are its fixed table, copied into a learned one."""
    from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextConfig, Kosmos2TextForCausalLM

    config = Kosmos2TextConfig(
        vocab_size=97, max_position_embeddings=64, embed_dim=32, layers=2, ffn_dim=64, attention_heads=4,
        activation_function="gelu", dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, scale_embedding=False,
        pad_token_id=1, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    theirs = randomised(Kosmos2TextForCausalLM(config).eval())
    body = theirs.model
    ours = decoder(bias=True, placement=SubNorm(), feed_forward=GELU(), ff_multiplier=2, tied_head=False)
    pairs = [(ours.embedding.weight, body.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    pairs += [(ours.positions.weight, body.embed_positions.weights[2:66])]
    for block, layer in zip(ours.blocks, body.layers, strict=True):
        pairs += linears(block.attention, layer.self_attn, FAIRSEQ_ATTENTION)
        pairs += linears(block.feed_forward, layer.ffn, {"up": "fc1", "writer": "fc2"})
        pairs += of(block.attention_residual, layer.self_attn_layer_norm)
        pairs += of(block.feed_forward_residual, layer.final_layer_norm)
        pairs += of(block.attention.writer_norm, layer.self_attn.inner_attn_ln)
        pairs += of(block.feed_forward.writer_norm, layer.ffn.ffn_layernorm)
    return Comparison(theirs, ours, pairs + of(ours.exit, body.layer_norm), list(body.layers))


CASES = {  # name: how to build it, gains and biases whose gradients are compared
    "GPT2LMHeadModel": (gpt2, 16),
    "OpenAIGPTLMHeadModel": (openai_gpt, 14),
    "OPTForCausalLM-pre": (lambda: opt(before=True), 22),
    "OPTForCausalLM-post": (lambda: opt(before=False), 20),
    "Kosmos2TextForCausalLM": (kosmos2, 30),
}


@pytest.mark.parametrize(("case", "gains"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
def test_logits_blocks_and_gradients_are_equal(case, gains, dtype, tolerance):
    torch.manual_seed(0)
    assert assert_equal(case(), dtype, tolerance) == gains


def test_norm_eps_is_the_one_compared():
    assert LayerNorm().eps == transformers.GPT2Config().layer_norm_epsilon
