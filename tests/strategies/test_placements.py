"""AfterStep, AdminProfile and UnitMatrices on two ranks: as on one, or refused in a sentence."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_norms.anatomy.sharding import parts_with
from tests.strategies import placements
from tests.strategies.launch import launch


@functools.cache
def ran(kind):
    folder = Path(tempfile.mkdtemp(prefix=f"placements_{kind}_"))
    launch(folder, "tests.strategies.placements", kind, folder)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@functools.cache
def single(name):
    return placements.run("single", name, Path(tempfile.mkdtemp()))


@pytest.mark.slow
@pytest.mark.parametrize("name", placements.CASES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_as_one_process(kind, name):
    expected = single(name)
    for run in (each[name] for each in ran(kind)):
        assert run["state"].keys() == expected["state"].keys()
        assert run["state"].get("omegas", []) == pytest.approx(expected["state"].get("omegas", []), rel=1e-5)
        for part in ("start", "end", "buffers"):
            for one, other in zip(run[part], expected[part], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "admin",
            "AdminProfile: FSDP1 keeps the weights elsewhere, so omegas cannot be set here: train with ddp or FSDP2",
        ),
        ("unit", "UnitMatrices: FSDP1 keeps the weights in flat pieces, where a matrix has no rows: train with ddp or"),
    ],
)
def test_fsdp1_is_refused_where_it_has_no_matrices(name, sentence):
    for run in ran("fsdp1"):
        assert run[name]["refusal"].startswith(sentence)


@pytest.mark.slow
def test_after_step_under_fsdp1():
    for run in (each["after_step"] for each in ran("fsdp1")):
        for one, other in zip(run["buffers"], single("after_step")["buffers"], strict=True):
            assert torch.equal(one, other)


def test_a_wrapper_is_no_second_part():
    """It forwards every attribute, so its part would be told twice that a step was taken."""

    class Clock(nn.Module):
        def after_step(self):
            raise NotImplementedError

    clock = Clock()
    wrapped = nn.Sequential(checkpoint_wrapper(clock), torch.compile(clock, backend="eager"))
    assert parts_with(wrapped, "after_step") == [clock]
