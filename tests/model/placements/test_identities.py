"""Exact relations between the designs, forward and gradient, float64, to 1e-12. (MiniMax: see test_hugging_face.)"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_norms.model.norms import LayerNorm, RMSNorm
from lightning_norms.model.placements.hyper_connections import sinkhorn
from lightning_norms.model.placements.single_stream import Opened, Placement
from lightning_norms.model.residual import Residual, Site
from lightning_norms.placements import (
    KEEL,
    LNS,
    MHC,
    AttentionResiduals,
    CompleteP,
    DeepNorm,
    DynamicHyperConnections,
    HyperConnections,
    MixNorm,
    NormFormer,
    PostNorm,
    PreNorm,
    ProRes,
    ResiDual,
)
from tests.model.placements.stacks import LAYERS, NORM, WIDTH, assert_same, random_start, run, sites

X = random_start()


@dataclass(frozen=True)
class Bloom(Placement):
    """BLOOM with ``apply_residual_connection_post_layernorm``: the skip path starts behind the norm."""

    def wrap(self, site, norm):
        return Opened(norm(site.width), Residual())

    def exit(self, width, norm):
        return norm(width)


def test_1_deepnorm_is_postnorm_with_the_branch_divided_by_alpha():
    assert_same(run(DeepNorm(alpha=2.5), X), run(PostNorm(), X, scale=1 / 2.5))


def test_1_holds_with_eps_only_if_eps_is_scaled_too():
    deep = run(DeepNorm(alpha=2.5), X, norm=LayerNorm(eps=1e-2))
    assert_same(deep, run(PostNorm(), X, norm=LayerNorm(eps=1e-2 / 2.5**2), scale=1 / 2.5))
    assert (deep[0] - run(PostNorm(), X, norm=LayerNorm(eps=1e-2), scale=1 / 2.5)[0]).abs().max() > 1e-4


def test_2_keel_behind_block_1_is_deepnorm_with_alpha_2l():
    places, norm = sites(first=2, of=6), RMSNorm(eps=0.0)
    x = random_start(normalised=True)
    keel, deep = (run(placement, x, places, norm) for placement in (KEEL(), DeepNorm(alpha=12.0, beta=1.0)))
    torch.testing.assert_close(keel[0], deep[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(keel[2], deep[2], atol=1e-12, rtol=1e-12)
    tangent = deep[1] - x * (deep[1] * x).mean(-1, keepdim=True)  # KEEL's inner norm has no gradient along x
    both = keel[1] - x * (keel[1] * x).mean(-1, keepdim=True)
    torch.testing.assert_close(both, tangent, atol=1e-12, rtol=1e-12)


def test_2_fails_in_block_1():
    x = random_start(normalised=True)
    keel, deep = (run(p, x, None, RMSNorm(eps=0.0)) for p in (KEEL(), DeepNorm(alpha=2.0 * LAYERS)))
    assert (keel[0] - deep[0]).abs().max() > 1e-3


def test_3_keel_with_one_block_is_prenorm_with_one_block():
    assert_same(run(KEEL(), X, sites(layers=1)), run(PreNorm(), X, sites(layers=1)))


def test_4_bloom_is_postnorm_behind_an_embedding_norm():
    x = NORM(WIDTH).double()(X).detach()
    bloom, post = run(Bloom(), x), run(PostNorm(), x)
    torch.testing.assert_close(bloom[0], post[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(bloom[2], post[2], atol=1e-12, rtol=1e-12)


def test_5_residuals_first_stream_is_postnorm():
    assert_same(run(ResiDual(), X, last=False), run(PostNorm(), X))


def test_5_but_residual_is_no_prenorm():
    assert (run(ResiDual(), X)[0] - run(PreNorm(), X)[0]).abs().max() > 1e-2


def test_6_mixnorm_at_its_ends():
    assert_same(run(MixNorm(fraction=1.0), X), run(PostNorm(), X))
    assert_same(run(MixNorm(fraction=0.0), X), run(PreNorm(), X))


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_6_mixnorm_changes_over_at_its_fraction(fraction):
    residuals = [MixNorm(fraction=fraction).wrap(site, NORM) for site in sites(layers=4)]
    post = [isinstance(residual.closing, nn.LayerNorm) for residual in residuals]
    assert post == [True] * int(8 * fraction) + [False] * (8 - int(8 * fraction))


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("cls", [HyperConnections, DynamicHyperConnections, MHC])
def test_7_hyper_connections_start_as_prenorm(cls, streams):
    assert_same(run(cls(streams), X), run(PreNorm(), X))


def doubly_stochastic(post):
    """Any r > 0, any M from Sinkhorn, one p for all streams."""
    generator = torch.Generator().manual_seed(8)

    def change(residual):
        n = residual.streams
        with torch.no_grad():
            residual.offset.copy_(torch.randn(n * (n + 2), generator=generator))
            residual.offset[n : 2 * n] = torch.tensor(post / 2, dtype=torch.float64).logit()

    return change


@pytest.mark.parametrize("post", [1.0, 0.7])
def test_8_mhc_on_equal_streams_is_prenorm_times_its_output_weight(post):
    ours = run(MHC(3, iterations=50), X, change=doubly_stochastic(post))
    assert_same(ours, run(PreNorm(), X, scale=post))


def test_8_products_of_mixing_maps_stay_doubly_stochastic():
    logits = torch.randn(48, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    product = torch.linalg.multi_dot(list(sinkhorn(logits, 20)))
    for dim in (0, 1):
        torch.testing.assert_close(product.sum(dim), torch.ones(4).double(), atol=1e-3, rtol=0)
    assert torch.linalg.matrix_norm(product, 2) <= 1 + 1e-3
    free = torch.linalg.multi_dot(list(torch.eye(4).double() + 0.3 * logits))
    assert torch.linalg.matrix_norm(free, 2) > 10


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_9_attention_residuals_start_as_prenorm(block_size):
    assert_same(run(AttentionResiduals(block_size), X), run(PreNorm(), X))


def test_9_attention_residuals_are_causal_in_depth():
    """What a sublayer reads does not change with what later ones write, and does with earlier ones."""
    placement, places = AttentionResiduals(), sites()
    read = {}
    for changed in (None, 3, 6):
        stream, inputs = placement.entry(WIDTH, NORM)(X), []
        for i, site in enumerate(places):
            factor = 2.0 if i == changed else 1.0

            def branch(h, factor=factor, inputs=inputs):
                inputs.append(h.detach())
                return factor * h.roll(1, -1)

            residual = placement.wrap(site, NORM).double()
            if i > 0:
                nn.init.normal_(residual.mean.query, generator=torch.Generator().manual_seed(i))
            stream = residual(stream, branch)
        read[changed] = torch.stack(inputs)
    for changed in (3, 6):
        differs = (read[None] != read[changed]).flatten(1).any(1).tolist()
        assert differs == [False] * (changed + 1) + [True] * (7 - changed)


def test_10_designs_reduce_to_their_parents():
    pre, post = run(PreNorm(), X), run(PostNorm(), X)
    one = sites(layers=1)
    assert_same(run(LNS(), X, one), run(PreNorm(), X, one))
    assert_same(run(CompleteP(base_layers=LAYERS), X), pre)
    assert_same(run(DeepNorm(1.0, 1.0), X), post)
    drop = lambda residual: setattr(residual, "after", nn.Identity())  # noqa: E731
    assert_same(run(NormFormer(residual_scale=True), X, change=drop), pre)
    heads = NormFormer().inner(Site("attention", WIDTH, 1, 2, WIDTH, 4), NORM).writer.double()
    assert torch.equal(heads(X), X)


@pytest.mark.parametrize("base", [PreNorm(), PostNorm(), DeepNorm(), LNS()], ids=lambda p: type(p).__name__)
def test_prores_ends_as_its_base_and_starts_as_its_skip_path(base):
    def at(step):
        return lambda residual: [m.taken.fill_(step) for m in residual.modules() if hasattr(m, "taken")]

    placement = ProRes(base, warmup_steps=10)
    assert_same(run(placement, X, change=at(10 * LAYERS)), run(base, X))
    torch.testing.assert_close(run(placement, X, change=at(0))[0], run(base, X, scale=0.0)[0])
    halfway = run(placement, X, change=at(5))[0]
    assert (halfway - run(base, X)[0]).abs().max() > 1e-3
