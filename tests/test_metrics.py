"""BitsPerByte: exact sums on devices that have no float64."""

import math

import pytest
import torch

from lightning_norms.metrics import BitsPerByte


def test_no_state_is_float64():
    """Apple GPUs refuse to hold one: moving the metric there would raise."""
    metric = BitsPerByte()
    metric.update(torch.tensor(2.0), torch.tensor(3))
    states = [getattr(metric, name) for name in metric._defaults]
    assert {state.dtype for state in states} == {torch.float32, torch.int64}
    assert metric.compute().dtype == torch.float32


def test_many_small_batches_after_a_large_one_count():
    """In plain float32 the sum would stand still at 2e7: each 0.3 is below half of its last digit."""
    metric = BitsPerByte()
    batches = [2.0e7] + [0.3] * 20_000
    for nats in batches:
        metric.update(torch.tensor(nats), torch.tensor(1000))
    exact = math.fsum(batches) / (math.log(2) * 1000 * len(batches))
    assert metric.compute().item() == pytest.approx(exact, rel=1e-7)
    metric.reset()
    metric.update(torch.tensor(1.0), torch.tensor(1))
    assert metric.compute().item() == pytest.approx(1 / math.log(2), rel=1e-7)
