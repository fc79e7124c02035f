"""Before the first step, on small networks: what benchmarks/init_profiles.py prints for all of them at d=128."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from lightning_norms.model.attention import QKNorm
from lightning_norms.model.norms import LayerNorm
from lightning_norms.placements import KEEL, BeamNorm, DeepNorm, OutputNorm, PeriNorm, PostNorm, PreNorm

SPEC = importlib.util.spec_from_file_location(
    "init_profiles", Path(__file__).parents[3] / "benchmarks" / "init_profiles.py"
)
profiles = importlib.util.module_from_spec(SPEC)
sys.modules["init_profiles"] = profiles  # dataclasses look for their module there
SPEC.loader.exec_module(profiles)


def starts(placement, depths=(4, 12, 24), **options):
    return {depth: [profiles.start(placement, depth, seed, width=64, **options) for seed in (0, 1)] for depth in depths}


def mean(rows):
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def last(by_depth):
    return [profiles.geometric(s.gradients[-1] for s in each) for each in by_depth.values()]


def test_xiongs_lemma_2():
    """An expectation over weights: means over seeds."""
    post, pre = (
        mean(profiles.lemma_2(p, layers=12, width=64, seed=s) for s in range(5)) for p in (PostNorm(), PreNorm())
    )
    assert sum(post) / 12 == pytest.approx(1.5, abs=0.05)
    assert post == pytest.approx([1.5] * 12, abs=0.2)
    assert len(pre) == 12
    for layer, value in enumerate(pre, start=1):
        assert 1 + layer / 2 <= value <= 1 + 3 * layer / 2


def test_last_gradient_is_constant_for_postnorm_and_falls_for_prenorm():
    """Theorem 1: bounds that go with L^0 and L^(-1/2)."""
    depths = (4, 12, 24)
    assert profiles.exponent(depths, last(starts(PostNorm()))) == pytest.approx(0.0, abs=0.15)
    assert profiles.exponent(depths, last(starts(PreNorm()))) == pytest.approx(-0.5, abs=0.15)
    assert profiles.exponent(depths, last(starts(KEEL()))) == pytest.approx(-1.0, abs=0.15)


@pytest.mark.parametrize(
    ("placement", "rms"),
    [(PostNorm(), 1.0), (DeepNorm(), 1.0), (KEEL(), 1.0), (BeamNorm(), 1.0), (PeriNorm(), 49**0.5)],
    ids=repr,
)
def test_size_of_the_stream(placement, rms):
    """Sandwiches add 1 to the variance a sublayer: sqrt(1 + 2L)."""
    assert profiles.start(placement, 24, 0, width=64).rms == pytest.approx(rms, rel=0.1)


def test_prenorm_is_largest_at_the_bottom_and_output_norm_needs_qk_norm():
    ratio = lambda s: s.gradients[-1] / s.gradients[0]  # noqa: E731
    assert 0.1 < ratio(profiles.start(PreNorm(), 24, 0, width=64)) < 0.5
    assert 0.05 < ratio(profiles.start(OutputNorm(), 24, 0, width=64, qk_norm=QKNorm())) < 0.5
    with pytest.warns(UserWarning, match="qk_norm"):
        assert ratio(profiles.start(OutputNorm(), 24, 0, width=64, qk_norm=None)) < 0.05


@pytest.mark.parametrize("sigma", [0.02, 0.5, 2.0, 10.0])
def test_the_jacobian_of_a_norm_is_one_over_the_size_of_its_input(sigma):
    x = torch.randn(64, dtype=torch.float64)
    x = sigma * (x - x.mean()) / x.std(correction=0)
    jacobian = torch.autograd.functional.jacobian(LayerNorm(eps=0.0)(64).double(), x)
    assert torch.linalg.matrix_norm(jacobian, 2).item() == pytest.approx(1 / sigma, rel=1e-9)
