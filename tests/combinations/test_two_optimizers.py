"""Case 44: manual optimization. Counters are each optimizer's own, and what cannot work says so at the start."""

import re

import pytest
import torch

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from lightning_norms.callbacks.warmup import Warmup
from lightning_norms.schedules import LinearWarmup
from tests.callbacks.fallback_runs import Learner, assert_same, what
from tests.combinations.four import BASE, Naive, Taken, W, assert_rescaled, learner, warm, weights
from tests.stand_ins import Decoder, loader, seeded, trainer


class Two(Learner):
    """Blocks by one optimizer at every batch, all else by another one at every ``every``-th."""

    automatic_optimization = False

    def __init__(self, every=1):
        super().__init__(decoder=seeded(lambda: Decoder(3)))
        self.every = every

    def configure_optimizers(self):
        blocks = {id(parameter) for parameter in self.decoder.blocks.parameters()}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in blocks]
        self.both = Taken(list(self.decoder.blocks.parameters())), Taken(rest, lr=0.2)
        return list(self.both)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        if batch_idx % self.every == 0:
            second.step()

    def train_dataloader(self):
        return loader(batches=24)


@pytest.mark.parametrize("every", [1, 3])
def test_each_optimizer_is_warmed_up_and_measured_on_its_own(every, tmp_path):
    """W = 8: each reaches its base at its own 8th step, though global_step counts both; the writers are scaled once."""
    module, naive = Two(every), Naive()
    before, warmup = weights(module), Warmup(LinearWarmup(W))
    monitor = DepthMonitor(every_n_steps=1, table=False, picture=False)
    trainer(tmp_path, naive, ResidualRescale(), warmup, monitor, max_epochs=1, max_steps=-1).fit(module)
    first, second = module.both
    assert module.trainer.global_step == 24 + 24 // every
    assert [rate for (rate,) in first.trace] == pytest.approx([BASE * warm(step) for step in range(24)])
    assert [rate for (rate,) in second.trace] == pytest.approx([0.2 * warm(step) for step in range(24 // every)])
    assert first.trace[6][0] < BASE == first.trace[7][0]
    assert second.trace[6][0] < 0.2 == second.trace[7][0]
    assert warmup.state_dict() == {"steps": [24, 24 // every]}
    assert monitor.state_dict()["counts"] == [24, 24 // every]
    assert_rescaled(before, naive.start)
    both = monitor.history.state_dict()
    for number, chosen in enumerate((["block_01"], ["embedding", "head"])):
        norms = [each for each in naive.norms if chosen[0] in each]
        for group in [*chosen, "total"]:
            column = both["values"][:, both["columns"].index(f"grad_norm/optimizer_{number}.{group}")]
            seen = column[~column.isnan()].tolist()
            assert seen == pytest.approx([each[group] for each in norms], rel=1e-5)


def test_the_monitor_leaves_no_trace(tmp_path):
    modules = [Two(3), Two(3)]
    for module, more in zip(modules, ([DepthMonitor(every_n_steps=1, table=False, picture=False)], []), strict=True):
        trainer(tmp_path, Warmup(LinearWarmup(W)), *more, max_epochs=1, max_steps=-1).fit(module)
    assert_same(weights(modules[0]), weights(modules[1]))


def test_the_fallback_needs_to_know_whose_loss_it_sees(tmp_path):
    """Refused before the first step, in one sentence."""
    module = Two()
    sentence = (
        "LRFallback needs a loss for its optimizer, and cannot tell whose it sees with several (Taken, Taken): "
        "leave it out of this run."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        trainer(tmp_path, LRFallback()).fit(module)
    assert module.losses == []


class Raw(Learner):
    """Calls ``loss.backward()`` past Lightning."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        super().training_step(batch, batch_idx).backward()
        optimizer.step()


def test_a_loss_that_the_fallback_cannot_see_is_named_and_gradients_are_judged(tmp_path):
    """One warning that says what to call; a NaN in the gradient is still skipped."""
    module, fallback = Raw({9: "nan"}, decoder=seeded(lambda: Decoder(3)), optimizer=Taken), LRFallback()
    with pytest.warns(UserWarning, match=r"LRFallback sees no loss.*call self.manual_backward\(loss\)") as caught:
        trainer(tmp_path, fallback, max_steps=12).fit(module)
    assert len([each for each in caught if "LRFallback" in str(each.message)]) == 1
    assert what(fallback) == [(9, "non_finite", "skip")]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


def test_a_loss_that_it_sees_is_no_warning(tmp_path):
    """Automatic optimization whose first loss is NaN is no blindness."""
    fallback = LRFallback()
    trainer(tmp_path, fallback, max_steps=4).fit(learner({0: "nan"}))
    assert what(fallback) == [(0, "non_finite", "skip")]
