import math

import pytest
import torch
from torch import nn

from lightning_norms.anatomy.stacks import find_stacks
from lightning_norms.measuring.norms_by_group import GroupNorms, total_norm, update_ratio
from lightning_norms.measuring.stream import StreamMeter, mean_square, stream_of
from tests.stand_ins import Decoder, loader, seeded


def with_gradients(decoder):
    decoder(next(iter(loader()))[0]).square().mean().backward()
    return decoder


def naive(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def test_norms_equal_a_loop_over_parameters_and_add_up():
    decoder = with_gradients(seeded(Decoder))
    named = list(decoder.named_parameters())
    norms = GroupNorms([p for _, p in named], [name.split(".")[0] for name, _ in named])
    measured = norms.of(norms.gradients())
    assert norms.groups == ("embedding", "blocks", "exit", "head")
    for group, value in zip(norms.groups, measured.tolist(), strict=True):
        assert value == pytest.approx(naive([p.grad for name, p in named if name.startswith(group)]), rel=1e-6)
    assert total_norm(measured).item() == pytest.approx(naive([p.grad for _, p in named]), rel=1e-6)
    assert total_norm(measured).item() == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for _, p in named]).item()
    )


def test_missing_and_empty_gradients_count_nothing():
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0))
    a.grad, b.grad = None, torch.ones(0)
    assert GroupNorms([a, b], ["x", "y"]).of([a.grad, b.grad]).tolist() == [0.0, 0.0]
    assert GroupNorms([], []).of([]).shape == (0,)


def test_half_precision_neither_overflows_nor_loses_digits():
    big = nn.Parameter(torch.full((64,), 60000.0, dtype=torch.float16))
    many = nn.Parameter(torch.full((4096,), 0.01, dtype=torch.bfloat16))
    double = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    norms = GroupNorms([big, many, double], ["a", "b", "a"])
    a, b = norms.of([big, many, double]).tolist()
    assert a == pytest.approx(480000.0, rel=1e-3)
    assert b == pytest.approx(many[0].item() * 64, rel=1e-6)


def test_sparse_gradient_of_a_row_used_twice():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert embedding.weight.grad.layout == torch.sparse_coo
    measured = GroupNorms([embedding.weight], ["embedding"]).of([embedding.weight.grad]).item()
    assert measured == pytest.approx(math.sqrt(2 * 4 + 2 * 1))


def test_non_finite_gradients_show():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])
    first, second = GroupNorms(parameters, ["a", "b"]).of([each.grad for each in parameters]).tolist()
    assert math.isnan(first)
    assert second == math.inf


def test_update_ratio():
    assert update_ratio(torch.tensor([0.1, 1.0]), torch.tensor([2.0, 0.0])).tolist() == pytest.approx([0.05, math.inf])


@pytest.mark.parametrize(
    ("output", "measured"),
    [
        (torch.tensor([3.0, 4.0]), 12.5),
        ((torch.tensor([1.0, 1.0]), torch.tensor([9.0])), 1.0),
        (torch.full((4, 2, 3), 2.0), 4.0),
        ({"hidden": torch.tensor([2.0]), "cache": None}, 4.0),
        ((None, torch.tensor([1, 2]), torch.tensor([5.0])), 25.0),
    ],
)
def test_stream_of_tensor_tuple_stack_and_mapping(output, measured):
    assert mean_square(stream_of(output)).item() == measured


def test_no_stream():
    assert stream_of(None) is None
    assert stream_of(("text", 3)) is None


def test_mean_square_of_half_precision_does_not_overflow():
    assert mean_square(torch.full((8,), 300.0, dtype=torch.float16)).item() == 90000.0


def test_stream_meter_counts_one_training_pass_a_batch():
    decoder = seeded(Decoder)
    tokens = next(iter(loader()))[0]
    meter = StreamMeter(find_stacks(decoder))
    meter.attach()
    with torch.no_grad():
        decoder(tokens)
    assert meter.rms(meter.take(torch.device("cpu"))).tolist() == [-1.0, -1.0, -1.0]
    decoder(tokens)
    decoder(tokens * 0)  # a second pass in the same batch
    meter.detach()
    decoder(tokens * 0)
    expected, x = [], decoder.embedding(tokens)
    for block in decoder.blocks:
        x = block(x)
        expected.append(math.sqrt(x.square().mean().item()))
    assert meter.rms(meter.take(torch.device("cpu"))).tolist() == pytest.approx(expected, rel=1e-6)
    assert not any(block._forward_hooks for block in decoder.blocks)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_once(reentrant):
    decoder = seeded(Decoder)
    tokens = next(iter(loader()))[0]
    meter = StreamMeter(find_stacks(decoder))

    def run(checkpointed):
        meter.attach()
        x = decoder.embedding(tokens)
        for block in decoder.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        x.sum().backward()
        assert [len(squares) for squares in meter._squares.values()] == [1, 1, 1]
        return sorted(meter.rms(meter.take(torch.device("cpu"))).tolist())

    assert run(checkpointed=True) == run(checkpointed=False)


def test_norms_of_float64_gradients_are_float32():
    """64-true precision: the quick way for tensors of one kind must not mix dtypes."""
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    norms = GroupNorms([parameter], ["block_00"]).of([parameter.detach()])
    assert norms.tolist() == [5.0]
    assert norms.dtype is torch.float32


@pytest.mark.parametrize("size", [1e20, 1e37, 1.0, 1e-24, 1e-40])
def test_values_whose_squares_leave_float32(size):
    """Squares of 1e20 and of 1e-24 are infinite and 0 in float32; the norm of 64 of them is 8 times their size."""
    parameters = [nn.Parameter(torch.full((64,), size)), nn.Parameter(torch.full((8, 8), 2 * size))]
    norms = GroupNorms(parameters, ["a", "b"])
    assert norms.of(parameters).tolist() == pytest.approx([8 * size, 16 * size], rel=1e-5)
    wide = norms.wide_shares([parameters[0], None])
    assert wide.sqrt().tolist() == pytest.approx([8 * size, 0.0], rel=1e-5)


def test_what_is_infinite_at_any_size_stays_so():
    parameters = [nn.Parameter(torch.tensor([value, 1e20])) for value in (math.inf, math.nan, 1.0)]
    a, b, c = GroupNorms(parameters, ["a", "b", "c"]).wide_shares(parameters).sqrt().tolist()
    assert a == math.inf
    assert math.isnan(b)
    assert c == pytest.approx(1e20)
