"""Comparing our decoder with one of Hugging Face's: weights copied, then logits, blocks and gradients of every gain."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import SwiGLU
from lightning_norms.model.norms import RMSNorm
from lightning_norms.model.positions import Rotary

SHAPE = {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "context_length": 64}
LLAMA = {"norm": RMSNorm(eps=1e-6), "feed_forward": SwiGLU(), "positions": Rotary(), "tied_head": False}
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


@dataclass
class Comparison:
    """Two models and what corresponds."""

    theirs: nn.Module
    ours: Decoder
    pairs: list[tuple[nn.Parameter, Tensor]]
    """(our parameter, their value)."""
    layers: list[nn.Module] = field(default_factory=list)
    """Their blocks, one for each of ours; empty where theirs end elsewhere."""
    shift: float = 0.0
    """What their gains are stored without: 1 for Gemma."""

    def key_biases(self, parameter):
        """Whether a parameter of ours is the bias of keys."""
        return any(parameter is block.attention.key.bias for block in self.ours.blocks)


def built(model, config, attention="sdpa", **options):
    """Their model; "eager" attention takes its softmax in float32, so it cannot serve in float64."""
    made = config(**{**SIZES, **TOKENS, **options})
    made._attn_implementation = attention
    made._experts_implementation = "eager"  # the grouped kernel takes no float64
    return randomised(model(made).eval())


def decoder(**options):
    return Decoder(DecoderConfig(**{**SHAPE, **options})).double()


@torch.no_grad()
def randomised(model):
    """Every gain in U(0.5, 1.5) (as it acts), every bias N(0, 0.1): gain 1 hides swapped norms.

    Matrices are made five times as large, so that a branch, and with it a norm inside it, is no small part of the sum.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            parameter.mul_(5.0)
    return model.double()


def of(ours, theirs):
    """All parameters of two modules of the same kind, in order."""
    return list(zip(ours.parameters(), theirs.parameters(), strict=True))


def linears(ours, theirs, names):
    """Weights (and biases) of linear layers, by (our name, their name)."""
    return [pair for mine, other in names.items() for pair in of(getattr(ours, mine), getattr(theirs, other))]


LLAMA_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "writer": "o_proj"}
LLAMA_FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "writer": "down_proj"}


def llama_matrices(theirs, ours):
    """Embedding, head, and the matrices of every block."""
    pairs = [(ours.embedding.weight, theirs.model.embed_tokens.weight), (ours.head.weight, theirs.lm_head.weight)]
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        pairs += linears(block.attention, layer.self_attn, LLAMA_ATTENTION)
        pairs += linears(block.feed_forward, layer.mlp, LLAMA_FEED_FORWARD)
    return pairs


def halves(pairs, heads=4):
    """Queries and keys of models that turn neighbours (2i, 2i + 1), for ours that turns (i, i + half)."""
    half = lambda value: value.detach().unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # noqa: E731
    return [(mine, half(other)) for mine, other in pairs]


@contextmanager
def computing_in(dtype):
    """Their softmax, rotation and masks are float32 whatever comes in: the same formulas without the casts."""
    softmax, default = nn.functional.softmax, torch.get_default_dtype()
    if dtype != torch.float64:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        with (
            mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == dtype else x.to(torch.float32)),
            mock.patch.object(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim)),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def keep_float64(model):
    """Their norms compute in float32 whatever comes in: the same formulas without the cast."""
    functional = nn.functional
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            shift = 1.0 if kind.startswith("Gemma") else 0.0
            module.forward = lambda x, m=module, e=eps, s=shift: functional.rms_norm(x, x.shape[-1:], s + m.weight, e)
        elif kind == "CohereLayerNorm":
            module.forward = lambda x, m=module: functional.layer_norm(x, x.shape[-1:], m.weight, None, m.variance_epsilon)  # noqa: E501  # fmt: skip
        elif kind == "OlmoLayerNorm":
            module.forward = lambda x: functional.layer_norm(x, x.shape[-1:], None, None, 1e-5)


def streams_after_blocks(blocks, run):
    """What comes out of every block, and of the whole."""
    seen = []

    def keep(_module, _inputs, output):
        seen.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(keep) for block in blocks]
    out = run()
    for handle in handles:
        handle.remove()
    return [*seen, out]


def assert_equal(comparison, dtype, tolerance):
    """Logits, streams after every block, gradients of every gain and bias."""
    theirs, ours, pairs = comparison.theirs, comparison.ours, comparison.pairs
    with torch.no_grad():
        for mine, other in pairs:
            gain = mine.ndim == 1 and other.requires_grad
            mine.copy_(other + comparison.shift if gain else other)
    assert {id(p) for p in ours.parameters()} == {id(p) for p, _ in pairs}, "every parameter of ours was copied"
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    if dtype == torch.float64:
        keep_float64(theirs)
    tokens = torch.randint(2, 97, (3, 17), generator=torch.Generator().manual_seed(1))
    with computing_in(dtype):
        expected = streams_after_blocks(comparison.layers, lambda: theirs(tokens, use_cache=False).logits)
    got = streams_after_blocks(ours.blocks if comparison.layers else [], lambda: ours(tokens))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max().item() <= tolerance
    assert expected[-1].std() > 1e-3
    for out in (got[-1], expected[-1]):
        nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
    compared = [(mine, other) for mine, other in pairs if mine.ndim == 1 and other.requires_grad]
    for mine, other in compared:
        # A key's bias changes no attention weight, so its gradient is nothing but rounding.
        torch.testing.assert_close(mine.grad, other.grad, atol=tolerance, rtol=0)
    assert all(other.grad.abs().max() > 1e-5 for mine, other in compared if not comparison.key_biases(mine))
    return len(compared)
