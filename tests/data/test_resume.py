"""Lightning sees every batch once and in order: over epochs, checkpoints, accumulation, workers, second fits."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_norms.data.text import TextDataModule

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

STEPS = 5  # batches of a pass: 20 windows of 4 tokens, by 4


class Recorder(LightningModule):
    """A model that does nothing but note its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches, self.epoch_ends, self.validated = [], [], []
        self.fail_at = None

    def training_step(self, batch, index):
        if self.trainer.fit_loop.total_batch_idx == self.fail_at:
            raise RuntimeError("as planned")
        self.batches.append((self.current_epoch, index, batch["inputs"].tolist()))
        return self.weight.sum()

    def on_train_epoch_end(self):
        self.epoch_ends.append(len(self.batches))

    def validation_step(self, batch, index, dataloader_idx=0):
        self.validated.append((dataloader_idx, batch["inputs"].tolist()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def make(tmp_path):
    (tmp_path / "train.txt").write_bytes(bytes(range(1, 84)))
    (tmp_path / "val.txt").write_bytes(bytes(range(100, 120)))

    def make(**arguments):
        sizes = {"context_length": 4, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
        return TextDataModule(str(tmp_path / "train.txt"), {"v": str(tmp_path / "val.txt")}, **{**sizes, **arguments})

    return make


def trainer(tmp_path, callbacks=(), **arguments):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(
        **{**quiet, "default_root_dir": tmp_path, "callbacks": list(callbacks), "max_epochs": -1, **arguments},
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )


def saving(tmp_path, every):
    return ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=every, save_top_k=-1)


@pytest.mark.parametrize(("accumulate", "every", "workers"), [(1, 7, 0), (1, 5, 0), (2, 2, 0), (1, 7, 2)])
def test_a_resumed_run_sees_the_batches_of_an_uninterrupted_one(tmp_path, make, accumulate, every, workers):
    arguments = {"max_steps": 12 // accumulate, "accumulate_grad_batches": accumulate}
    whole, resumed = Recorder(), Recorder()
    trainer(tmp_path, [saving(tmp_path, every)], **arguments).fit(whole, make())
    path = tmp_path / "saved" / f"step={every}.ckpt"
    saved = torch.load(path, weights_only=True)
    done = saved["TextDataModule"]["batches"]
    assert done == {7: 7, 5: 5, 2: 4}[every]
    assert all(type(value) is int for value in saved["TextDataModule"].values())

    trainer(tmp_path, **arguments).fit(resumed, make(num_workers=workers), ckpt_path=path)
    assert resumed.batches == whole.batches[done:]
    assert [end + done for end in resumed.epoch_ends] == [end for end in whole.epoch_ends if end > done]
    assert [index for _, index, _ in whole.batches[:STEPS]] == list(range(STEPS))
    data = [batch for _, _, batch in whole.batches]
    assert data[:5] != data[5:10]


def test_a_resumed_run_may_ask_for_the_number_of_steps_early(tmp_path, make):
    class Asking(Recorder):
        def configure_optimizers(self):
            # Makes Lightning build the loader, and its workers fetch ahead, before it restores the loops.
            assert self.trainer.estimated_stepping_batches == 15
            return super().configure_optimizers()

    whole, resumed = Asking(), Asking()
    trainer(tmp_path, [saving(tmp_path, 7)], max_epochs=3).fit(whole, make())
    trainer(tmp_path, max_epochs=3).fit(resumed, make(num_workers=2), ckpt_path=tmp_path / "saved" / "step=7.ckpt")
    assert resumed.batches == whole.batches[7:]


def test_each_epoch_is_a_pass(tmp_path, make):
    model, data = Recorder(), make()
    trainer(tmp_path, max_epochs=2).fit(model, data)
    assert model.epoch_ends == [STEPS, 2 * STEPS]
    order = data._train_order()
    starts = [[row[0] for row in batch] for _, _, batch in model.batches]
    assert starts == [order.offsets(step, 0).tolist() for step in range(10)]  # byte k is at position k


def test_a_batch_that_failed_is_trained_on_after_resume(tmp_path, make):
    class SaveOnFailure(Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    whole, failing, resumed = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, max_steps=12).fit(whole, make())
    failing.fail_at = 7
    with pytest.raises(RuntimeError, match="as planned"):
        trainer(tmp_path, [SaveOnFailure()], max_steps=12).fit(failing, make())
    trainer(tmp_path, max_steps=12).fit(resumed, make(), ckpt_path=tmp_path / "failed.ckpt")
    assert failing.batches + resumed.batches == whole.batches


def test_a_checkpoint_after_the_end_goes_on_there(tmp_path, make):
    whole, first, second = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, max_steps=12).fit(whole, make())
    stopped = trainer(tmp_path, max_steps=7)
    stopped.fit(first, make())
    stopped.save_checkpoint(tmp_path / "end.ckpt")
    trainer(tmp_path, max_steps=12).fit(second, make(), ckpt_path=tmp_path / "end.ckpt")
    # Lightning has counted the unfinished epoch as finished (so the epoch's number differs); the batches go on.
    assert [seen[1:] for seen in first.batches + second.batches] == [seen[1:] for seen in whole.batches]


def test_a_second_fit_of_a_new_trainer_starts_over_and_of_the_same_one_goes_on(tmp_path, make):
    data, first, second, third = make(), Recorder(), Recorder(), Recorder()
    data.load_state_dict({"batches": 3})  # left from an earlier, resumed run
    trainer(tmp_path, max_steps=7).fit(first, data)
    order = data._train_order()
    assert [row[0] for row in first.batches[0][2]] == order.offsets(0, 0).tolist()
    again = trainer(tmp_path, max_epochs=1)
    again.fit(second, data)
    assert second.batches == first.batches[:STEPS]
    again.fit_loop.max_epochs = 2
    again.fit(third, data)
    assert [batch for *_, batch in third.batches][:2] == [batch for *_, batch in first.batches[STEPS:7]]


def test_peeking_at_batches_does_not_move_the_run(tmp_path, make):
    class Peek(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            peeked = next(iter(trainer.datamodule.train_dataloader()))
            trainer.strategy.batch_to_device(peeked, torch.device("cpu"))

    whole, peeking = Recorder(), Recorder()
    trainer(tmp_path, max_steps=12).fit(whole, make())
    trainer(tmp_path, [Peek()], max_steps=12).fit(peeking, make())
    assert peeking.batches == whole.batches


def test_workers_and_limits_change_no_batch(tmp_path, make):
    whole, workers, limited = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, max_steps=12).fit(whole, make())
    trainer(tmp_path, max_steps=12).fit(workers, make(num_workers=2))
    assert workers.batches == whole.batches
    trainer(tmp_path, max_steps=12, limit_train_batches=3).fit(limited, make())
    assert [batch for *_, batch in limited.batches] == [batch for *_, batch in whole.batches]
    assert limited.epoch_ends == [3, 6, 9, 12]


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_repeats_the_same_batches(tmp_path, make):
    model = Recorder()
    trainer(tmp_path, max_epochs=2, overfit_batches=2, limit_val_batches=0).fit(model, make())
    data = [batch for *_, batch in model.batches]
    assert len(data) == 4
    assert data[:2] == data[2:]


def test_validation_is_the_same_each_time(tmp_path, make):
    model = Recorder()
    trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(model, make())
    half = len(model.validated) // 2
    assert half == 2  # 20 targets in 5 windows, by 4
    assert model.validated[:half] == model.validated[half:]


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_no_validation_set_is_no_validation(tmp_path, make):
    data, model = make(), Recorder()
    trainer(tmp_path, max_epochs=1).fit(model, TextDataModule(data.train, {}, 4, 4, cache_dir=data.cache_dir))
    assert (len(model.batches), model.validated) == (STEPS, [])


def test_a_changed_order_is_said_when_a_run_is_resumed(tmp_path, make, caplog):
    trainer(tmp_path, [saving(tmp_path, 7)], max_steps=7).fit(Recorder(), make())
    trainer(tmp_path, max_steps=8).fit(Recorder(), make(seed=1), ckpt_path=tmp_path / "saved" / "step=7.ckpt")
    assert "the data order differs from the checkpoint's, some text may come twice: {'seed': '0 -> 1'}" in caplog.text
