"""A stack of random ReLU sublayers around any placement, in float64: what the identities are checked on."""

import torch

from lightning_norms.model.norms import LayerNorm
from lightning_norms.model.placements.catalogue import designs
from lightning_norms.model.residual import Site

LAYERS, WIDTH = 4, 8
NORM = LayerNorm(eps=0.0)


def all_placements():
    """Every placement of the package with its defaults, by walking: a new one is under contract by itself."""
    return [cls() for cls in designs().values() if cls.__module__.startswith("lightning_norms.")]


def sites(width=WIDTH, layers=LAYERS, first=1, of=None):
    kinds = ("attention", "feed_forward")
    return [Site(kind, width, layer, of or layers, width) for layer in range(first, first + layers) for kind in kinds]


def random_start(normalised=False):
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x / x.square().mean(-1, keepdim=True).sqrt() if normalised else x


def run(placement, x, places=None, norm=NORM, scale=1.0, change=lambda residual: None, last=True):
    """Output and gradients (of the input and of every sublayer's weights) of the stack, entry to exit."""
    places = places or sites()
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(len(places), WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    x = x.clone().requires_grad_()
    stream = placement.entry(WIDTH, norm).double()(x)
    for weight, site in zip(weights, places, strict=True):
        residual = placement.wrap(site, norm).double()
        change(residual)
        stream = residual(stream, lambda h, w=weight: scale * torch.relu(h @ w))
    out = placement.exit(WIDTH, norm).double()(stream) if last else stream
    read = out if isinstance(out, torch.Tensor) else out[0]
    readout = torch.randn(read.shape, generator=generator, dtype=torch.float64)
    (read * readout).sum().backward()
    return read.detach(), x.grad, weights.grad


def assert_same(one, other):
    """Forward and both gradients to 1e-12."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert one[1].abs().max() > 1e-3
    assert one[2].abs().max() > 1e-3
