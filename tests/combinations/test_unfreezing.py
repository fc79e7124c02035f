"""Parameter groups that are added in mid-run: all callbacks follow them (acceptance 6 of the step)."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning

from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import RESUMING, Learner, Watch, assert_same, everything, what
from tests.callbacks.test_lr_fallback_resume import ByStep
from tests.callbacks.test_warmup import SaveAt
from tests.combinations.four import (
    BASE,
    FACTOR,
    Four,
    Taken,
    assert_norms,
    learner,
    run,
    warm,
    weights,
)
from tests.stand_ins import Decoder, seeded, trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING]


class Thaw(Callback):
    """By hand: block 0 is frozen until step 8, and then a group of its own at half the learning rate."""

    def setup(self, trainer, pl_module, stage):
        pl_module.decoder.blocks[0].requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 8:
            block = pl_module.decoder.blocks[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(block.parameters()), "lr": BASE / 2})


def partly(module):
    """Only what is trained when the run starts is the optimizer's, as Lightning's documentation asks."""
    module.make_optimizer = lambda parameters: Taken([each for each in parameters if each.requires_grad])
    return module


def assert_only_trained_writers_are_scaled(before, start):
    for name, old in before.items():
        scaled = name.endswith("writer.weight") and "blocks.0." not in name
        assert torch.equal(start[name], old * FACTOR if scaled else old), name


def test_unfrozen_by_hand(tmp_path):
    """Thawed after step 8, a jump of the loss at step 20, back to step 18: every callback knows the new group."""
    module, watch = partly(learner({20: "huge"})), Watch(18, 20)
    before = weights(module)
    four = run(tmp_path, module, watch, before=[Thaw()])
    assert_only_trained_writers_are_scaled(before, four.naive.start)
    assert what(four.fallback) == [(20, "divergence", "rollback")]
    assert_same(watch.before[18], watch.after[20])
    assert any(name.startswith("state/0/decoder.blocks.0.") for name in watch.after[20])
    factors = [warm(step, cut_at=20) for step in range(23)]
    assert [rates[0] for rates in module.trainer.optimizers[0].trace] == pytest.approx([BASE * f for f in factors])
    late = [rates[1] for rates in module.trainer.optimizers[0].trace if len(rates) > 1]
    assert late == pytest.approx([BASE / 2 * f for f in factors[8:]])
    assert_norms(four.monitor, four.naive.norms)
    history = four.monitor.history.state_dict()
    column = history["values"][:, history["columns"].index("grad_norm/block_00")]
    assert column.isnan().nonzero().flatten().tolist() == list(range(8))


def test_the_monitor_leaves_no_trace(tmp_path):
    modules = [partly(learner({20: "huge"})) for _ in range(2)]
    for module, monitored in zip(modules, (True, False), strict=True):
        run(tmp_path, module, before=[Thaw()], monitored=monitored)
    assert_same(weights(modules[0]), weights(modules[1]))


class Backbone(ByStep):
    """Two blocks and the embedding are the backbone; batches are looked up by step, so that a resume has its own."""

    def __init__(self, faults=()):
        Learner.__init__(self, faults, decoder=seeded(lambda: Decoder(3)))
        self.make_optimizer = lambda parameters: Taken([each for each in parameters if each.requires_grad])

    @property
    def backbone(self):
        return torch.nn.ModuleList([self.decoder.embedding, self.decoder.blocks[0], self.decoder.blocks[1]])


def finetuning():
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


LENGTH = 24
RATES = {1: 0.1, 2: 0.15, 3: 0.225}
"""Epoch -> Lightning's learning rate of the backbone as a share of the head's: a tenth, then 1.5 times each epoch."""


def rates(steps, cut_at, start=0):
    """What both groups must have used, by hand: 16 batches an epoch, one step each; ``cut_at`` was not taken."""
    expected = []
    for taken, step in enumerate(step for step in range(steps) if step != cut_at):
        factor = min(1.0, (taken + 1) / LENGTH) * (0.5 if step > cut_at else 1.0)
        expected.append([BASE * factor] + ([BASE * RATES[step // 16] * factor] if step >= 16 else []))
    return expected[start:]


def options(cut_at):
    four = Four(LRFallback(max_skips=0, snapshot_every_n_steps=6), warmup=Warmup(LinearWarmup(LENGTH)))
    return four, {"max_steps": 52}, Backbone({cut_at: "huge"})


@pytest.mark.parametrize("order", [1, -1])
def test_backbone_finetuning(order, tmp_path):
    """Unfrozen in the middle of the warmup: Lightning reads and writes the clean rates, the step uses the factor."""
    four, more, module = options(40)
    before, watch = weights(module), Watch(36, 40)
    callbacks = [*four.all, finetuning()][::order]
    trainer(tmp_path, *callbacks, watch, **more).fit(module)
    assert_only_backbone_is_left(before, four.naive.start)
    assert what(four.fallback) == [(40, "divergence", "rollback")]
    assert_same(watch.before[36], watch.after[40])
    found = module.trainer.optimizers[0].trace
    assert [len(each) for each in found] == [len(each) for each in rates(52, 40)]
    for one, other in zip(found, rates(52, 40), strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    assert_norms(four.monitor, four.naive.norms)


def assert_only_backbone_is_left(before, start):
    for name, old in before.items():
        scaled = name.endswith("writer.weight") and "blocks.2." in name
        assert torch.equal(start[name], old * FACTOR if scaled else old), name


class StaysUnfrozen(Callback):
    """Lightning 2.6 freezes the backbone again on a resume, and leaves it so; what its optimizer owns is trained."""

    def on_train_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


@pytest.mark.parametrize("at", [12, 30, 46])
def test_backbone_finetuning_resumed(at, tmp_path):
    """Saved before the unfreezing, after it, and after the rollback: weights and rates are the uninterrupted run's."""
    four, more, straight = options(40)
    trainer(tmp_path, *four.all, finetuning(), SaveAt(tmp_path, at), **more).fit(straight)
    four, more, resumed = options(40)
    trainer(tmp_path, StaysUnfrozen(), *four.all, finetuning(), **more).fit(resumed, ckpt_path=tmp_path / f"{at}.ckpt")
    assert_same(everything(resumed.trainer, resumed), everything(straight.trainer, straight))
    assert resumed.trainer.optimizers[0].trace == straight.trainer.optimizers[0].trace[-(52 - at - (at < 40)) :]
    assert what(four.fallback) == [(40, "divergence", "rollback")]
