"""AfterStep, UnitMatrices and AdminProfile: what a placement needs of a trainer, on our decoder and on foreign ones."""

import pickle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_norms.callbacks.admin_profile import AdminProfile
from lightning_norms.callbacks.after_step import AfterStep
from lightning_norms.callbacks.unit_matrices import UnitMatrices, unit_matrices
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import SwiGLU
from lightning_norms.module import DecoderModule
from lightning_norms.placements import NGPT, Admin, PreNorm, ProRes
from tests import stand_ins

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint"),
]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("taken", torch.zeros((), dtype=torch.long))

    def after_step(self):
        self.taken += 1


class Foreign(LightningModule):
    """Knows nothing of this package."""

    def __init__(self):
        super().__init__()
        self.part = Counter()

    def training_step(self, batch, batch_idx):
        return (self.part.weight - batch.mean()) ** 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, *callbacks, steps=4, data=None, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "accelerator": "cpu", "max_steps": steps}  # fmt: skip
    trainer = Trainer(callbacks=list(callbacks), **{**quiet, **options})
    trainer.fit(module, data or DataLoader(torch.randn(64, 2), batch_size=4))
    return trainer


def tokens():
    windows = torch.randint(0, 11, (64, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"inputs": w[:-1], "targets": w[1:]} for w in windows]
    return DataLoader(rows, batch_size=8)


def decoder_module(placement, **options):
    torch.manual_seed(0)
    config = {"vocab_size": 11, "d_model": 16, "n_heads": 2, "n_layers": 3, "context_length": 8}
    return DecoderModule(DecoderConfig(**config, placement=placement, **options), weight_decay=0.0)


def test_steps_are_counted_once_a_window_and_over_two_fits():
    module, callback = Foreign(), AfterStep()
    fit(module, callback, steps=3, accumulate_grad_batches=2)
    assert module.part.taken == 3
    fit(module, callback, steps=2)
    assert module.part.taken == 5
    pickle.loads(pickle.dumps(callback))


def test_a_failed_run_leaves_no_hook():
    module, callback = Foreign(), AfterStep()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: optimizer
    module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, callback)
    optimizer.step()
    assert module.part.taken == 0


def test_prores_opens_block_by_block_and_survives_a_resume(tmp_path):
    module = decoder_module(ProRes(PreNorm(), warmup_steps=4))
    trainer = fit(module, AfterStep(), steps=6, data=tokens())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    factors = [(block.attention_residual.after[1](torch.ones(1))).item() for block in module.decoder.blocks]
    assert factors == pytest.approx([1.0, 6 / 8, 6 / 12])
    again = DecoderModule.load_from_checkpoint(tmp_path / "run.ckpt")
    assert again.decoder.blocks[2].feed_forward_residual.after[1].taken == 6
    fit(again, AfterStep(), steps=8, data=tokens())  # a new fit with trained weights goes on where they are
    assert again.decoder.blocks[2].feed_forward_residual.after[1].taken == 14


def test_prores_without_the_callback_is_refused():
    with pytest.raises(ValueError, match=r"ProRes changes with every step.*AfterStep"):
        fit(decoder_module(ProRes()), data=tokens())


@pytest.mark.parametrize("feed_forward", [SwiGLU(), None], ids=["SwiGLU", "GELU"])
def test_matrices_of_ngpt_stay_on_the_sphere(feed_forward):
    module = decoder_module(NGPT(), **({"feed_forward": feed_forward} if feed_forward else {}))
    fit(module, UnitMatrices(), data=tokens())
    block = module.decoder.blocks[1]
    for matrix in (block.attention.query, block.attention.key, block.attention.value, block.feed_forward.up):
        torch.testing.assert_close(matrix.weight.norm(dim=1), torch.ones(matrix.weight.shape[0]))
    for writer in (block.attention.writer, block.feed_forward.writer):
        torch.testing.assert_close(writer.weight.norm(dim=0), torch.ones(writer.weight.shape[1]))
    torch.testing.assert_close(module.decoder.embedding.weight.norm(dim=1), torch.ones(11))
    assert len(unit_matrices(module)) == 1 + 3 * (7 if feed_forward else 6)


def test_unit_matrices_on_a_foreign_decoder():
    module = stand_ins.Module()
    pattern = r"(attention\.writer|feed_forward\.writer)\.weight"
    for callback in (UnitMatrices(), UnitMatrices(pattern)):
        along = unit_matrices(module, callback.pattern)
        block = module.decoder.blocks[0]
        assert (along[block.attention.writer.weight], along[block.attention.query.weight]) == (0, 1)
    with pytest.raises(ValueError, match="not a regular expression"):
        UnitMatrices("(")
    with pytest.raises(ValueError, match="matches nothing"):
        unit_matrices(module, "nowhere")


def test_admin_is_profiled_once_on_the_first_batch():
    module, callback = decoder_module(Admin()), AdminProfile()
    before = {name: p.clone() for name, p in module.named_parameters()}
    callback.on_train_batch_start(Trainer(logger=False, accelerator="cpu"), module, next(iter(tokens())), 0)
    residuals = [r for b in module.decoder.blocks for r in (b.attention_residual, b.feed_forward_residual)]
    omegas = [float(residual.skip.weight[0].detach()) for residual in residuals]
    assert callback.state_dict() == {"omegas": pytest.approx(omegas)}
    assert omegas[0] == 1.0
    assert omegas[1:] == sorted(omegas[1:])
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= {name for name in before if name.endswith("skip.weight")}


def test_admin_trains_with_its_profile_and_is_not_profiled_again(tmp_path):
    module, callback = decoder_module(Admin()), AdminProfile()
    trainer = fit(module, callback, steps=2, data=tokens())
    assert len(callback.state_dict()["omegas"]) == 6
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    first = callback.state_dict()
    moved = module.decoder.blocks[2].feed_forward_residual.skip.weight.detach().clone()
    other = AdminProfile()
    resumed = decoder_module(Admin())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(callbacks=[other], max_steps=2, enable_model_summary=False, **quiet)
    trainer.fit(resumed, tokens(), ckpt_path=tmp_path / "run.ckpt")
    assert other.state_dict() == first
    assert torch.equal(resumed.decoder.blocks[2].feed_forward_residual.skip.weight, moved)


def test_callbacks_do_nothing_to_a_network_that_asks_for_nothing():
    plain, watched = decoder_module(PreNorm()), decoder_module(PreNorm())
    fit(plain, data=tokens())
    fit(watched, AfterStep(), AdminProfile(), data=tokens())
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert isinstance(watched.decoder, Decoder)
