"""Losses of a run of any length: bounded, read from the device in blocks, and the same after a resume."""

import copy
import pickle

import pytest
import torch

from lightning_norms.measuring.batch_history import BatchHistory, ThinnedSeries
from lightning_norms.measuring.spike_score import SpikeScore

CPU = torch.device("cpu")


def run(history, losses, weight=1):
    for loss in losses:
        history.start(CPU)
        history.end(CPU, torch.tensor(loss), weight)
    return history


def size(history):
    return len(pickle.dumps(history.state_dict()))


def test_state_of_a_hundred_thousand_batches_is_bounded():
    history = run(BatchHistory(limit=1000), [float(n) for n in range(100_000)])
    assert size(history) < 1.1 * size(run(BatchHistory(limit=1000), [0.0] * 1000))
    assert (history.losses.stride, history.losses.values) == (128, [128.0 * n for n in range(782)])
    assert history.spike_score() == 0.0  # a slope is no spike
    assert len(history.seconds.values) <= 1000


def test_the_device_is_read_once_a_block(monkeypatch):
    reads = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)
        read = lambda tensor, *args, _original=original: (reads.append(1), _original(tensor, *args))[1]  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, read)
    history = run(BatchHistory(), [1.0] * 1050)
    assert len(reads) == 10
    history.read()
    history.read()
    assert len(reads) == 11
    assert len(history.losses.values) == 1050


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_those_that_float_gives(dtype):
    losses = torch.randn(130, generator=torch.Generator().manual_seed(0)).to(dtype)
    history = BatchHistory()
    for loss in losses:
        history.start(CPU)
        history.end(CPU, loss, 3)
    history.read()
    score = SpikeScore()
    for loss in losses:
        score.update(float(loss) * 3)
    assert history.losses.values == [float(loss) * 3 for loss in losses]
    assert history.spike_score() == score.value()


def test_a_loss_that_is_written_over_later_was_read_in_time():
    history, loss = BatchHistory(), torch.tensor(1.0)
    for _ in range(3):
        history.start(CPU)
        history.end(CPU, loss, 1)
        loss += 1
    history.read()
    assert history.losses.values == [1.0, 2.0, 3.0]


def test_batches_without_a_loss_have_a_duration():
    history = BatchHistory()
    history.start(CPU)
    history.end(CPU, None, 1)
    history.read()
    assert (history.losses.values, len(history.seconds.values), history.spike_score()) == ([], 1, None)


@pytest.mark.parametrize("cut", [0, 99, 100, 137, 900])
def test_a_resumed_history_is_the_uninterrupted_one(cut):
    losses = [float(n % 7) + (50.0 if n == 333 else 0.0) for n in range(1000)]
    whole, resumed = run(BatchHistory(limit=64), losses), BatchHistory(limit=64)
    state = pickle.loads(pickle.dumps(run(BatchHistory(limit=64), losses[:cut]).state_dict()))
    before = copy.deepcopy(state["spikes"])
    resumed.load_state_dict(state)
    run(resumed, losses[cut:])
    assert state["spikes"] == before
    one, other = whole.state_dict(), resumed.state_dict()
    assert one["losses"] == other["losses"]
    assert one["spikes"] == other["spikes"]
    assert whole.spike_score() > 0


def test_thinning_keeps_the_first_and_equal_distances():
    series = ThinnedSeries(limit=8)
    for number in range(1000):
        series.add(float(number))
        assert len(series.values) <= 8
        assert series.values == [float(n) for n in range(0, number + 1, series.stride)]


def test_on_cuda_durations_are_events_that_are_read_with_the_losses(monkeypatch):
    clock, waits = iter(range(100, 10_000, 250)), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def synchronize(self):
            waits.append(self)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    history = BatchHistory()
    for _ in range(3):
        history.start(torch.device("cuda"))
        history.end(torch.device("cuda"), torch.tensor(1.0), 1)
    assert not waits
    history.read()
    assert history.seconds.values == [0.25] * 3
