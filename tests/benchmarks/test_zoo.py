"""The zoo: kinds can be built, copied and pickled, are the same for a seed, take steps, and are judged rightly."""

import copy
import io
import pickle

import pytest
import torch

from benchmarks.zoo.judging import Constant, best_constant, judge
from benchmarks.zoo.kinds import Learner, in_order
from benchmarks.zoo.losses import Affine, classes, classes_summed, squares
from benchmarks.zoo.nets import mlp
from benchmarks.zoo.running import run
from benchmarks.zoo.zoo import ALL, HEALTHY, SICK, select

BATCH = (torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 1]).repeat(16))


def test_is_large_enough_and_names_are_unique():
    assert len(HEALTHY) >= 45
    assert len(SICK) >= 25
    assert len({kind.name for kind in ALL}) == len(ALL)
    assert all(kind.outcome == "trains" for kind in HEALTHY)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_builds_copies_and_pickles(kind):
    module, data = kind.build(1)
    again, _ = kind.build(1)
    for one, two in zip(module.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    copy.deepcopy(module)
    pickle.dump(module, io.BytesIO())
    assert len(data) > 1


@pytest.mark.parametrize("name", ["decoder, pre-norm", "GAN", "physics-informed", "decoder, GradScaler", "CTC"])
def test_two_runs_of_a_seed_are_equal(name):
    (kind,) = select([name])
    first, second = run(kind, 1, 3), run(kind, 1, 3)
    assert first.error is None
    assert first.losses == second.losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_takes_two_steps(kind):
    done = run(kind, 1, 2)
    assert done.error is None
    assert 1 <= len(done.losses) <= 2


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (classes, 0.5623),  # the entropy of 3 : 1
        (classes_summed, 64 * 0.5623),
        (Affine(classes, 0.1, -2.0), 0.05623 - 2.0),
    ],
)
def test_the_best_constant_is_that_of_the_loss(loss, expected):
    assert best_constant(Learner(mlp(4, 2), loss), [BATCH]).loss == pytest.approx(expected, rel=1e-3)


def test_the_best_constant_of_squares_is_the_mean():
    targets = torch.tensor([[1.0], [3.0]])
    assert best_constant(Learner(mlp(4, 1), squares), [(torch.zeros(2, 4), targets)]).loss == pytest.approx(
        1.0, rel=1e-3
    )


@pytest.mark.parametrize(
    ("end", "outcome"),
    [(0.5, "trains"), (0.99, "dead"), (1.2, "dead"), (3.0, "diverged"), (float("nan"), "diverged")],
)
@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_a_run_is_judged_by_the_constant_at_any_scale(end, outcome, factor):
    losses = [factor * (end + 0.01 * (-1) ** n) for n in range(200)]
    assert judge(losses, Constant(factor, factor)) == outcome


def test_losses_are_undivided_under_accumulation():
    (kind,) = select(["accumulation of two batches"])
    assert run(kind, 0, 1).losses[0] == pytest.approx(2.3, abs=0.3)


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="No kind is called unicorn"):
        select(["unicorn"])


def test_batches_in_order_stay_as_they_are():
    assert list(in_order([1, 2, 3])) == [1, 2, 3]
