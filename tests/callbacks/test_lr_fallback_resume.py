"""A resumed run is the uninterrupted one, whatever had happened; and what checkpoints hold."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_norms.callbacks.lr_fallback import FallbackExhaustedError, LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import RESUMING, Learner, assert_same, everything, fit, what
from tests.callbacks.test_warmup import SaveAt
from tests.rescue.event_file import steps
from tests.stand_ins import trainer

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING),
    pytest.mark.filterwarnings("ignore:Warmup takes .* optimizer steps, but"),
]
STEPS = 36
SKIP, BACK = {"max_skips": 3}, {"max_skips": 0}
AGAIN = {"max_skips": 0, "max_rollbacks": 0, "restart_warmup_steps": 6}
STORIES = {
    "no event": ({}, SKIP, 0),
    "skip": ({13: "huge"}, SKIP, 1),
    "two skips": ({13: "huge", 23: "nan"}, SKIP, 2),
    "rollback": ({13: "huge"}, BACK, 1),
    "two rollbacks": ({13: "nan", 23: "nan"}, BACK, 2),
    "restart": ({13: "nan"}, AGAIN, 1),
    "two restarts": ({13: "nan", 23: "nan"}, AGAIN, 2),
    "rollback of a jump": (dict.fromkeys(range(13, 17), "huge"), SKIP, 2),
    "skip, rollback, skip": ({13: "nan", **dict.fromkeys(range(20, 24), "nan"), 30: "nan"}, SKIP, 4),
    "recovery": ({13: "nan"}, BACK | {"recovery_steps": 20}, 1),
}
POINTS = (8, 14, 18, 24)
"""Saved after so many steps: before, right after, between and after the events."""


class ByStep(Learner):
    """A plain DataLoader starts over on a resume, so the batch is looked up by the step."""

    def training_step(self, batch, batch_idx):
        lessons = self.train_dataloader().dataset[:][0].unflatten(0, (16, 8))
        return super().training_step([lessons[self.trainer.global_step % 16]], batch_idx)


def learner(faults):
    return ByStep(faults, weight_decay=0.1)


def callbacks(warmed):
    return [Warmup(LinearWarmup(10))] if warmed else []


@pytest.mark.parametrize(
    ("story", "warmed"), [*((story, False) for story in STORIES), ("two rollbacks", True), ("restart", True)]
)
def test_resumed_equals_uninterrupted(story, warmed, tmp_path):
    """Weights, moments, losses and events from every point on, bit for bit, with default safe loading."""
    faults, options, count = STORIES[story]
    straight = learner(faults)
    fallback = LRFallback(snapshot_every_n_steps=5, **options)
    fit(tmp_path, straight, *callbacks(warmed), SaveAt(tmp_path, *POINTS), fallback=fallback, steps=STEPS)
    assert len(fallback.events) == count
    for point in POINTS:
        resumed, again = learner(faults), LRFallback(snapshot_every_n_steps=5, **options)
        later = [each for each in POINTS if each > point]
        checkpoint = tmp_path / f"{point}.ckpt"
        more = (*callbacks(warmed), SaveAt(tmp_path / "again", *later))
        fit(tmp_path, resumed, *more, fallback=again, steps=STEPS, ckpt_path=checkpoint)
        assert_same(everything(resumed.trainer, resumed), everything(straight.trainer, straight))
        assert torch.equal(torch.stack(resumed.losses).nan_to_num(), torch.stack(straight.losses[point:]).nan_to_num())
        assert again.rescue.ladder.state_dict() == fallback.rescue.ladder.state_dict()
        assert repr(again.events) == repr(fallback.events)  # NaN is not equal to itself


def test_a_changed_argument_keeps_the_counts(tmp_path):
    """Cases 16 and 17: one skip, one rollback, and the rate still lowered, although other limits hold from now on."""
    fit(tmp_path, learner({5: "huge", 9: "nan"}), SaveAt(tmp_path, 12), fallback=LRFallback(max_skips=1), steps=13)
    fit(tmp_path, learner({}), SaveAt(tmp_path, 12), fallback=LRFallback(max_skips=0), steps=13)
    first = LRFallback(max_skips=0)
    fit(tmp_path, learner({5: "huge"}), SaveAt(tmp_path, 6), fallback=first, steps=8)
    again = LRFallback(cut=0.1, max_rollbacks=9, snapshot_every_n_steps=7)
    fit(tmp_path, learner({}), fallback=again, steps=8, ckpt_path=tmp_path / "6.ckpt")
    assert (again.rescue.ladder.rollbacks, again.rescue.ladder.factor, again.rescue.ladder.limits.cut) == (1, 0.5, 0.1)
    assert again.rescue.ladder.climb("divergence", ("rollback", "restart")) == "rollback"
    assert again.rescue.ladder.factor == pytest.approx(0.05)


def test_the_start_survives_a_resume(tmp_path):
    """A restart after the resume goes to the weights of step 0, not to those of the checkpoint."""
    fit(tmp_path, learner({}), SaveAt(tmp_path, 0, 10), steps=12)
    start = everything_at_start()
    module = learner({12: "nan"})
    again = fit(tmp_path, module, fallback=LRFallback(**AGAIN), steps=13, ckpt_path=tmp_path / "10.ckpt")
    assert what(again) == [(12, "non_finite", "restart")]
    assert all(torch.equal(value, start[name]) for name, value in module.named_parameters())


def everything_at_start():
    return {name: value.detach().clone() for name, value in learner({}).named_parameters()}


def test_the_start_is_let_go_in_time(tmp_path):
    """Kept for restart_within steps only: in memory and in checkpoints."""
    fallback = LRFallback(restart_within=5)
    fit(tmp_path, learner({}), SaveAt(tmp_path, 5, 7), fallback=fallback, steps=8)
    starts = [load(tmp_path / f"{step}.ckpt")["callbacks"]["LRFallback"]["start"] for step in (5, 7)]
    assert starts[0] is not None
    assert starts[1] is None


def load(path):
    return torch.load(path, weights_only=True)


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def is_finite(checkpoint):
    """Of the run and of the fallback; a ModelCheckpoint's own scores start at infinity."""
    parts = [checkpoint["state_dict"], checkpoint["optimizer_states"], checkpoint["callbacks"]["LRFallback"]]
    return all(bool(torch.isfinite(each).all()) for each in tensors(parts) if each.is_floating_point())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("options", [SKIP, BACK, AGAIN], ids=["skip", "rollback", "restart"])
def test_every_checkpoint_is_finite_and_knows_what_happened(options, order, tmp_path):
    """Case 33: written at every step, NaN at step 5, in both orders of the callbacks."""
    fallback = LRFallback(snapshot_every_n_steps=2, **options)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last=True, save_top_k=-1)
    module = learner({5: "nan"})
    run = trainer(tmp_path, *[fallback, save][::order], max_steps=9, enable_checkpointing=True)
    run.fit(module)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 10
    for file in files:
        assert is_finite(load(file))
    at, before = load(tmp_path / "step=6.ckpt"), load(tmp_path / "step=5.ckpt")
    start = everything_at_start()
    expected = start if options is AGAIN else before["state_dict"]  # a checkpoint is a snapshot point
    assert_same({name: at["state_dict"][name] for name in start}, {name: expected[name] for name in start})
    state = at["callbacks"]["LRFallback"]
    assert sum(state["ladder"][name] for name in ("skips", "rollbacks", "restarts")) == 1
    assert state["ladder"]["factor"] == (1.0 if options is SKIP else 0.5)
    assert [state["healthy"] for state in (load(f)["callbacks"]["LRFallback"] for f in files)].count(False) == 1


class Overflows(Callback):
    """Makes a weight NaN after these steps."""

    def __init__(self, *steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            pl_module.decoder.head.weight.data[0, 0] = float("nan")


@pytest.mark.parametrize("order", [1, -1])
def test_weights_that_are_not_finite_never_reach_a_file(order, tmp_path):
    """Case 33: the step itself overflows, and no loss has said so yet: the file has snapshot and raised counts."""

    fallback, warmup = LRFallback(), Warmup(LinearWarmup(3))
    save = (Overflows(6), SaveAt(tmp_path, 4, 6))
    trainer(tmp_path, *[fallback, warmup][::order], *save, max_steps=8).fit(learner({}))
    at, before = load(tmp_path / "6.ckpt"), load(tmp_path / "4.ckpt")
    assert_same(at["state_dict"], before["state_dict"])
    assert at["optimizer_states"][0]["state"][0]["step"] == 4
    assert at["callbacks"]["LRFallback"]["ladder"]["rollbacks"] == 1
    assert at["callbacks"]["LRFallback"]["ladder"]["factor"] == 0.5
    assert what(fallback) == [(5, "non_finite", "rollback")]


def test_such_weights_may_need_a_restart(tmp_path):
    """The file then has the start, an optimizer without state, and a warmup that begins anew."""
    fallback, save = LRFallback(max_rollbacks=0), (Overflows(6), SaveAt(tmp_path, 6))
    fit(tmp_path, learner({}), Warmup(LinearWarmup(3)), *save, fallback=fallback, steps=8)
    at = load(tmp_path / "6.ckpt")
    assert_same(at["state_dict"], everything_at_start())
    assert at["optimizer_states"][0]["state"] == {}
    assert at["callbacks"]["Warmup"] == {"steps": [0]}


def test_weights_that_are_never_finite_end_the_run(tmp_path):
    """Case 26: no endless recovery at the checkpoints either: 3 rollbacks, 3 restarts, then the report."""

    fallback, steps = LRFallback(), range(1, 99)
    with pytest.raises(FallbackExhaustedError, match="the weights themselves"):
        fit(tmp_path, learner({}), Overflows(*steps), SaveAt(tmp_path, *steps), fallback=fallback, steps=99)
    assert [action for *_, action in what(fallback)] == ["rollback"] * 3 + ["restart"] * 3 + ["stop"]


@pytest.mark.filterwarnings("ignore:.*was called without a model.*", "ignore:.*there is no last checkpoint available.*")
@pytest.mark.parametrize("order", [1, -1])
def test_the_checkpoint_of_an_exception_is_finite(order, tmp_path):
    """The run that could not be saved leaves the weights that it went back to, and its counts."""
    fallback, save = LRFallback(), OnExceptionCheckpoint(tmp_path)
    run = trainer(tmp_path, *[fallback, save][::order], max_steps=99, enable_checkpointing=True)
    with pytest.raises(FallbackExhaustedError):
        run.fit(learner(dict.fromkeys(range(5, 99), "nan")))
    found = load(tmp_path / "on_exception.ckpt")
    assert is_finite(found)
    assert found["callbacks"]["LRFallback"]["ladder"]["rollbacks"] == 3
    assert found["callbacks"]["LRFallback"]["events"]["events"][-1]["action"] == "stop"


class Kill(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 27:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_run(folder, ckpt_path=None, kill=True):
    """For the process that dies between the event of step 23 and the checkpoint of step 30."""
    faults = {13: "nan", 23: "nan"}
    fallback = LRFallback(max_skips=0, snapshot_every_n_steps=5)
    module = learner(faults)
    extra = [Kill()] if kill else []
    fit(folder, module, SaveAt(folder, 10, 20, 30), *extra, fallback=fallback, steps=35, ckpt_path=ckpt_path)
    return module, fallback


@pytest.mark.slow
def test_killed_between_an_event_and_the_next_checkpoint(tmp_path):
    """Acceptance 7: the same decisions again, the same weights; the file tells both lives."""
    script = f"from pathlib import Path\nfrom {__name__} import killed_run\nkilled_run(Path({str(tmp_path)!r}))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path) == [13, 23]
    resumed, again = killed_run(tmp_path, tmp_path / "20.ckpt", kill=False)
    straight, fallback = killed_run(tmp_path / "straight", kill=False)
    assert what(again) == what(fallback) == [(13, "non_finite", "rollback"), (23, "non_finite", "rollback")]
    assert_same(everything(resumed.trainer, resumed), everything(straight.trainer, straight))
    assert steps(tmp_path) == [13, 23, "resumed at 20", 23]
