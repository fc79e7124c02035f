"""Lightning's own callbacks beside the four, before them and behind them: nobody's numbers change."""

import json
import math

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
)

from lightning_norms.callbacks.lr_fallback import LRFallback
from tests.callbacks.fallback_runs import RESUMING, assert_same, lessons, what
from tests.callbacks.test_lr_fallback_resume import ByStep
from tests.callbacks.test_warmup import Memory, SaveAt
from tests.combinations.four import (
    BASE,
    Taken,
    assert_norms,
    assert_rates,
    assert_rescaled,
    learner,
    run,
    warm,
    weights,
)
from tests.stand_ins import Decoder, lightning_callback, seeded, trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in (*RESUMING, "The dirpath has changed")]
JUMP = [(20, "divergence", "rollback")]


def step_by_step(faults=()):
    """As ``learner``, with batches that are looked up by the step."""
    return ByStep(faults, decoder=seeded(lambda: Decoder(3)), learning_rate=BASE, optimizer=Taken)


def around(folder, module, other, order, first=(), last=(), **options):
    """The four with ``other`` before them (order -1) or behind them (1), and others before and behind all."""
    before, behind = ([other], []) if order < 0 else ([], [other])
    return run(folder, module, *behind, *last, before=[*first, *before], **options)


def assert_as_alone(four, module, before, steps=24):
    """Learning rates, norms, event and rescale as if nobody else were there."""
    assert what(four.fallback) == JUMP
    assert_rates(module.trainer.optimizers[0].trace, [warm(step, cut_at=20) for step in range(steps - 1)])
    assert_norms(four.monitor, four.naive.norms)
    assert_rescaled(before, four.naive.start)


class Path(Callback):
    """The weights after every step, before anybody averages them."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights.append(weights(pl_module))

    def on_train_epoch_start(self, trainer, pl_module):
        self.weights.append(None)  # where an epoch begins


def mean_of(all_weights, decay=None):
    """The uniform average, or the exponential one, of some weights: by hand."""
    average = {name: each.double() for name, each in all_weights[0].items()}
    for number, each in enumerate(all_weights[1:], start=1):
        share = 1 / (number + 1) if decay is None else 1 - decay
        average = {name: value + share * (each[name].double() - value) for name, value in average.items()}
    return average


def assert_close(module, average):
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.double(), average[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_weight_averaging(decay, order, tmp_path):
    """A run without a fault: the end weights are the average, by hand, over the steps of a rescaled and warmed run."""
    arguments = {} if decay is None else {"decay": decay}
    other = lightning_callback("EMAWeightAveraging" if arguments else "WeightAveraging")(**arguments)
    module, path = learner(), Path()
    four = around(tmp_path, module, other, order, max_steps=16, first=[path])
    assert what(four.fallback) == []
    assert_rates(module.trainer.optimizers[0].trace, [warm(step) for step in range(16)])
    assert_norms(four.monitor, four.naive.norms)
    assert_close(module, mean_of([each for each in path.weights if each], decay))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("at", [8, 22])
def test_weight_averaging_resumed(at, order, tmp_path):
    """Saved before or after a rollback: the averaged end weights equal those of the uninterrupted run bit for bit."""
    average = lightning_callback("EMAWeightAveraging")
    straight, resumed = step_by_step({20: "huge"}), step_by_step({20: "huge"})
    four = around(tmp_path, straight, average(decay=0.9), order, last=[SaveAt(tmp_path, at)])
    assert what(four.fallback) == JUMP
    again = around(tmp_path, resumed, average(decay=0.9), order, ckpt_path=tmp_path / f"{at}.ckpt")
    assert what(again.fallback) == JUMP
    assert_same(weights(straight), weights(resumed))


@pytest.mark.parametrize("order", [1, -1])
def test_weights_that_are_not_finite_never_reach_an_average_in_a_file(order, tmp_path):
    """Spoilt by somebody else's hand after step 9: the file holds the snapshot of step 6, and the average of then."""

    class Spoil(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 10:
                pl_module.decoder.head.weight.data[0, 0] = math.nan
                trainer.save_checkpoint(tmp_path / "10.ckpt")

    ema, path = lightning_callback("EMAWeightAveraging")(decay=0.9), Path()
    four = around(tmp_path, learner(), ema, order, first=[path, Spoil()], max_steps=12)
    assert [action for _, _, action in what(four.fallback)] == ["rollback"]
    saved = torch.load(tmp_path / "10.ckpt", weights_only=True)
    path = [each for each in path.weights if each]
    assert_same(saved["current_model_state"], path[5])
    # Before the fallback, the average has the step of the snapshot already; behind it, it has not.
    average = mean_of(path[: 6 if order < 0 else 5], 0.9)
    for name, each in saved["state_dict"].items():
        torch.testing.assert_close(each.double(), average[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("order", [1, -1])
def test_stochastic_weight_averaging(order, tmp_path):
    """Three epochs of 16, averaging from the second on: rates are those of SWALR x ours, the end is the mean."""
    plain = learner()
    swa = {"swa_lrs": 0.05, "swa_epoch_start": 2, "annealing_epochs": 2, "annealing_strategy": "linear"}
    length = {"max_steps": -1, "max_epochs": 3}
    trainer(tmp_path, StochasticWeightAveraging(**swa), **length).fit(plain)
    scheduled = [rate for (rate,) in plain.trainer.optimizers[0].trace]
    assert len(set(scheduled)) > 1
    module, path = learner(), Path()
    four = around(tmp_path, module, StochasticWeightAveraging(**swa), order, first=[path], **length)
    assert what(four.fallback) == []
    found = [rate for (rate,) in module.trainer.optimizers[0].trace]
    assert found == pytest.approx([rate * warm(step) for step, rate in enumerate(scheduled)], rel=1e-12)
    assert_norms(four.monitor, four.naive.norms)
    starts = [number for number, each in enumerate(path.weights) if each is None]
    assert_close(module, mean_of([path.weights[number - 1] for number in starts[1:]]))


class Logs(type(learner())):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("constant", 1.0)
        self.log("loss", loss)
        return loss


def logging_learner(faults=()):
    module = learner(faults)
    module.__class__ = Logs
    return module


@pytest.mark.parametrize("order", [1, -1])
def test_early_stopping(order, tmp_path):
    """A metric that stands still for two epochs ends the run after three of 16 steps; a NaN on the way does not."""
    stop = EarlyStopping("constant", patience=2, check_on_train_epoch_end=True)
    module, fallback = logging_learner({9: "nan"}), LRFallback()
    four = around(tmp_path, module, stop, order, fallback=fallback, max_steps=-1, max_epochs=9)
    assert module.trainer.global_step == 48
    assert what(fallback) == [(9, "non_finite", "skip")]
    assert_rates(module.trainer.optimizers[0].trace, [warm(step) for step in range(47)])
    assert_norms(four.monitor, four.naive.norms)


class Tunable(type(learner())):
    learning_rate, batch_size = BASE, 8

    def configure_optimizers(self):
        return Taken(self.parameters(), lr=self.learning_rate)

    def train_dataloader(self):
        return lessons(batches=64 // self.batch_size, batch_size=self.batch_size)


def tunable(faults=()):
    module = learner(faults)
    module.__class__ = Tunable
    return module


@pytest.mark.parametrize("order", [1, -1])
def test_learning_rate_finder(order, tmp_path):
    """It finds what it finds without us, the warmup multiplies that, and the writers are scaled after it."""
    alone, beside = (LearningRateFinder(num_training_steps=30, min_lr=1e-3) for _ in range(2))
    options = {"max_steps": 12, "enable_checkpointing": True}
    trainer(tmp_path / "alone", alone, **options).fit(tunable())
    module = tunable()
    before = weights(module)
    four = around(tmp_path, module, beside, order, **options)
    assert beside.optimal_lr.results == alone.optimal_lr.results
    found = alone.optimal_lr.suggestion()
    assert module.learning_rate == found
    trace = [rate for (rate,) in module.trainer.optimizers[0].trace[-12:]]
    assert trace == pytest.approx([found * warm(step) for step in range(12)])
    assert_rescaled(before, four.naive.start)
    assert_norms(four.monitor, four.naive.norms)
    assert (four.fallback.rescue.state.steps, what(four.fallback)) == (12, [])


@pytest.mark.parametrize("order", [1, -1])
def test_batch_size_finder(order, tmp_path):
    """Two doublings of 4 make 16, so four batches an epoch; its trial steps are not counted by any of us."""
    finder = BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=3)
    module = tunable()
    before = weights(module)
    four = around(tmp_path, module, finder, order, max_steps=12, enable_checkpointing=True)
    assert finder.optimal_batch_size == module.batch_size == 16
    assert module.trainer.num_training_batches == 4
    optimizer = module.trainer.optimizers[0]
    assert optimizer.trace[:-12] == [[BASE]] * 6  # Lightning's trials, by the same optimizer
    assert_rates(optimizer.trace[-12:], [warm(step) for step in range(12)])
    assert_rescaled(before, four.naive.start)
    assert_norms(four.monitor, four.naive.norms)
    assert (four.fallback.rescue.state.steps, what(four.fallback)) == (12, [])


@pytest.mark.filterwarnings("ignore:.*was called without a model.*", "ignore:.*there is no last checkpoint available.*")
@pytest.mark.parametrize("order", [1, -1])
def test_checkpoint_of_an_exception(order, tmp_path):
    """Somebody's error at step 22: the file goes on as the uninterrupted run does, rates, norms and event included."""

    class Fails(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 22:
                raise ZeroDivisionError

    straight, resumed = step_by_step({20: "huge"}), step_by_step({20: "huge"})
    whole = run(tmp_path, straight, max_steps=28)
    options = {"max_steps": 28, "enable_checkpointing": True}
    module, save = step_by_step({20: "huge"}), OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ZeroDivisionError):
        around(tmp_path, module, save, order, first=[Fails()], **options)
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert [group["lr"] for group in saved["optimizer_states"][0]["param_groups"]] == [BASE]
    again = run(tmp_path, resumed, ckpt_path=tmp_path / "on_exception.ckpt", max_steps=28)
    assert what(again.fallback) == JUMP
    assert_same(weights(straight), weights(resumed))
    assert resumed.trainer.optimizers[0].trace == straight.trainer.optimizers[0].trace[21:]
    assert torch.equal(again.monitor.history.state_dict()["values"], whole.monitor.history.state_dict()["values"])


@pytest.mark.parametrize("order", [1, -1])
def test_spike_detection(order, tmp_path):
    """It ends a run at a spike, we save it: both act on the same batch. With the finite range set wide, only we do."""
    module = learner({20: "huge"})
    before = weights(module)
    four = around(tmp_path, module, SpikeDetection(rtol=1e6), order)
    assert_as_alone(four, module, before)
    module = learner({20: "huge"})
    fallback = LRFallback(max_skips=0, snapshot_every_n_steps=6)
    with pytest.raises(TrainingSpikeException, match="Training spike detected in batch 4"):
        around(tmp_path / "stopped", module, SpikeDetection(), order, fallback=fallback)
    (line,) = (tmp_path / "stopped" / "events.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["action"]) == (20, "rollback")
    assert [group["lr"] for group in module.trainer.optimizers[0].param_groups] == [BASE]


@pytest.mark.parametrize("order", [1, -1])
def test_learning_rate_monitor(order, tmp_path):
    """Behind Warmup it shows the effective rate, cut included, and before it the scheduler's; nothing else changes."""
    module, logger = learner({20: "huge"}), Memory()
    before = weights(module)
    four = around(tmp_path, module, LearningRateMonitor(), order, logger=logger, max_steps=26)
    assert_as_alone(four, module, before, steps=26)
    shown = dict(logger.of("lr-Taken"))
    used = [BASE * warm(step) for step in range(21)] + [BASE / 2] * 5
    assert [shown[step] for step in range(26)] == pytest.approx(used if order > 0 else [BASE] * 26)


@pytest.mark.parametrize("order", [1, -1])
def test_model_checkpoint(order, tmp_path):
    """Lightning moves it to the end, whatever the order; every file of a run with a rollback goes on bit for bit."""
    straight = step_by_step({20: "huge"})

    def save(folder):
        return ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=7, save_top_k=-1)

    before = weights(straight)
    four = around(tmp_path, straight, save("straight"), order, enable_checkpointing=True)
    assert_as_alone(four, straight, before)
    for at in (7, 14, 21):
        resumed = step_by_step({20: "huge"})
        options = {"ckpt_path": tmp_path / f"straight/step={at}.ckpt", "enable_checkpointing": True}
        again = around(tmp_path, resumed, save(f"from {at}"), order, **options)
        assert_same(weights(straight), weights(resumed))
        assert what(again.fallback) == JUMP
        assert again.rescale.state_dict()["rescaled"]
        assert again.monitor.history.steps == list(range(24))
