"""LRFallback beside weight averages, freezing and rescaling."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_norms.callbacks.depth_monitor import DepthMonitor
from lightning_norms.callbacks.lr_fallback import LRFallback
from lightning_norms.callbacks.residual_rescale import ResidualRescale
from tests.callbacks.fallback_runs import RESUMING, Learner, assert_same, fit, is_finite, what
from tests.callbacks.test_warmup import SaveAt
from tests.stand_ins import Decoder, lightning_callback, seeded, trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in RESUMING]


@pytest.mark.parametrize("order", [1, -1])
def test_weight_averages_go_back_too(order, tmp_path):
    """The average of the snapshot, and the average's own update at the end of that batch."""

    class Average(Callback):
        def __init__(self):
            self.kept = {}

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            weights = ema._average_model.module.decoder.head.weight
            self.kept[trainer.global_step] = (weights.detach().clone(), pl_module.decoder.head.weight.detach().clone())

    ema, average = lightning_callback("EMAWeightAveraging")(decay=0.9), Average()
    fallback = LRFallback(snapshot_every_n_steps=6, max_skips=0)
    module = Learner({9: "nan"})
    trainer(tmp_path, *[fallback, ema][::order], average, max_steps=12).fit(module)
    assert what(fallback) == [(9, "non_finite", "rollback")]
    kept, weights = average.kept[6]
    # In this order the snapshot is taken before the average of step 6, which is then made again; else it is one more.
    expected = kept if order == 1 else kept.lerp(weights, 0.1)
    torch.testing.assert_close(average.kept[10][0], expected, rtol=0, atol=1e-7)
    assert torch.equal(average.kept[10][1], weights)
    assert is_finite(module)


class Freezes(Callback):
    """Changes at step 20 which of the lower three blocks' parameters are trained."""

    def __init__(self, way):
        self.way = way

    def set(self, module, free):
        for block in module.decoder.blocks[:3]:
            for name, parameter in block.named_parameters():
                parameter.requires_grad_(free or (self.way == "biases only" and name == "norm_2.bias"))

    def on_train_start(self, trainer, pl_module):
        if self.way == "thaw":
            self.set(pl_module, False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 20:
            self.set(pl_module, self.way == "thaw")

    def on_after_backward(self, trainer, pl_module):
        if self.way == "biases only" and trainer.global_step >= 20:
            for block in pl_module.decoder.blocks[:3]:
                block.norm_2.bias.grad *= 1e-4  # as in a very wide model


@pytest.mark.parametrize("way", ["thaw", "freeze", "biases only"])
def test_freezing_and_unfreezing_is_no_stall(way, tmp_path):
    """The shares of the gradient change at step 20 by orders of magnitude, and the comparison starts anew."""
    assert fit(tmp_path, Learner(layers=4), Freezes(way), steps=50).events == []


def test_a_late_parameter_group_survives_a_rollback(tmp_path):
    """As BackboneFinetuning does it: unfrozen and added to the optimizer at step 8; back to step 6 at step 10."""

    class Thaw(Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.decoder.blocks[0].requires_grad_(False)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 8:
                pl_module.decoder.blocks[0].requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(pl_module.decoder.blocks[0].parameters())})

    module = Learner({10: "nan"})
    module.make_optimizer = lambda _: torch.optim.AdamW(
        [each for name, each in module.named_parameters() if "blocks.0." not in name], lr=0.01
    )
    fallback = fit(tmp_path, module, Thaw(), fallback=LRFallback(max_skips=0, snapshot_every_n_steps=6), steps=14)
    assert what(fallback) == [(10, "non_finite", "rollback")]
    assert is_finite(module)
    steps = {float(state["step"]) for state in module.trainer.optimizers[0].state.values()}
    assert steps == {9.0, 3.0}  # 6 and three more; the late group starts its own count after the rollback


class Restarts(Learner):
    """What the first step after a restart finds."""

    def __init__(self, faults=()):
        super().__init__(faults, decoder=seeded(lambda: Decoder(3)))

    def on_train_start(self):
        self.found = []

    def on_train_batch_start(self, batch, batch_idx):
        self.found.append({name: each.detach().clone() for name, each in self.named_parameters()})


@pytest.mark.parametrize("resumed", [False, True])
def test_the_rescale_is_applied_once_over_two_restarts(resumed, tmp_path):
    """After each restart the six writers are the start's / sqrt(6), all else is the start's; also over a resume."""
    options = {"max_skips": 0, "max_rollbacks": 0, "rescale_on_restart": True}
    module = Restarts({5: "nan", 12: "nan"})
    start = {name: each.detach().clone() for name, each in module.named_parameters()}
    fallback = fit(tmp_path, module, SaveAt(tmp_path, 9), fallback=LRFallback(**options), steps=14)
    found, second = module.found[6], module.found[13]
    if resumed:
        module = Restarts({12: "nan"})
        fallback = LRFallback(**options)
        fit(tmp_path, module, fallback=fallback, steps=14, ckpt_path=tmp_path / "9.ckpt")
        second = module.found[-1]
    assert fallback.rescue.ladder.restarts == 2
    assert module.residual_rescaled is True
    for name, value in start.items():
        expected = value * 6**-0.5 if "writer.weight" in name else value
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=0)
    assert_same(found, second)


def test_the_rescale_is_left_out_where_it_was_done(tmp_path):
    """Beside ResidualRescale: the start has the factor already, and a restart does not apply it again."""
    module = Restarts({5: "nan"})
    options = {"max_skips": 0, "max_rollbacks": 0, "rescale_on_restart": True}
    fit(tmp_path, module, ResidualRescale(), fallback=LRFallback(**options), steps=8)
    assert_same(module.found[0], module.found[6])


@pytest.mark.parametrize("kind", ["scaled", "trained"])
def test_the_rescale_is_left_out_where_the_start_has_no_need_of_it(kind, tmp_path):
    """An init that has the factor already, or weights that were trained before: a restart only goes back to them."""
    module = Restarts({5: "nan"})
    for block in module.decoder.blocks:
        if kind == "scaled":
            block.attention.writer.weight.data *= 6**-0.5
            block.feed_forward.writer.weight.data *= 6**-0.5
        else:
            block.norm_1.weight.data[0] = 1.1
    options = {"max_skips": 0, "max_rollbacks": 0, "rescale_on_restart": True}
    fit(tmp_path, module, fallback=LRFallback(**options), steps=8)
    assert_same(module.found[0], module.found[6])


class ReadsGradients(Learner):
    """Logs its own gradient norm in the hook, without a guard for None, and clips by itself."""

    def __init__(self, *arguments, manual=False, **options):
        super().__init__(*arguments, **options)
        self.norms, self.clipped = [], 0
        if manual:
            self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer):
        grads = [parameter.grad for parameter in self.parameters()]
        self.norms.append(torch.stack([grad.norm() for grad in grads]).norm().item())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clipped += 1
        self.clip_gradients(optimizer, 1e3, "norm")


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("max_skips", [3, 0])
def test_hooks_of_the_module_find_the_gradients_of_a_step_that_does_not_happen(max_skips, manual, tmp_path):
    faults = {9: "nan", 20: "high"}
    fallback, module = LRFallback(max_skips=max_skips, snapshot_every_n_steps=6), ReadsGradients(faults, manual=manual)
    fit(tmp_path, module, fallback=fallback, steps=24)
    action = "rollback" if max_skips == 0 else "skip"
    assert [(event.step, event.action) for event in fallback.events] == [(9, action), (20, action)]
    assert len(module.norms) == 24
    assert [step for step, norm in enumerate(module.norms) if not norm > 0] == [9]
    assert module.norms[20] > 2 * module.norms[19]
    assert module.clipped == (0 if manual else 22)  # not for a step that does not happen
    assert is_finite(module)
    assert not {"on_before_optimizer_step", "configure_gradient_clipping"} & vars(module).keys()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("max_skips", [3, 0])
def test_the_monitor_records_true_gradients_of_a_step_that_does_not_happen_in_any_order(max_skips, order, tmp_path):
    def record(*callbacks):
        monitor = DepthMonitor(every_n_steps=1, table=False, picture=False)
        trainer(tmp_path, *[*callbacks, monitor][::order], max_steps=21).fit(Learner({20: "high"}))
        return dict(zip(monitor.history.columns, monitor.history.rows[20], strict=True))

    bare, ours = record(), record(LRFallback(max_skips=max_skips, snapshot_every_n_steps=6))
    grads = [name for name in bare if name.startswith("grad_norm/block")]
    assert len(grads) == 2
    assert [ours[name] for name in grads] == [bare[name] for name in grads]
    assert all(ours[name] == 0.0 for name in ours if name.startswith("update_ratio") and max_skips)
