"""A run resumed with another learning rate: our command line applies it, every other script gets one warning."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.cli.configuration_wins import ConfigurationWins
from lightning_norms.schedules import LinearWarmup

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("DepthMonitor. there are no depths", ".*resuming from a checkpoint", ".*callbacks used to create")
]
GOES_ON = "the run goes on with its checkpoint's optimizer"
SCHEDULERS = {
    "none": lambda optimizer: None,
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


class Module(LightningModule):
    def __init__(self, lr, scheduler="none", kind=SGD, decays=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rates, self.decays = nn.Linear(2, 1), [], decays
        self.make = lambda: kind(self.parameters(), lr=lr, **options)
        self.scheduler = SCHEDULERS[scheduler]

    def training_step(self, batch, batch_idx):
        if self.decays:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = self.make()
        scheduler = self.scheduler(optimizer)
        config = {"scheduler": scheduler, "interval": "step"}
        return optimizer if scheduler is None else {"optimizer": optimizer, "lr_scheduler": config}


def fit(module, callbacks, path, resume=False, steps=5):
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(callbacks=callbacks, max_steps=steps, enable_model_summary=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.ones(64, 2), 4), ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    return [str(warning.message) for warning in caught if GOES_ON in str(warning.message)]


def foreign():
    return [Warmup(LinearWarmup(0)), DepthMonitor(table=False, picture=False, every_n_steps=1)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_command_line_goes_on_with_the_new_rate_on_the_old_schedule(scheduler, tmp_path):
    path = tmp_path / "run.ckpt"
    fit(Module(0.1, scheduler), [ConfigurationWins()], path)
    straight = Module(0.5, scheduler)
    fit(straight, [], tmp_path / "straight.ckpt", steps=10)
    resumed = Module(0.5, scheduler)
    assert fit(resumed, [ConfigurationWins(), *foreign()], path, resume=True, steps=10) == []
    assert resumed.rates == pytest.approx(straight.rates[5:], rel=1e-6)
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    group = state["param_groups"][0]
    assert group.get("initial_lr", group["lr"]) == 0.5


def test_the_command_line_applies_every_number_of_the_optimizer(tmp_path):
    path, last = tmp_path / "run.ckpt", Module(0.1, kind=AdamW, weight_decay=0.0, betas=(0.8, 0.99))
    fit(Module(0.1, kind=AdamW, weight_decay=0.5, betas=(0.9, 0.999)), [ConfigurationWins()], path)
    fit(last, [ConfigurationWins()], path, resume=True, steps=7)
    group = last.trainer.optimizers[0].param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.0, (0.8, 0.99))
    assert float(last.trainer.optimizers[0].state[last.layer.weight]["step"]) == 7


def test_an_equal_configuration_resumes_bit_for_bit(tmp_path):
    for callbacks in ([ConfigurationWins()], foreign()):
        straight, first, second = (Module(0.1, "exponential", kind=AdamW) for _ in range(3))
        fit(straight, [], tmp_path / "straight.ckpt", steps=10)
        fit(first, callbacks, tmp_path / "run.ckpt")
        assert fit(second, callbacks, tmp_path / "run.ckpt", resume=True, steps=10) == []
        assert first.rates + second.rates == straight.rates
        assert torch.equal(second.layer.weight, straight.layer.weight)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_everybody_else_gets_one_warning_with_both_numbers_at_every_resume(scheduler, tmp_path):
    path = tmp_path / "run.ckpt"
    fit(Module(1e-3, scheduler), foreign(), path)
    for steps in (8, 10):
        (sentence,) = fit(Module(5e-3, scheduler), foreign(), path, resume=True, steps=steps)
        assert "lr 0.005 (checkpoint: 0.001)" in sentence
    assert fit(Module(1e-3, scheduler), foreign(), path, resume=True, steps=12) == []


def test_other_numbers_are_named_too(tmp_path):
    path = tmp_path / "run.ckpt"
    fit(Module(0.1, kind=AdamW, weight_decay=0.5), foreign(), path)
    (sentence,) = fit(Module(0.1, kind=AdamW, weight_decay=0.0), foreign(), path, resume=True, steps=7)
    assert "weight_decay 0 (checkpoint: 0.5)" in sentence
    assert "lr" not in sentence.split("now: ")[1].split(". Set")[0]


def test_a_rate_that_the_users_own_code_changes_is_no_other_configuration(tmp_path):
    for callbacks in ([ConfigurationWins()], foreign()):
        straight, first, second = (Module(0.1, decays=True) for _ in range(3))
        fit(straight, [], tmp_path / "straight.ckpt", steps=10)
        fit(first, callbacks, tmp_path / "run.ckpt")
        assert fit(second, callbacks, tmp_path / "run.ckpt", resume=True, steps=10) == []
        assert first.rates + second.rates == straight.rates


def test_a_checkpoint_that_was_made_without_us_is_compared_by_its_rate(tmp_path):
    path = tmp_path / "run.ckpt"
    fit(Module(1e-3), [], path)
    (sentence,) = fit(Module(5e-3), foreign(), path, resume=True, steps=7)
    assert "lr 0.005 (checkpoint: 0.001)" in sentence
    fit(Module(1e-3), [], path)
    resumed = Module(torch.tensor(5e-3), kind=AdamW)
    fit(Module(torch.tensor(1e-3), kind=AdamW), [], path)
    fit(resumed, [ConfigurationWins()], path, resume=True, steps=7)
    assert resumed.rates == pytest.approx([5e-3] * 2)


def test_a_new_fit_of_the_same_trainer_is_no_resume(tmp_path):
    callbacks = foreign()
    fit(Module(1e-3), callbacks, tmp_path / "run.ckpt")
    assert fit(Module(5e-3), callbacks, tmp_path / "run.ckpt") == []
