"""LRFallback in runs of every kind: what it does there, or the one sentence that refuses."""

import csv
import json
import logging
import pickle

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.learning_rate import factors_of
from tests.callbacks.fallback_runs import (
    RESUMING,
    Faulty,
    Learner,
    Watch,
    assert_same,
    everything,
    fit,
    what,
)
from tests.callbacks.test_warmup import Memory
from tests.stand_ins import trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING]


class Manual(Learner):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("precision", ["32", "16", "16 fused"])
def test_manual_optimization(precision, tmp_path):
    """A skip and a rollback, as exact as in automatic optimization."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    options = {} if precision == "32" else {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    module = Manual({20: "huge", **dict.fromkeys(range(30, 34), "huge")}, fused="fused" in precision)
    watch, fallback = Watch(20, 27, 33), LRFallback(snapshot_every_n_steps=9)
    fit(tmp_path, module, watch, fallback=fallback, steps=40, **options)
    assert what(fallback) == [(20, "spike", "skip"), (30, "spike", "skip"), (33, "divergence", "rollback")]
    assert_same(watch.before[20], watch.after[20])
    assert_same(watch.before[27], watch.after[33])  # snapshots at 0, 9, 18, 27


def two(module):
    return [torch.optim.SGD(module.parameters(), lr=0.1), torch.optim.AdamW(module.parameters())]


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Only by its name."""

    strategy_name = "fake"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "two",
            r"LRFallback needs a loss for its optimizer, .* with several \(SGD, AdamW\): leave it out of this run.",
        ),
        ("lbfgs", "LRFallback cannot judge LBFGS, which evaluates several losses inside one step."),
        ("deepspeed", "LRFallback cannot act under DeepSpeed, which keeps gradients and steps to itself."),
    ],
)
def test_what_cannot_be_watched_is_refused_before_it_trains(kind, sentence, tmp_path):
    """Acceptance 10: one sentence, and no step was taken."""
    module = (Manual if kind == "two" else Learner)()
    module.configure_optimizers = {
        "two": lambda: two(module),
        "lbfgs": lambda: torch.optim.LBFGS(module.parameters()),
        "deepspeed": lambda: torch.optim.AdamW(module.parameters()),
    }[kind]
    options = {"strategy": DeepSpeedStrategy(device=torch.device("cpu"))} if kind == "deepspeed" else {}
    options = options | ({"accelerator": "auto"} if options else {})
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        fit(tmp_path, module, steps=3, **options)
    assert module.losses == []


def test_no_optimizer_at_all(tmp_path):
    """Nothing to watch, nothing to say."""
    module = Learner()
    module.configure_optimizers = lambda: None
    with pytest.warns(UserWarning, match="no optimizer"):
        assert fit(tmp_path, module, steps=-1, max_epochs=1).events == []


def test_fit_twice_starts_over_and_leaves_the_optimizer_alone(tmp_path):
    """One callback in two fits: the second counts from zero, and no factor or hook is left behind."""
    fallback = LRFallback(max_skips=0)
    for _ in range(2):
        module = Learner({5: "nan"})
        fit(tmp_path, module, fallback=fallback, steps=8)
        assert what(fallback) == [(5, "non_finite", "rollback")]
        assert (fallback.rescue.ladder.factor, fallback.rescue.state.steps) == (0.5, 8)
        optimizer = module.trainer.optimizers[0]
        assert not optimizer._optimizer_step_pre_hooks
        assert [group["lr"] for group in optimizer.param_groups] == [0.01]


def test_a_checkpoint_that_is_saved_after_fit_holds_the_state(tmp_path):
    """Also without a ModelCheckpoint."""
    fallback = LRFallback(max_skips=0)
    module = Learner({5: "nan"})
    run = trainer(tmp_path, fallback, max_steps=8)
    run.fit(module)
    run.save_checkpoint(tmp_path / "after.ckpt")
    again = fit(tmp_path, Learner(), fallback=LRFallback(), steps=9, ckpt_path=tmp_path / "after.ckpt")
    assert (again.rescue.ladder.rollbacks, again.rescue.ladder.factor, again.rescue.state.steps) == (1, 0.5, 9)


def test_pickle_before_during_and_after(tmp_path):
    """The copy holds the plain state: counts, factor, events."""

    class Pickle(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.copy = pickle.loads(pickle.dumps(trainer.callbacks[0]))

    assert pickle.loads(pickle.dumps(LRFallback(cut=0.3))).rescue.ladder.limits.cut == 0.3
    fallback, during = LRFallback(max_skips=0), Pickle()
    module = Faulty()  # Lightning hangs the module's log method on callbacks, so it is pickled too
    module.bad = (5,)
    fit(tmp_path, module, during, fallback=fallback, steps=8)
    for copy in (during.copy, pickle.loads(pickle.dumps(fallback))):
        assert what(copy) == [(5, "non_finite", "rollback")]
        assert copy.state_dict()["ladder"] == fallback.state_dict()["ladder"]
        start = {entry["name"] for entry in copy.state_dict()["start"]["entries"] if entry["kind"] == "parameter"}
        assert start == dict(module.named_parameters()).keys()
    assert fit(tmp_path, Learner(), fallback=during.copy, steps=3).events == []


def test_a_dry_run_changes_nothing_and_reports_each_incident_once(tmp_path):
    """One high loss and seven in a row are two events; weights are bit for bit those without the callback."""
    faults = {20: "huge", **dict.fromkeys(range(30, 37), "huge")}
    plain, watched = Learner(faults), Learner(faults)
    trainer(tmp_path, max_steps=60).fit(plain)
    fallback = fit(tmp_path, watched, fallback=LRFallback(dry_run=True), steps=60)
    assert what(fallback) == [(20, "spike", "report"), (30, "spike", "report")]
    assert_same(dict(plain.named_parameters()), dict(watched.named_parameters()))
    assert (fallback.rescue.ladder.factor, fallback.rescue.ladder.skips) == (1.0, 0)
    assert fallback.state_dict()["start"] is None


@pytest.mark.parametrize(
    ("off", "actions"),
    [
        ({"max_skips": 0}, ["rollback"]),
        ({"max_skips": 0, "max_rollbacks": 0}, ["restart"]),
        ({"max_skips": 0, "max_rollbacks": 0, "restart_within": 0}, ["stop"]),
        ({"max_skips": 0, "max_rollbacks": 0, "max_restarts": 0}, ["stop"]),
    ],
)
def test_a_rung_can_be_turned_off(off, actions, tmp_path):
    """0 turns it off, and the next one is taken."""
    fallback = LRFallback(**off)
    if actions == ["stop"]:
        with pytest.raises(FallbackExhaustedError):
            fit(tmp_path, Learner({5: "nan"}), fallback=fallback, steps=8)
    else:
        fit(tmp_path, Learner({5: "nan"}), fallback=fallback, steps=8)
    assert [action for *_, action in what(fallback)] == actions


# What it leaves behind.


def test_events_on_disk_without_a_logger(tmp_path):
    """One line an event, each number in it plain."""
    fit(tmp_path, Learner({5: "nan", 30: "huge"}), steps=32)
    first, second = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert first == {
        "step": 5,
        "cause": "non_finite",
        "action": "skip",
        "evidence": {"loss": "nan", "grad_norm": "nan"},
        "factor": 1.0,
        "message": "LRFallback, step 5: non_finite: loss unknown, gradient norm nan; the step is skipped.",
    }
    assert second["evidence"]["loss"] > second["evidence"]["limit"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl"]


def test_csv_logger(tmp_path):
    """Counts, factor and spike score in its table, the events beside it; steps never go back."""
    logger = CSVLogger(tmp_path, name="run", version="0")
    fit(tmp_path, Learner({5: "nan", 9: "nan"}), fallback=LRFallback(max_skips=0), logger=logger, steps=20)
    rows = list(csv.DictReader((tmp_path / "run/0/metrics.csv").read_text().splitlines()))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps)
    assert (rows[0]["fallback/rollbacks"], rows[-1]["fallback/rollbacks"]) == ("0.0", "2.0")
    assert (rows[0]["fallback/factor"], rows[-1]["fallback/factor"]) == ("1.0", "0.25")
    assert {"fallback/skips", "fallback/restarts", "spike_score/loss", "spike_score/grad_norm"} <= rows[0].keys()
    assert len((tmp_path / "run/0/events.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_logged_steps_never_go_back(accumulate, tmp_path):
    """An event is logged at once, between two logging intervals, at the number of its step."""
    logger = Memory()
    options = {"logger": logger, "log_every_n_steps": 4, "accumulate_grad_batches": accumulate}
    fit(tmp_path, Learner({6: "nan", 11: "nan"}), fallback=LRFallback(max_skips=0), steps=16, **options)
    steps = [step for step, _ in logger.rows]
    assert steps == sorted(steps)
    rollbacks = logger.of("fallback/rollbacks")
    assert [step for step, _ in rollbacks] == [3, 6, 7, 11, 11, 15]
    assert [count for _, count in rollbacks] == [0, 1, 1, 2, 2, 2]


def test_one_line_on_the_console_for_each_event(tmp_path, caplog):
    """In plain words, with its step, its numbers and what is done about it."""
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fallback = fit(tmp_path, Learner({5: "nan", 9: "nan"}), steps=12)
    lines = [record.getMessage() for record in caplog.records if "LRFallback, step" in record.getMessage()]
    assert lines == [event.message for event in fallback.events]
    assert len(lines) == 2


def test_one_device_needs_no_process_group(tmp_path):
    """Case 28 with devices=1."""
    fit(tmp_path, Learner({5: "nan"}), steps=8)
    assert not torch.distributed.is_initialized()


def test_other_distribution_of_lightning(tmp_path):
    """A skip and a rollback in pytorch_lightning's own Trainer."""
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            bad = self.trainer.global_step in (5, 9, 10)
            return (self.layer(batch).square().mean() + 1) * (float("nan") if bad else 1)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    fallback = LRFallback(max_skips=1)
    other.Trainer(
        accelerator="cpu", devices=1, max_steps=14, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[fallback], default_root_dir=tmp_path,
    ).fit(Other(), torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2))  # fmt: skip
    assert what(fallback) == [
        (5, "non_finite", "skip"), (9, "non_finite", "skip"), (10, "non_finite", "rollback")
    ]  # fmt: skip


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_leaves_the_schedulers_rate(error, tmp_path):
    """Half at step 3, and somebody's error at step 6: the optimizer holds the planned rate, and no factor is left."""

    class Fails(Learner):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 6:
                raise error
            return super().training_step(batch, batch_idx)

    module, fallback = Fails({3: "nan"}), LRFallback(max_skips=0)
    with pytest.raises((error, SystemExit)):
        fit(tmp_path, module, fallback=fallback, steps=9)
    optimizer = module.trainer.optimizers[0]
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert factors_of(optimizer).names() == ()
    assert fallback.state_dict()["ladder"]["rollbacks"] == 1
    assert everything(module.trainer, module)
