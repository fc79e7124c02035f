"""Each placement against worked examples, its identities and its norm count."""

import copy

import pytest
import torch
from torch import nn

from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.norms import LayerNorm
from lightning_norms.model.placements import DeepNorm, Placement, PostNorm, PreNorm
from lightning_norms.model.residual import Site

X0 = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
F1 = lambda z: z * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=z.dtype)  # noqa: E731
F2 = lambda z: z.roll(1, dims=-1)  # noqa: E731
NORM = LayerNorm(eps=0.0)


def one_block(placement, layer=1, layers=1):
    """Stream after two sublayers, and what the head would read."""
    x = X0
    for kind, branch in (("attention", F1), ("feed_forward", F2)):
        x = placement.wrap(Site(kind, 4, layer, layers), NORM).double()(x, branch)
    return x, placement.exit(4, NORM).double()(x)


GOLDEN = [  # two sublayers = one block, LayerNorm eps 0, worked out by hand in float64
    (PostNorm(), 1, [0.538462, -1.307692, -0.538462, 1.307692], [0.538462, -1.307692, -0.538462, 1.307692]),
    (PreNorm(), 1, [1.619039, 0.093896, 2.365223, 12.198022], [-0.514261, -0.834392, -0.357636, 1.706289]),
    (DeepNorm(), 1, [0.347015, -1.273732, -0.492619, 1.419336], [0.347015, -1.273732, -0.492619, 1.419336]),
    (DeepNorm(), 24, [-0.393871, -1.001370, -0.269018, 1.664258], [-0.393871, -1.001370, -0.269018, 1.664258]),
]


@pytest.mark.parametrize(("placement", "layers", "stream", "read"), GOLDEN)
def test_golden_vectors(placement, layers, stream, read):
    got_stream, got_read = one_block(placement, layers=layers)
    torch.testing.assert_close(got_stream, torch.tensor(stream, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(got_read, torch.tensor(read, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("layers", "alpha", "beta"),
    [(6, 1.8612, 0.3799), (12, 2.2134, 0.3195), (24, 2.6321, 0.2686), (48, 3.1302, 0.2259), (1000, 6.6874, 0.1057)],
)
def test_deepnorm_constants(layers, alpha, beta):
    site = Site("attention", 4, 1, layers)
    assert DeepNorm().wrap(site, NORM).skip == pytest.approx(alpha, abs=5e-5)
    assert DeepNorm().gain(site) == pytest.approx(beta, abs=5e-5)


@pytest.mark.parametrize(
    ("placement", "norms"), [(PreNorm(), 7), (PostNorm(), 6), (PostNorm(final_norm=True), 7), (DeepNorm(), 6)]
)
def test_norm_count_for_three_blocks(placement, norms):
    """Case 2: pre-norm ends with exactly one norm, post-norm with none after the last block."""
    decoder = Decoder(DecoderConfig(vocab_size=11, n_layers=3, placement=placement))
    assert sum(isinstance(module, nn.LayerNorm) for module in decoder.modules()) == norms
    x = 3 * torch.randn(64, 64)
    for residual in [block.feed_forward_residual for block in decoder.blocks]:
        x = residual(x, torch.zeros_like)
    assert decoder.exit(x).var().item() == pytest.approx(1.0, abs=0.05)


def random_stack(placement, layers=4, width=8):
    """The same random ReLU sublayers for every placement: an input and a function of it."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2 * layers, width, width, generator=generator, dtype=torch.float64)
    norm = LayerNorm(eps=0.0)
    sites = [
        Site(kind, width, layer, layers) for layer in range(1, layers + 1) for kind in ("attention", "feed_forward")
    ]

    def run(x, scale=1.0):
        for weight, site in zip(weights, sites, strict=True):
            x = placement.wrap(site, norm).double()(x, lambda h, w=weight: scale * torch.relu(h @ w))
        return placement.exit(width, norm).double()(x)

    return torch.randn(5, width, generator=generator, dtype=torch.float64), run


def test_deepnorm_is_postnorm_with_the_branch_divided_by_alpha():
    x, deep = random_stack(DeepNorm(alpha=2.5))
    _, post = random_stack(PostNorm())
    a, b = (x.clone().requires_grad_() for _ in range(2))
    deep_out, post_out = deep(a), post(b, scale=1 / 2.5)
    torch.testing.assert_close(deep_out, post_out, atol=1e-12, rtol=0)
    for out in (deep_out, post_out):
        out.pow(3).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=1e-10)


def test_deepnorm_with_neutral_constants_is_postnorm():
    x, deep = random_stack(DeepNorm(alpha=1.0, beta=1.0))
    _, post = random_stack(PostNorm())
    assert torch.equal(deep(x), post(x))


def test_deepnorm_with_an_empty_branch_only_normalises():
    """Case 5: alpha multiplies the stream, not the branch."""
    norm = LayerNorm(eps=1e-6)
    residual = DeepNorm().wrap(Site("attention", 16, 1, 24), norm)
    assert residual.skip == pytest.approx(2.63215, abs=1e-5)
    x = torch.randn(7, 16)
    torch.testing.assert_close(residual(x, torch.zeros_like), norm(16)(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_deepnorm_refuses_senseless_constants(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        DeepNorm(**{name: value})


def all_placements():
    """Every concrete class, by walking: a new one is under contract without an edit here."""
    return [cls() for cls in Placement.__subclasses__() if cls.__module__.startswith("lightning_norms")]


@pytest.mark.parametrize("placement", all_placements(), ids=lambda p: type(p).__name__)
def test_contract(placement):
    """Shape and dtype kept, gradient in every parameter, documented, copyable."""
    config = DecoderConfig(vocab_size=11, n_layers=3, d_model=16, n_heads=2, context_length=8, placement=placement)
    decoder = Decoder(config)
    tokens = torch.randint(0, 11, (2, 8))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert copy.deepcopy(decoder).to(dtype)(tokens).dtype == dtype
    logits = decoder(tokens)
    assert logits.shape == (2, 8, 11)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    silent = [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
    assert "Source:" in type(placement).__doc__
