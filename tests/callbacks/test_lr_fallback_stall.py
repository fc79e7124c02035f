"""The failure that never spikes: a deep post-norm stack that does not begin to learn."""

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from examples.existing_project_before import Encoder, sequences
from lightning_norms.callbacks.lr_fallback import LRFallback
from tests.callbacks.fallback_runs import Learner, assert_same, fit, what

WRITERS = r"(out_proj|linear2)\.weight"


def run(folder, seed, steps, pre_norm=False, layers=18, **options):
    """The example's encoder, with what its optimizer's steps saw."""
    seed_everything(seed, verbose=False)
    module = Encoder(layers)
    for layer in module.layers:
        layer.norm_first = pre_norm
    module.train_dataloader = lambda: DataLoader(sequences(8 * steps), batch_size=8)
    fallback = LRFallback(**options)
    fit(folder, module, fallback=fallback, steps=steps)
    return fallback, module


class Fades(Learner):
    """The lowest block gets no gradient any more from step 12 on."""

    def on_after_backward(self):
        super().on_after_backward()
        for parameter in self.decoder.blocks[0].parameters() if 12 <= self.trainer.global_step < 16 else ():
            parameter.grad *= 1e-5


def test_the_start_is_the_healthy_moment_after_a_restart(tmp_path):
    """Four faded steps are a stall. What goes wrong right after the restart goes back to the start as well."""
    module, start = Fades({16: "nan"}), Fades()
    fallback = LRFallback(max_skips=0, snapshot_every_n_steps=5)
    fit(tmp_path, module, fallback=fallback, steps=17)
    assert what(fallback) == [(15, "stall", "restart"), (16, "non_finite", "rollback")]
    assert_same(dict(module.named_parameters()), dict(start.named_parameters()))


@pytest.mark.parametrize("within", [500, 10])
def test_a_stall_rolls_back_when_the_start_is_gone(within, tmp_path):
    """Ten steps into the run the start is let go, and the last healthy snapshot is of step 10."""
    fallback = LRFallback(restart_within=within, snapshot_every_n_steps=5)
    fit(tmp_path, Fades(), fallback=fallback, steps=20)
    assert what(fallback) == [(15, "stall", "restart" if within == 500 else "rollback")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_post_norm_stack_is_named_within_forty_steps_and_starts_again(seed, tmp_path):
    """18 layers, lr 3e-3, no warmup: a loss of ln 32 and no spike; restarted at half of the rate, rescaled once."""
    options = {"rescale_on_restart": True, "pattern": WRITERS}
    fallback, module = run(tmp_path, seed, 60, **options)
    first = fallback.events[0]
    assert (first.cause, first.action) == ("stall", "restart")
    assert first.step < 40
    assert first.evidence["decades"] <= -1.5
    assert first.evidence["loss"] < 1.05 * first.evidence["first_loss"]
    assert {event.cause for event in fallback.events} == {"stall"}
    assert module.residual_rescaled is True
    assert torch.isfinite(torch.cat([each.flatten() for each in module.parameters()])).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_pre_norm_stack_is_left_alone(seed, tmp_path):
    """The same stack, data and rate, norm first: zero events."""
    fallback, module = run(tmp_path, seed, 60, pre_norm=True)
    assert fallback.events == []
    assert module.trainer.callback_metrics["loss"] < 3.4


@pytest.mark.slow
def test_a_stall_in_a_dry_run_is_reported_when_it_comes_and_not_at_every_step(tmp_path):
    """Named at step 33; the gradient comes back to a fifth of its share, and is gone for good from step 45 on."""
    fallback, _ = run(tmp_path, 0, 60, dry_run=True)
    assert {(event.cause, event.action) for event in fallback.events} == {("stall", "report")}
    assert 1 <= len(fallback.events) <= 2
    assert fallback.events[0].step < 40
