"""Warmup in a Trainer: what the optimizer saw inside step() against the plain run x the closed form."""

import contextlib
import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, Dataset

from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.learning_rate import HideFactors, factors_of
from lightning_norms.schedules import (
    InverseSqrtDecay,
    LinearDecay,
    LinearWarmup,
    Noam,
    Then,
    UntunedWarmup,
    WarmupStableDecay,
)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        ".*resuming from a checkpoint that ended before the epoch.*",
        ".*callbacks used to create the checkpoint need to be provided.*",
        ".*Be aware that when using `ckpt_path`.*",
        ".*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`.*",
        "Warmup takes .* optimizer steps, but the run ends after.*",  # most runs here are shorter on purpose
    )
]

W, STEPS, STEPS_AN_EPOCH = 8, 14, 6


class Recording(SGD):
    """Writes down the learning rates that its update sees."""

    def __init__(self, params, lr=0.1, **more):
        super().__init__(params, lr=lr, momentum=0.9, **more)
        self.trace = []

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.trace.append([float(group["lr"]) for group in self.param_groups])
        super().step()
        return loss


class Numbers(Dataset):
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        return torch.tensor([1.0, index / 10])


class Module(LightningModule):
    def __init__(self, scheduler=None, accumulate=1, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.scheduler, self.accumulate, self.make = scheduler, accumulate, optimizer

    def train_dataloader(self):
        return DataLoader(Numbers(STEPS_AN_EPOCH * self.accumulate))

    def training_step(self, batch, batch_idx):
        self.log("constant", 1.0)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        if self.make is not None:
            self.optimizer = self.make(self.parameters())
        else:
            groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.02}]
            self.optimizer = Recording(groups)
        if self.scheduler is None:
            return self.optimizer
        config = {"interval": "step", **self.scheduler(self.optimizer)}
        return {"optimizer": self.optimizer, "lr_scheduler": config}


def trainer(*callbacks, steps=STEPS, **more):
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": -1, "max_steps": steps} | more
    return Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


class SaveAt(Callback):
    def __init__(self, folder, *steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        path = self.folder / f"{trainer.global_step}.ckpt"
        if trainer.global_step in self.steps and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(path)


class Cut(Callback):
    """What a fallback will do: halves within the very step."""

    def __init__(self, at=None):
        self.at, self.value = at, 1.0

    def on_train_start(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            factors_of(optimizer).set("fallback", lambda step: self.value)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if factors_of(optimizer).clock == self.at:
            self.value = 0.5
            factors_of(optimizer).refresh()

    def on_fit_end(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            factors_of(optimizer).remove("fallback")

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def scheduler(kind, **options):
    config = {key: options.pop(key) for key in ("interval", "monitor") if key in options}
    return lambda optimizer: {"scheduler": kind(optimizer, **options), **config}


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 6, 0.001)]
    return {"scheduler": lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])}


def chained(optimizer):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.95), lr_scheduler.CosineAnnealingLR(optimizer, 20, 0.001)]
    return {"scheduler": lr_scheduler.ChainedScheduler(parts)}


SCHEDULERS = {
    "none": None,
    "lambda": scheduler(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "step": scheduler(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "multi_step": scheduler(lr_scheduler.MultiStepLR, milestones=[2, 7, 9], gamma=0.3),
    "exponential": scheduler(lr_scheduler.ExponentialLR, gamma=0.9),
    "cosine": scheduler(lr_scheduler.CosineAnnealingLR, T_max=20, eta_min=0.001),
    "cosine_past_its_end": scheduler(lr_scheduler.CosineAnnealingLR, T_max=5, eta_min=0.001),
    "warm_restarts": scheduler(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4, eta_min=0.001),
    "one_cycle": scheduler(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.02], total_steps=40),
    "cyclic": scheduler(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "linear": scheduler(lr_scheduler.LinearLR, start_factor=0.2, total_iters=10),
    "sequential": sequential,
    "chained": chained,
    "polynomial": scheduler(lr_scheduler.PolynomialLR, total_iters=30, power=2),
    "plateau": scheduler(lr_scheduler.ReduceLROnPlateau, patience=2, factor=0.5, min_lr=0.001, monitor="constant"),
    "plateau_epoch": scheduler(
        lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, monitor="constant", interval="epoch"
    ),
    "step_epoch": scheduler(lr_scheduler.StepLR, step_size=1, gamma=0.1, interval="epoch"),
    "cosine_epoch": scheduler(lr_scheduler.CosineAnnealingLR, T_max=3, eta_min=0.001, interval="epoch"),
}


def fit(scheduler, accumulate, *callbacks, ckpt_path=None, steps=STEPS, **more):
    module = Module(scheduler, accumulate)
    trainer(*callbacks, accumulate_grad_batches=accumulate, steps=steps, **more).fit(module, ckpt_path=ckpt_path)
    return module.optimizer.trace


def times(plain, factor, start=0):
    return [[rate * factor(start + index) for rate in rates] for index, rates in enumerate(plain)]


def assert_equal(trace, expected):
    assert len(trace) == len(expected)
    torch.testing.assert_close(
        torch.tensor(trace, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


def linear(step):
    return min(1.0, (step + 1) / W)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_trace_with_any_scheduler_uninterrupted_and_resumed(name, accumulate, tmp_path):
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    reference = fit(SCHEDULERS[name], accumulate, SaveAt(plain, 5, 11))
    assert len(reference) == STEPS
    assert_equal(
        fit(SCHEDULERS[name], accumulate, Warmup(LinearWarmup(W)), SaveAt(ours, 5, 11)), times(reference, linear)
    )
    for at in (5, 11):
        rest = fit(SCHEDULERS[name], accumulate, ckpt_path=plain / f"{at}.ckpt")
        resumed = fit(SCHEDULERS[name], accumulate, Warmup(LinearWarmup(W)), ckpt_path=ours / f"{at}.ckpt")
        assert_equal(resumed, times(rest, linear, at))
        # The checkpoint is clean: it goes on without us as if we had never been there.
        assert_equal(fit(SCHEDULERS[name], accumulate, ckpt_path=ours / f"{at}.ckpt"), rest)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_second_factor_cuts_within_the_step_and_stays(name, order, tmp_path):
    def both(step):
        return linear(step) * (0.5 if step >= 4 else 1)

    reference = fit(SCHEDULERS[name], 1, SaveAt(tmp_path / "plain", 7))
    callbacks = [Warmup(LinearWarmup(W)), Cut(at=4)][::order]
    assert_equal(fit(SCHEDULERS[name], 1, *callbacks, SaveAt(tmp_path, 7)), times(reference, both))
    rest = fit(SCHEDULERS[name], 1, ckpt_path=tmp_path / "plain/7.ckpt")
    callbacks = [Warmup(LinearWarmup(W)), Cut()][::order]
    assert_equal(fit(SCHEDULERS[name], 1, *callbacks, ckpt_path=tmp_path / "7.ckpt"), times(rest, both, 7))


def test_halved_after_step_four_of_a_ten_step_warmup():
    trace = fit(None, 1, Warmup(LinearWarmup(10)), Cut(at=4), steps=10)
    expected = [0.1, 0.2, 0.3, 0.4, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
    assert [rates[0] / 0.1 for rates in trace] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "schedule", [InverseSqrtDecay(4), Then(LinearWarmup(3), LinearDecay(9, 0.1)), LinearWarmup(0), LinearWarmup(1)]
)
def test_other_schedules_on_a_recursive_scheduler(schedule):
    reference = fit(SCHEDULERS["chained"], 1)
    assert_equal(fit(SCHEDULERS["chained"], 1, Warmup(schedule)), times(reference, schedule))


def test_noam_is_absolute():
    trace = fit(None, 1, Warmup(Noam(16, 4)))
    expected = [16**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4**-1.5) for step in range(STEPS)]
    assert [rates[0] for rates in trace] == pytest.approx(expected, rel=1e-12)
    assert [rates[1] / rates[0] for rates in trace] == pytest.approx([0.2] * STEPS, rel=1e-12)


def test_noam_divides_by_the_base_rate_and_not_by_what_a_scheduler_made_of_it():
    # A constant scheduler at half: the paper's learning rate x 0.5, not x 1.
    half = scheduler(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5)
    trace = fit(half, 1, Warmup(Noam(16, 4)))
    assert trace[3][0] == pytest.approx(0.5 * 16**-0.5 * 4**-0.5, rel=1e-12)


def test_untuned_is_the_default_and_reads_beta2():
    module = Module(optimizer=lambda params: AdamW(params, lr=0.1, betas=(0.9, 0.5)))
    seen = Seen()
    trainer(Warmup(), seen, steps=6).fit(module)
    assert Warmup().schedule == UntunedWarmup()
    assert seen.used == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


class Seen(Callback):
    def __init__(self):
        self.used, self.off = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.used += factors_of(trainer.optimizers[0]).used()[:1]
        self.off.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


def test_untuned_says_what_to_do_without_beta2():
    with pytest.raises(
        ValueError, match=r"beta2, but the optimizer has none: give a length, for instance LinearWarmup\(100\)"
    ):
        fit(None, 1, Warmup())


# Lengths and counting: cases 13, 19, 20, 21, 49.


def test_resumed_inside_the_warmup_equals_straight(tmp_path):
    straight = fit(None, 1, Warmup(LinearWarmup(10)), SaveAt(tmp_path, 4), steps=8)
    resumed = fit(None, 1, Warmup(LinearWarmup(10)), ckpt_path=tmp_path / "4.ckpt", steps=8)
    assert_equal(straight, [[0.1 * (step + 1) / 10, 0.02 * (step + 1) / 10] for step in range(8)])
    assert_equal(resumed, straight[4:])


def test_steps_not_epochs_and_first_step_moves_the_weights():
    module = Module()
    before = copy.deepcopy(module.layer.state_dict())
    trainer(Warmup(LinearWarmup(4)), steps=1).fit(module)
    assert module.optimizer.trace[0][0] == pytest.approx(0.025, rel=1e-12)
    assert not torch.equal(before["weight"], module.layer.weight)
    trace = fit(None, 1, Warmup(LinearWarmup(4)), max_epochs=2, steps=-1)
    assert [rates[0] / 0.1 for rates in trace] == pytest.approx([0.25, 0.5, 0.75] + [1] * 9, rel=1e-12)


def test_warmup_as_long_as_the_run_or_longer():
    assert fit(None, 1, Warmup(LinearWarmup(10)), steps=10)[9][0] == 0.1
    for length_of_run in ({"steps": 10}, {"steps": -1, "max_epochs": 2}):
        with pytest.warns(UserWarning, match="longer|ends after") as caught:
            trace = fit(None, 1, Warmup(LinearWarmup(20)), **length_of_run)
        assert len([w for w in caught if "Warmup takes 20 optimizer steps" in str(w.message)]) == 1
        assert trace[9][0] == pytest.approx(0.05, rel=1e-12)


@pytest.mark.parametrize("length", [{"steps": 12}, {"steps": -1, "max_epochs": 2}, {"steps": 50, "max_epochs": 2}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_share_of_the_run(length, accumulate):
    trace = fit(None, accumulate, Warmup(WarmupStableDecay(0.25, 0.5)), **length)
    expected = [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert [rates[0] / 0.1 for rates in trace] == pytest.approx(expected, rel=1e-12)


def test_share_of_a_run_without_end():
    with pytest.raises(ValueError, match=r"LinearWarmup\(warmup_steps=0.5\) depends on the length of the run"):
        fit(None, 1, Warmup(LinearWarmup(0.5)), steps=-1, max_time={"seconds": 5})


def test_stateful_loader_keeps_its_place(tmp_path):
    class Loader(DataLoader):
        position = 0

        def __iter__(self):
            while self.position < 20:
                self.position += 1
                yield torch.tensor([[1.0, float(self.position)]])
            self.position = 0

        def __len__(self):
            return 20

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state_dict):
            self.position = state_dict["position"]

    class Positions(Module):
        def train_dataloader(self):
            return Loader(Numbers(20))

        def training_step(self, batch, batch_idx):
            self.seen = [*getattr(self, "seen", []), int(batch[0, 1])]
            return super().training_step(batch, batch_idx)

    first = Positions()
    trainer(Warmup(LinearWarmup(0.5)), SaveAt(tmp_path, 5), steps=-1, max_epochs=1).fit(first)
    second = Positions()
    trainer(Warmup(LinearWarmup(0.5)), steps=-1, max_epochs=1).fit(second, ckpt_path=tmp_path / "5.ckpt")
    # Lightning prefetches one batch, so the loader itself is one ahead when it is saved.
    assert second.seen[0] in (6, 7)
    assert_equal(second.optimizer.trace, first.optimizer.trace[5:][: len(second.optimizer.trace)])


@pytest.mark.parametrize("value", [100, None, "LinearWarmup", LinearWarmup])
def test_no_schedule(value):
    with pytest.raises(TypeError, match=r"Warmup needs a schedule, for instance Warmup\(LinearWarmup\(100\)\); got"):
        Warmup(value)


# State: cases 16, 17.


def test_changed_argument_keeps_the_count(tmp_path):
    fit(None, 1, Warmup(LinearWarmup(10)), SaveAt(tmp_path, 4), steps=5)
    trace = fit(None, 1, Warmup(LinearWarmup(20)), ckpt_path=tmp_path / "4.ckpt", steps=5)
    assert trace[0][0] == pytest.approx(0.1 * 5 / 20, rel=1e-12)


def test_state_is_plain_and_survives_fit_pickle_and_a_second_fit(tmp_path):
    warmup = Warmup(LinearWarmup(W))
    module, first = Module(), trainer(warmup, steps=3)
    first.fit(module)
    assert warmup.state_dict() == {"steps": [3]}
    first.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.load(tmp_path / "after.ckpt", weights_only=True)["callbacks"]["Warmup"] == {"steps": [3]}
    again = pickle.loads(pickle.dumps(warmup))
    assert again.state_dict() == warmup.state_dict()
    assert again.schedule == warmup.schedule
    trace = fit(None, 1, warmup, steps=3)
    assert trace[0][0] == pytest.approx(0.1 / W)  # fit twice starts over
    assert fit(None, 1, again, ckpt_path=tmp_path / "after.ckpt", steps=4)[0][0] == pytest.approx(0.1 * 4 / W)


def test_one_optimizer_object_in_two_fits_starts_over():
    weight = nn.Parameter(torch.ones(1))
    optimizer = Recording([weight])
    module = Module(optimizer=lambda params: optimizer)
    module.layer.weight = nn.Parameter(torch.ones(1, 2))
    for _ in range(2):
        trainer(Warmup(LinearWarmup(4)), steps=2).fit(module)
    assert [rates[0] for rates in optimizer.trace] == pytest.approx([0.025, 0.05] * 2)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_state_dict_post_hooks


def test_pickled_in_the_middle_of_fit():
    class Pickle(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.copy = pickle.loads(pickle.dumps(trainer.callbacks[0]))

    last = Pickle()
    fit(None, 1, Warmup(LinearWarmup(4)), last, steps=3)
    assert last.copy.state_dict() == {"steps": [3]}


def test_two_of_them_is_one_clear_error():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `Warmup`"):
        trainer(Warmup(LinearWarmup(2)), Warmup(LinearWarmup(3)))


def test_weights_are_bit_for_bit_those_without_it_at_factor_one():
    plain, ours = Module(SCHEDULERS["chained"]), Module(SCHEDULERS["chained"])
    trainer().fit(plain)
    trainer(Warmup(LinearWarmup(0))).fit(ours)
    assert torch.equal(plain.layer.weight, ours.layer.weight)
    assert ours.optimizer.trace == plain.optimizer.trace


def test_nothing_is_kept_alive():
    module = Module()
    run = trainer(Warmup(LinearWarmup(4)), steps=2)
    run.fit(module)
    alive = weakref.ref(module.optimizer)
    module.optimizer = None
    del run, module
    gc.collect()
    assert alive() is None


# Mixed precision, kinds of optimizer, manual optimization: cases 32, 44.


class Overflows(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e38 if batch_idx in self.bad else loss


def scaled(**more):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, **more)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


@pytest.mark.parametrize("bad", [{0}, {2}, {0, 3}])
def test_a_step_that_the_scaler_skips_does_not_advance_the_warmup(bad):
    module = Overflows(SCHEDULERS["exponential"])
    module.bad = bad
    seen = Seen()
    trainer(Warmup(LinearWarmup(4)), LearningRateMonitorStandIn(), seen, steps=6, **scaled()).fit(module)
    taken = [step for step in range(6) if step not in bad]
    # The scheduler goes on (Lightning), the warmup waits.
    expected = [0.1 * 0.9**step * min(1, (count + 1) / 4) for count, step in enumerate(taken)]
    assert [rates[0] for rates in module.optimizer.trace] == pytest.approx(expected, rel=1e-12)
    assert seen.off == pytest.approx([0.1 * 0.9 ** (step + 1) for step in range(6)], rel=1e-12)


class LearningRateMonitorStandIn(Callback):
    """Needs no logger."""

    def __init__(self):
        self.shown = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.shown.append([float(group["lr"]) for o in trainer.optimizers for group in o.param_groups])


LearningRateMonitorStandIn.__name__ = "LearningRateMonitor"


def test_fused_optimizer_that_skips_by_itself_is_not_counted():
    module = Overflows(optimizer=lambda params: AdamW(params, lr=0.1, fused=True))
    module.bad = {1}
    warmup = Warmup(LinearWarmup(4))
    trainer(warmup, steps=4, **scaled()).fit(module)
    steps = {float(state["step"]) for state in module.optimizer.state.values()}
    assert steps == {3.0}
    assert warmup.state_dict() == {"steps": [3]}


@pytest.mark.parametrize(
    "options",
    [{"fused": True}, {"foreach": True}, {"foreach": False}, {"tensor": True}, {"tensor": True, "fused": True}],
    ids=str,
)
def test_adamw_of_every_kind(options):
    options = {"foreach": False, **options} if "tensor" in options and "fused" not in options else dict(options)
    tensor = options.pop("tensor", False)
    rate = torch.tensor(0.1) if tensor else 0.1
    module = Module(SCHEDULERS["exponential"], optimizer=lambda params: AdamW(params, lr=rate, **options))
    seen = Seen()
    trainer(Warmup(LinearWarmup(4)), seen, steps=8).fit(module)
    expected = [0.1 * 0.9**step * min(1, (step + 1) / 4) for step in range(8)]
    assert seen.used == pytest.approx(expected, rel=1e-6 if tensor else 1e-12)
    group = module.optimizer.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor) is tensor
    if tensor:
        assert group["lr"] is not group["initial_lr"]
        assert float(group["initial_lr"]) == pytest.approx(0.1)
        assert float(group["lr"]) == pytest.approx(0.1 * 0.9**8, rel=1e-6)


class Adversarial(Module):
    def __init__(self, every=1):
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.other = nn.Linear(2, 1)

    def configure_optimizers(self):
        self.both = [Recording(self.layer.parameters()), Recording(self.other.parameters(), lr=0.3)]
        return self.both, [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.both]

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        slow, fast = self.lr_schedulers()
        for optimizer, layer, now in ((one, self.layer, batch_idx % self.every == 0), (two, self.other, True)):
            if now:
                self.manual_backward(layer(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        slow.step()  # also on batches without a step of its optimizer: the factor must be off
        fast.step()


@pytest.mark.parametrize("every", [1, 3])
def test_manual_optimization_counts_each_optimizer(every):
    module = Adversarial(every)
    warmup = Warmup(LinearWarmup(W))
    trainer(warmup, LearningRateMonitorStandIn(), steps=-1, max_epochs=4).fit(module)
    one, two = module.both
    assert [rates[0] for rates in two.trace] == pytest.approx([0.3 * 0.9**k * linear(k) for k in range(24)], rel=1e-12)
    expected = [0.1 * 0.9 ** (k * every) * linear(k) for k in range(24 // every)]
    assert [rates[0] for rates in one.trace] == pytest.approx(expected, rel=1e-12)
    assert warmup.state_dict() == {"steps": [24 // every, 24]}


def test_manual_optimization_resumed(tmp_path):
    straight = Adversarial()
    trainer(Warmup(LinearWarmup(W)), SaveAt(tmp_path, 10), steps=24).fit(straight)
    resumed = Adversarial()
    trainer(Warmup(LinearWarmup(W)), steps=24).fit(resumed, ckpt_path=tmp_path / "10.ckpt")
    for late, whole in zip(resumed.both, straight.both, strict=True):
        assert_equal(late.trace, whole.trace[5:])


def test_share_with_several_manual_optimizers_is_one_clear_error():
    with pytest.raises(ValueError, match="with manual optimization of several optimizers only an int works"):
        trainer(Warmup(LinearWarmup(0.5)), steps=8).fit(Adversarial())


def test_no_optimizer_at_all():
    class Idle(Module):
        def configure_optimizers(self):
            return None

    with pytest.warns(UserWarning, match="no optimizer"):
        trainer(Warmup(), steps=-1, max_epochs=1).fit(Idle())


# Exceptions, logging, monitors.


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["training_step", "on_before_optimizer_step", "on_train_batch_start"])
def test_exception_leaves_the_schedulers_learning_rate(hook, kind):
    class Fails(Callback):
        armed = True

        def fail(self, trainer):
            if self.armed and trainer.global_step == 3:
                raise kind("stop")

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if hook == "on_before_optimizer_step":
                self.fail(trainer)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if hook == "on_train_batch_start":
                self.fail(trainer)

    class Module2(Module):
        def training_step(self, batch, batch_idx):
            if hook == "training_step":
                fails.fail(self.trainer)
            return super().training_step(batch, batch_idx)

    fails, module, warmup = Fails(), Module2(SCHEDULERS["exponential"]), Warmup(LinearWarmup(W))
    run = trainer(warmup, fails, LearningRateMonitorStandIn())
    with pytest.raises((kind, SystemExit)):
        run.fit(module)
    assert [group["lr"] for group in module.optimizer.param_groups] == pytest.approx([0.1 * 0.9**3, 0.02 * 0.9**3])
    assert warmup.state_dict() == {"steps": [3]}
    assert not any(isinstance(callback, HideFactors) for callback in run.callbacks)


def test_exception_that_manual_optimization_swallows_leaves_the_schedulers_learning_rate():
    class Forgives(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            def closure():
                if batch_idx == 2:
                    raise ZeroDivisionError
                self.manual_backward(self.layer(batch).square().mean())

            with contextlib.suppress(ZeroDivisionError):
                self.optimizers().step(closure)

    class Off(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.02]

    module = Forgives()
    trainer(Warmup(LinearWarmup(W)), Off(), steps=-1, max_epochs=1).fit(module)
    assert [rates[0] for rates in module.optimizer.trace] == pytest.approx([0.1 * linear(step) for step in range(5)])


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def of(self, key):
        return [(step, metrics[key]) for step, metrics in self.rows if key in metrics]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_logger_gets_the_effective_rate_at_the_step_of_the_loss(accumulate):
    loggers = [Memory(), Memory()]
    fit(None, accumulate, Warmup(LinearWarmup(W)), logger=loggers, log_every_n_steps=2)
    for logger in loggers:
        rows = logger.of("learning_rate/effective/0")
        assert [step for step, _ in rows] == [step for step, _ in logger.of("constant")] == [1, 3, 5, 7, 9, 11, 13]
        assert [rate for _, rate in rows] == pytest.approx([0.1 * linear(step) for step, _ in rows], rel=1e-12)
        assert logger.of("learning_rate/effective/1")[0][1] == pytest.approx(0.02 * 2 / W, rel=1e-12)


def test_names_of_several_optimizers_and_groups():
    logger = Memory()
    trainer(Warmup(LinearWarmup(W)), logger=logger, log_every_n_steps=1, steps=2).fit(Adversarial())
    assert [key for _, row in logger.rows for key in row if key.startswith("learning_rate/effective")] == [
        "learning_rate/effective/optimizer0/0",
        "learning_rate/effective/optimizer1/0",
    ]
    logger = Memory()
    module = Module(
        optimizer=lambda params: SGD([{"params": [p], "name": n} for p, n in zip(params, "wb", strict=True)], lr=0.1)
    )
    trainer(Warmup(LinearWarmup(W)), logger=logger, log_every_n_steps=1, steps=1).fit(module)
    assert logger.of("learning_rate/effective/b") == [(0, pytest.approx(0.1 / W))]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_monitor_behind_shows_the_effective_rate_and_before_the_schedulers(accumulate):
    for after in (True, False):
        logger = Memory()
        callbacks = [Warmup(LinearWarmup(W)), LearningRateMonitor()][:: 1 if after else -1]
        trace = fit(SCHEDULERS["chained"], accumulate, *callbacks, logger=logger, log_every_n_steps=1, steps=STEPS)
        plain = fit(SCHEDULERS["chained"], accumulate)
        assert_equal(trace, times(plain, linear))
        shown = dict(logger.of("lr-Recording/pg1"))
        expected = [rates[0] for rates in (trace if after else plain)]
        assert [shown[step] for step in range(STEPS)] == pytest.approx(expected, rel=1e-12)


def test_factors_are_hidden_behind_a_monitor_only_and_the_hider_goes_away():
    class Peek(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.hiders = sum(isinstance(callback, HideFactors) for callback in trainer.callbacks)

    for monitors, hiders in (([], 0), ([LearningRateMonitorStandIn()], 1)):
        peek = Peek()
        run = trainer(Warmup(LinearWarmup(2)), *monitors, peek, steps=2)
        run.fit(Module())
        assert peek.hiders == hiders
        assert not any(isinstance(callback, HideFactors) for callback in run.callbacks)


def test_other_distribution_of_lightning():
    other = pytest.importorskip("pytorch_lightning")
    body = {name: vars(Module)[name] for name in ("train_dataloader", "configure_optimizers", "training_step")}
    other_module = type("Other", (other.LightningModule,), body)()
    other_module.layer, other_module.scheduler = nn.Linear(2, 1), SCHEDULERS["exponential"]
    other_module.make, other_module.accumulate = None, 1
    monitor = other.callbacks.LearningRateMonitor
    logger = type("OtherMemory", (other.loggers.logger.Logger,), dict(vars(Memory)))()
    other.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Warmup(LinearWarmup(W)), monitor()],
    ).fit(other_module)
    expected = [0.1 * 0.9**step * linear(step) for step in range(12)]
    assert [rates[0] for rates in other_module.optimizer.trace] == pytest.approx(expected, rel=1e-12)
    assert [rate for _, rate in logger.of("lr-Recording/pg1")] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_two_processes(tmp_path):
    """DDP on two processes sees the learning rates of one."""
    script = tmp_path / "ddp.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import json, pathlib, sys, warnings
            warnings.simplefilter("ignore")
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_warmup import *
            module = Module(SCHEDULERS["chained"])
            run = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=10, max_epochs=-1, logger=False,
                          enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                          callbacks=[Warmup(LinearWarmup(W))])
            run.fit(module)
            pathlib.Path({str(tmp_path)!r}, f"{{run.global_rank}}.json").write_text(json.dumps(module.optimizer.trace))
            """
        )
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PL_TORCH_DISTRIBUTED_BACKEND": "gloo", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run([sys.executable, str(script)], env=env, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = times(fit(SCHEDULERS["chained"], 1, steps=10), linear)
    for rank in (0, 1):
        assert_equal(json.loads((tmp_path / f"{rank}.json").read_text()), expected)
