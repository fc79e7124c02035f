"""Parity with Hugging Face's classes that are built like Llama: RMSNorm, SwiGLU, rotary positions, no biases.

What our decoder lacks is off in theirs, as it has no part in where norms sit: soft caps (Gemma 2), sliding
windows (all sequences are shorter), GeGLU (Gemma's activation is set to silu), scaled embeddings (multiplied into
ours), partial rotary (GLM-4's factor is set to 1), neighbour-wise rotation (their query and key rows are put in our
order).
"""

from dataclasses import dataclass

import pytest
import torch

from lightning_norms.model.attention import QKNorm
from lightning_norms.model.norms import LayerNorm, RMSNorm
from lightning_norms.model.positions import Rotary
from lightning_norms.model.residual import Site
from lightning_norms.placements import BeamNorm, CompleteP, DeepNorm, OutputNorm, PeriNorm, Sandwich
from tests.model.hugging_face import (
    LLAMA,
    LLAMA_ATTENTION,
    Comparison,
    assert_equal,
    built,
    decoder,
    halves,
    keep_float64,
    linears,
    llama_matrices,
    of,
    randomised,
)

transformers = pytest.importorskip("transformers")
FULL = ["full_attention"] * 2


@dataclass(frozen=True)
class EmbeddingNormDeepNorm(DeepNorm):
    """MiniMax: DeepNorm behind a norm of the embedding (its norms are numbered one place later)."""

    def entry(self, width, norm):
        return norm(width)


def family(name, norms, inner=lambda block, layer: [], shift=0.0, ours=None, **options):
    """A Llama-like case: ``norms`` gives (our module, their module) of a block's residuals."""
    model = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    theirs = built(model, config, **{"intermediate_size": 88, "rms_norm_eps": 1e-6} | options)
    mine = decoder(**LLAMA | (ours or {}))
    pairs = llama_matrices(theirs, mine)
    for block, layer in zip(mine.blocks, theirs.model.layers, strict=True):
        for our_norm, their_norm in (*norms(block, layer), *inner(block, layer)):
            pairs += of(our_norm, their_norm)
    pairs += of(mine.exit, theirs.model.norm)
    return Comparison(theirs, mine, pairs, list(theirs.model.layers), shift)


def pre(block, layer):
    return [
        (block.attention_residual, layer.input_layernorm),
        (block.feed_forward_residual, layer.post_attention_layernorm),
    ]


def output(block, layer):
    return [
        (block.attention_residual, layer.post_attention_layernorm),
        (block.feed_forward_residual, layer.post_feedforward_layernorm),
    ]


def around(*names):
    """Before and after attention, before and after the feed-forward."""

    def norms(block, layer):
        first, second = block.attention_residual, block.feed_forward_residual
        places = (first.before, first.after, second.before, second.after)
        return list(zip(places, (getattr(layer, name) for name in names), strict=True))

    return norms


GEMMA = around("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def qk(block, layer):
    attention = block.attention
    return [(attention.query_norm, layer.self_attn.q_norm), (attention.key_norm, layer.self_attn.k_norm)]


def gemma(name, **options):
    ours = {"placement": Sandwich()} | ({"qk_norm": QKNorm()} if name == "Gemma3" else {})
    case = family(
        name, GEMMA, qk if name == "Gemma3" else lambda block, layer: [], shift=1.0, ours=ours,
        num_key_value_heads=4, head_dim=8, query_pre_attn_scalar=8, hidden_activation="silu",
        attn_logit_softcapping=None, final_logit_softcapping=None, attention="eager", **options,
    )  # fmt: skip
    with torch.no_grad():
        for name_, p in case.theirs.named_parameters():
            if "norm" in name_:
                p.sub_(1.0)
    table = case.theirs.model.embed_tokens.weight
    case.pairs[0] = (case.ours.embedding.weight, table.detach() * case.theirs.model.embed_tokens.embed_scale)
    return case


def glm4():
    theirs = built(
        transformers.Glm4ForCausalLM, transformers.Glm4Config, intermediate_size=88, rms_norm_eps=1e-6,
        num_key_value_heads=4, head_dim=8, attention_bias=False,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default"},
    )  # fmt: skip
    ours = decoder(**LLAMA, placement=PeriNorm())
    pairs = [(ours.embedding.weight, theirs.model.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    norms = around(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    )  # fmt: skip
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        attention, mlp = linears(block.attention, layer.self_attn, LLAMA_ATTENTION), layer.mlp
        gate, up = mlp.gate_up_proj.weight.detach().chunk(2)
        feed_forward = block.feed_forward
        pairs += halves(attention[:2]) + attention[2:]
        pairs += [(feed_forward.gate.weight, gate), (feed_forward.up.weight, up)]
        pairs += of(feed_forward.writer, mlp.down_proj)
        pairs += [pair for mine, other in norms(block, layer) for pair in of(mine, other)]
    return Comparison(theirs, ours, pairs + of(ours.exit, theirs.model.norm), list(theirs.model.layers))


def minimax():
    """Their block ends before the norm that we count as its last, so blocks are not compared."""
    alpha = 4**0.25
    theirs = built(
        transformers.MiniMaxForCausalLM, transformers.MiniMaxConfig, intermediate_size=88, rms_norm_eps=1e-6,
        num_key_value_heads=4, head_dim=8, layer_types=FULL, num_local_experts=1, num_experts_per_tok=1,
        full_attn_alpha_factor=alpha, mlp_alpha_factor=alpha,
    )  # fmt: skip
    ours = decoder(**LLAMA | {"positions": Rotary(base=1e6)}, placement=EmbeddingNormDeepNorm())
    pairs = [(ours.embedding.weight, theirs.model.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    layers = list(theirs.model.layers)
    for block, layer in zip(ours.blocks, layers, strict=True):
        pairs += linears(block.attention, layer.self_attn, LLAMA_ATTENTION)
        experts = layer.mlp.experts  # a mixture with one expert, gate and up in one tensor
        gate, up = experts.gate_up_proj.detach()[0].chunk(2)
        ours_ff = block.feed_forward
        pairs += [(ours_ff.gate.weight, gate), (ours_ff.up.weight, up), (ours_ff.writer.weight, experts.down_proj[0])]
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    places = [ours.entry, *(r for b in ours.blocks for r in (b.attention_residual, b.feed_forward_residual))]
    for place, norm in zip(places, [*norms, theirs.model.norm], strict=True):
        pairs += of(place, norm)
    return Comparison(theirs, ours, pairs)


def olmo():
    weightless = {"norm": LayerNorm(eps=1e-5, gain=False)}
    theirs = built(transformers.OlmoForCausalLM, transformers.OlmoConfig, intermediate_size=88)
    ours = decoder(**LLAMA | weightless)
    return Comparison(theirs, ours, llama_matrices(theirs, ours), list(theirs.model.layers))


KV4 = {"num_key_value_heads": 4, "head_dim": 8}
CASES = {  # name: how to build it, gains whose gradients are compared
    "Llama": (lambda: family("Llama", pre, num_key_value_heads=4), 5),
    "Llama, 2 kv heads": (lambda: family("Llama", pre, num_key_value_heads=2, ours={"n_kv_heads": 2}), 5),
    "Qwen3": (lambda: family("Qwen3", pre, qk, ours={"qk_norm": QKNorm()}, **KV4), 9),
    "Qwen3, 2 kv heads": (
        lambda: family(
            "Qwen3", pre, qk, ours={"qk_norm": QKNorm(), "n_kv_heads": 2}, num_key_value_heads=2, head_dim=8
        ),
        9,
    ),
    "Olmo": (olmo, 0),
    "Olmo2": (
        lambda: family("Olmo2", output, qk, ours={"placement": OutputNorm(), "qk_norm": QKNorm(over="width")}),
        9,
    ),
    "Exaone4": (
        lambda: family(
            "Exaone4", output, qk, ours={"placement": OutputNorm(), "qk_norm": QKNorm()}, **KV4, layer_types=FULL,
            sliding_window=None, sliding_window_pattern=1,
        ),
        9,
    ),
    "HyperCLOVAX": (
        lambda: family(
            "HyperCLOVAX", around("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
            ours={"placement": PeriNorm()}, use_post_norm=True, **KV4,
        ),
        9,
    ),
    "Gemma2": (lambda: gemma("Gemma2"), 9),
    "Gemma3": (lambda: gemma("Gemma3"), 13),
    "Glm4": (glm4, 9),
    "Granite": (
        lambda: family(
            "Granite", pre, ours={"placement": CompleteP(base_layers=0.44)}, residual_multiplier=0.22,
            attention_multiplier=8**-0.5, num_key_value_heads=4,
        ),
        5,
    ),
    "MiniMax": (minimax, 5),
}  # fmt: skip


@pytest.mark.parametrize(("case", "gains"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
def test_logits_blocks_and_gradients_are_equal(case, gains, dtype, tolerance):
    torch.manual_seed(0)
    assert assert_equal(case(), dtype, tolerance) == gains


def test_identity_11_minimax_is_deepnorm_behind_an_embedding_norm():
    torch.manual_seed(0)
    assert_equal(minimax(), torch.float64, 1e-12)


def test_norm_eps_is_the_one_compared():
    assert RMSNorm().eps == transformers.LlamaConfig().rms_norm_eps


def test_beam_layer():
    """Beam's blocks around sublayers of ours: its own attention has a gate that we do not build."""
    from transformers.models.beam.modeling_beam import BeamDecoderLayer

    torch.manual_seed(0)
    config = transformers.BeamConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, mlp_layer_types=["dense"] * 3, layer_types=["full_attention"] * 3, rms_norm_eps=1e-6,
    )  # fmt: skip
    norm, stream = RMSNorm(eps=1e-6), torch.randn(2, 5, 32, dtype=torch.float64)
    ours, theirs = stream, stream
    branches = []
    for index in range(3):
        layer = randomised(BeamDecoderLayer(config, index))
        keep_float64(layer)
        attention = torch.nn.Linear(32, 32).double()
        layer.self_attn.forward = lambda hidden_states, a=attention, **_: (a(hidden_states), None)
        theirs = layer(theirs, None)
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        for kind, branch, names in (("attention", attention, norms[:2]), ("feed_forward", layer.mlp, norms[2:])):
            residual = BeamNorm().wrap(Site(kind, 32, index + 1, 3), norm).double()
            for mine, name in zip((residual.before, residual.after), names, strict=True):
                mine.weight = getattr(layer, name).weight
            ours = residual(ours, branch)
        branches.append((ours - theirs).abs().max().item())
    assert max(branches) <= 1e-12
    assert (ours - stream).abs().max() > 0.1
