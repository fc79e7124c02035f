"""Our decoder against Hugging Face's randomly initialised classes after copying weights: logits and norm gradients.

Gains and biases are randomised first, because gain 1 hides swapped norms.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import GELU, SwiGLU
from lightning_norms.model.norms import LayerNorm, RMSNorm
from lightning_norms.model.placements import DeepNorm, PostNorm, PreNorm
from lightning_norms.model.positions import Rotary

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "context_length": 64}
LLAMA = {"norm": RMSNorm(eps=1e-6), "feed_forward": SwiGLU(), "positions": Rotary(), "tied_head": False}


@dataclass(frozen=True)
class EmbeddingNormDeepNorm(DeepNorm):
    """MiniMax: DeepNorm behind a norm of the embedding (its norms are numbered one place later)."""

    def entry(self, width, norm):
        return norm(width)


def gpt(cls, config_cls, **extra):
    config = config_cls(
        vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **extra,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return cls(config)


def llama(cls=transformers.LlamaForCausalLM, config_cls=transformers.LlamaConfig, **extra):
    config = config_cls(
        vocab_size=97, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False, **extra,
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # "eager" takes its softmax in float32
    config._experts_implementation = "eager"  # the grouped kernel takes no float64
    return cls(config)


def minimax():
    alpha = 4**0.25
    return llama(
        transformers.MiniMaxForCausalLM, transformers.MiniMaxConfig, num_key_value_heads=4, head_dim=8,
        layer_types=["full_attention"] * 2, num_local_experts=1, num_experts_per_tok=1,
        full_attn_alpha_factor=alpha, mlp_alpha_factor=alpha,
    )  # fmt: skip


def gpt_pairs(theirs, ours, table, positions, last):
    """(our parameter, their value) for the GPT family, whose Conv1D weights lie transposed and q, k, v in one."""
    yield ours.embedding.weight, table
    yield ours.positions.weight, positions
    for block, layer in zip(ours.blocks, theirs.h, strict=True):
        attention, feed_forward = block.attention, block.feed_forward
        heads = (attention.query, attention.key, attention.value)
        fused = layer.attn.c_attn
        yield from zip((head.weight for head in heads), fused.weight.detach().T.split(32), strict=True)
        yield from zip((head.bias for head in heads), fused.bias.detach().split(32), strict=True)
        for linear, conv in (
            (attention.writer, layer.attn.c_proj),
            (feed_forward.up, layer.mlp.c_fc),
            (feed_forward.writer, layer.mlp.c_proj),
        ):
            yield linear.weight, conv.weight.T
            yield linear.bias, conv.bias
        yield from norm_pairs(block.attention_residual, layer.ln_1)
        yield from norm_pairs(block.feed_forward_residual, layer.ln_2)
    yield from norm_pairs(ours.exit, last)


def norm_pairs(ours, theirs):
    """Gains and biases, wherever the placement has put its one norm."""
    yield from zip(ours.parameters(), theirs.parameters(), strict=True)


def llama_pairs(theirs, ours):
    yield ours.embedding.weight, theirs.model.embed_tokens.weight
    yield ours.head.weight, theirs.lm_head.weight
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        for name, other in (("query", "q"), ("key", "k"), ("value", "v"), ("writer", "o")):
            yield getattr(block.attention, name).weight, getattr(layer.self_attn, f"{other}_proj").weight
        yield from feed_forward_pairs(block.feed_forward, layer.mlp)


def feed_forward_pairs(ours, theirs):
    if hasattr(theirs, "experts"):  # MiniMax: a mixture with one expert, gate and up in one tensor
        gate, up = theirs.experts.gate_up_proj.detach()[0].chunk(2)
        yield from ((ours.gate.weight, gate), (ours.up.weight, up), (ours.writer.weight, theirs.experts.down_proj[0]))
    else:
        for name, other in (("gate", "gate"), ("up", "up"), ("writer", "down")):
            yield getattr(ours, name).weight, getattr(theirs, f"{other}_proj").weight


def gpt2_case():
    theirs = gpt(transformers.GPT2LMHeadModel, transformers.GPT2Config)
    ours = Decoder(DecoderConfig(**SHAPE, bias=True, placement=PreNorm(), feed_forward=GELU("tanh")))
    return theirs, ours, list(gpt_pairs(theirs.transformer, ours, theirs.transformer.wte.weight, theirs.transformer.wpe.weight, theirs.transformer.ln_f))  # fmt: skip  # noqa: E501


def openai_case():
    theirs = gpt(transformers.OpenAIGPTLMHeadModel, transformers.OpenAIGPTConfig, afn="gelu")
    body = theirs.transformer
    ours = Decoder(DecoderConfig(**SHAPE, bias=True, placement=PostNorm(), feed_forward=GELU("tanh")))
    return theirs, ours, list(gpt_pairs(body, ours, body.tokens_embed.weight, body.positions_embed.weight, nn.Identity()))  # fmt: skip  # noqa: E501


def llama_case(kv_heads):
    theirs = llama(num_key_value_heads=kv_heads)
    ours = Decoder(DecoderConfig(**SHAPE, **LLAMA, n_kv_heads=kv_heads))
    pairs = list(llama_pairs(theirs, ours))
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        pairs += norm_pairs(block.attention_residual, layer.input_layernorm)
        pairs += norm_pairs(block.feed_forward_residual, layer.post_attention_layernorm)
    return theirs, ours, pairs + list(norm_pairs(ours.exit, theirs.model.norm))


def minimax_case():
    theirs = minimax()
    shape = SHAPE | LLAMA | {"positions": Rotary(base=1e6)}
    ours = Decoder(DecoderConfig(**shape, placement=EmbeddingNormDeepNorm()))
    pairs = list(llama_pairs(theirs, ours))
    layers = list(theirs.model.layers)
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    places = [ours.entry, *(r for b in ours.blocks for r in (b.attention_residual, b.feed_forward_residual))]
    for place, norm in zip(places, [*norms, theirs.model.norm], strict=True):
        pairs += norm_pairs(place, norm)
    return theirs, ours, pairs


CASES = {
    "GPT2LMHeadModel": gpt2_case,
    "OpenAIGPTLMHeadModel": openai_case,
    "LlamaForCausalLM-4": lambda: llama_case(4),
    "LlamaForCausalLM-2": lambda: llama_case(2),
    "MiniMaxForCausalLM": minimax_case,
}


def keep_float64(model):
    """Their RMSNorm computes in float32 whatever comes in: the same formula without the cast, for the float64 row."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: nn.functional.rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon)


def randomise(model):
    """Every gain in U(0.5, 1.5), every bias N(0, 0.1)."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
def test_logits_and_norm_gradients_are_equal(case, dtype, tolerance):
    torch.manual_seed(0)
    theirs, ours, pairs = case()
    theirs.eval()
    randomise(theirs)
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    if dtype == torch.float64:
        keep_float64(theirs)
    assert {id(p) for p in ours.parameters()} == {id(p) for p, _ in pairs}, "every parameter of ours was copied"
    tokens = torch.randint(0, 97, (3, 17))
    logits, expected = ours(tokens), theirs(tokens, use_cache=False).logits
    assert (logits - expected).abs().max().item() <= tolerance
    for out in (logits, expected):
        nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
    for mine, other in pairs:
        if mine.ndim == 1 and other.requires_grad:
            torch.testing.assert_close(mine.grad, other.grad, atol=tolerance, rtol=0)


def test_gpt2_and_llama_norm_eps_are_the_ones_compared():
    assert LayerNorm().eps == transformers.GPT2Config().layer_norm_epsilon
    assert RMSNorm().eps == transformers.LlamaConfig().rms_norm_eps
