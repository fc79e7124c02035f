"""n streams: the written equation with random constants, how each sublayer starts, and what is learned."""

import math

import pytest
import torch
from torch import nn

from lightning_norms.model.norms import RMSNorm
from lightning_norms.model.residual import Site
from lightning_norms.placements import (
    MHC,
    AttentionResiduals,
    DynamicHyperConnections,
    HyperConnections,
)
from tests.model.placements.stacks import WIDTH, sites

N = 3
NORM = RMSNorm(eps=0.0)


def random_(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def branch(h):
    return torch.relu(h.roll(1, -1))


STREAMS = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_static_equation():
    """``H' = B^T f(A_m^T H) + A_r^T H``, written out token by token."""
    residual = random_(HyperConnections(N).wrap(Site("attention", WIDTH, 2, 4), NORM).double())
    got, mix = residual(STREAMS, branch), residual.mix.view(N, N)
    for token in range(2):
        h = STREAMS[token]
        f = branch(residual.before(sum(residual.read[j] * h[j] for j in range(N))))
        for i in range(N):
            want = residual.spread[i] * f + sum(mix[j, i] * h[j] for j in range(N))
            torch.testing.assert_close(got[token, i], want)


def test_dynamic_equation():
    residual = random_(DynamicHyperConnections(N).wrap(Site("attention", WIDTH, 2, 4), NORM).double())
    normed = residual.stream_norm(STREAMS)
    read, spread, mix = residual.maps(STREAMS)
    moved = torch.tanh(normed @ residual.map.T)  # [token, stream, n + 2]
    torch.testing.assert_close(read, residual.read + residual.mix_size * moved[..., 0])
    torch.testing.assert_close(spread, residual.spread + residual.spread_size * moved[..., 1])
    torch.testing.assert_close(mix, residual.mix.view(N, N) + residual.mix_size * moved[..., 2:])


def test_manifold_equation():
    residual = random_(MHC(N, iterations=50).wrap(Site("attention", WIDTH, 2, 4), NORM).double())
    read, spread, mix = residual.maps(STREAMS)
    vector = STREAMS.flatten(1)
    logits = vector / vector.square().mean(-1, keepdim=True).sqrt() @ residual.map.T
    sizes = [residual.size[0]] * N + [residual.size[1]] * N + [residual.size[2]] * N * N
    logits = logits * torch.stack(sizes) + residual.offset
    torch.testing.assert_close(read, logits[:, :N].sigmoid())
    torch.testing.assert_close(spread, 2 * logits[:, N : 2 * N].sigmoid())
    for dim in (-1, -2):
        torch.testing.assert_close(mix.sum(dim), torch.ones(2, N).double(), atol=1e-6, rtol=0)
    got = residual(STREAMS, branch)
    f = branch(residual.before(torch.einsum("tn,tnd->td", read, STREAMS)))
    want = torch.einsum("tn,td->tnd", spread, f) + torch.einsum("tij,tjd->tid", mix, STREAMS)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cls", [HyperConnections, DynamicHyperConnections])
def test_sublayer_k_reads_stream_k_mod_n(cls):
    residuals = [cls(N).wrap(site, NORM) for site in sites()]
    assert [residual.read.argmax().item() for residual in residuals] == [k % N for k in range(8)]
    for residual in residuals:
        assert sorted(residual.read.tolist()) == [0.0, 0.0, 1.0]
        assert residual.spread.tolist() == [1.0] * N
        assert torch.equal(residual.mix.view(N, N), torch.eye(N))


def test_how_the_learned_parts_start():
    dynamic = DynamicHyperConnections(N).wrap(sites()[0], NORM)
    assert (dynamic.mix_size.item(), dynamic.spread_size.item()) == (pytest.approx(0.01), pytest.approx(0.01))
    assert not dynamic.map.any()
    for k, site in enumerate(sites()):
        residual = MHC(N).wrap(site, NORM)
        assert residual.size.tolist() == pytest.approx([0.01] * 3)
        read, spread, mix = residual.maps(torch.randn(N, WIDTH))
        assert read.argmax().item() == k % N
        torch.testing.assert_close(spread, torch.ones(N))
        assert mix.diagonal().min() > 0.999


def test_parameters_of_a_sublayer():
    count = lambda placement: sum(p.numel() for p in placement.wrap(sites()[0], NORM).parameters())  # noqa: E731
    assert count(HyperConnections(N)) == N * (N + 2) + WIDTH
    assert count(DynamicHyperConnections(N)) == N * (N + 2) + WIDTH + (WIDTH + WIDTH * (N + 2) + 2)
    assert count(MHC(N)) == WIDTH + N * (N + 2) * (N * WIDTH + 1) + 3


@pytest.mark.parametrize("cls", [HyperConnections, DynamicHyperConnections, MHC])
def test_streams_do_not_stay_equal(cls):
    """Equal at the start, and no symmetry that would keep them so: a few steps of gradient descent tell them apart."""
    torch.manual_seed(0)
    placement, target = cls(N), torch.randn(5, WIDTH)
    residuals = nn.ModuleList(placement.wrap(site, NORM) for site in sites())
    leave = placement.exit(WIDTH, NORM)
    start, weights = torch.randn(5, WIDTH), torch.randn(8, WIDTH, WIDTH) / math.sqrt(WIDTH)
    optimizer = torch.optim.SGD(residuals.parameters(), lr=0.1)
    for step in range(6):
        h = placement.entry(WIDTH, NORM)(start)
        for residual, weight in zip(residuals, weights, strict=True):
            h = residual(h, lambda x, w=weight: torch.relu(x @ w))
        spread = (h - h.mean(-2, keepdim=True)).norm() / h.norm()
        if step == 0:
            assert spread < 1e-6
        optimizer.zero_grad()
        (leave(h) - target).square().mean().backward()
        optimizer.step()
    assert spread > 1e-4


@pytest.mark.parametrize(("block_size", "kept"), [(1, 9), (2, 5), (3, 4), (8, 2)])
def test_blocks_of_attention_residuals_are_summed(block_size, kept):
    """Newest first; with zero queries a sublayer sees the mean, here of what a branch that ignores it has written."""
    placement, x = AttentionResiduals(block_size), torch.randn(5, WIDTH)
    written, outputs = placement.entry(WIDTH, NORM)(x), []
    for site in sites():
        outputs.append(torch.randn(5, WIDTH))
        written = placement.wrap(site, NORM)(written, lambda _: outputs[-1])
    assert len(written) == kept
    assert torch.equal(written[-1], x)
    for i, block in enumerate(reversed(written[:-1])):
        torch.testing.assert_close(block, sum(outputs[i * block_size : (i + 1) * block_size]))
