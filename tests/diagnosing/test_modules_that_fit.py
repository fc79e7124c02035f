"""What Trainer.fit takes, diagnose takes: other signatures, streams, and modules that write files of their own."""

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_norms import diagnose
from lightning_norms.reports.diagnosis.data import Diagnosis


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.head(self.body(batch)).flatten(0, 1), ((3 * batch + 1) % 8).flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class WithoutNumber(Net):
    def training_step(self, batch):
        return self.loss(batch)


class OtherName(Net):
    def training_step(self, tokens, number):
        assert isinstance(number, int)
        return self.loss(tokens)


class FromIterator(Net):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Once(IterableDataset):
    """Batches of one stream, which is opened only once."""

    def __init__(self, batches):
        self.stream = iter(list(data(batches)))

    def __iter__(self):
        yield from self.stream


def data(batches=8):
    tokens = torch.randint(8, (4 * batches, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(tokens, batch_size=4)


def once(batches):
    return DataLoader(Once(batches), batch_size=None)


def trainer(folder, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_steps": 100, "enable_checkpointing": False, **quiet, **options}
    return Trainer(default_root_dir=folder, **options)


@pytest.mark.parametrize("kind", [WithoutNumber, OtherName, FromIterator])
def test_any_signature_of_training_step(tmp_path, kind):
    result = diagnose(kind(), data(), trainer(tmp_path), steps=5)
    assert isinstance(result, Diagnosis)
    assert all(len(trial.losses) == 5 for trial in result.trials)
    assert (result.look.logit_change is None) == (kind is FromIterator)  # its batch is gone after the step


def test_a_stream_that_ends_too_soon_for_the_run_as_given(tmp_path):
    with pytest.raises(ValueError, match="the data ran out after 8 of 9 steps; every trial reads them from the start"):
        diagnose(Net(), once(10), trainer(tmp_path), steps=9)


def test_a_stream_that_ends_in_a_later_trial_leaves_the_verdict_as_it_is(tmp_path):
    result = diagnose(Net(), once(20), trainer(tmp_path), steps=9)
    assert {trial.name for trial in result.trials if len(trial.losses) < 9} == set()
    assert any(note.startswith("lr/10 could not be tried: the data ran out after") for note in result.notes)


@pytest.mark.parametrize("batches", [0, 1])
def test_an_empty_stream_ends_with_a_sentence(tmp_path, batches):
    with pytest.raises(ValueError, match=r"provides no batch|ran out after 0"):
        diagnose(Net(), once(batches), trainer(tmp_path), steps=3)


def test_a_run_whose_only_epoch_is_short_is_judged_by_its_own_length(tmp_path):
    class Again(IterableDataset):
        def __iter__(self):
            yield from data(7)

    loaders = DataLoader(Again(), batch_size=None)
    result = diagnose(Net(), loaders, trainer(tmp_path, max_steps=-1, max_epochs=1), steps=9)
    assert {len(trial.losses) for trial in result.trials} == {7}
    assert not any("ran out" in note for note in result.notes)


WAYS = {
    "trainer.log_dir": lambda module: module.trainer.log_dir,
    "trainer.default_root_dir": lambda module: module.trainer.default_root_dir,
    "logger.save_dir": lambda module: module.logger.save_dir,
    "logger.root_dir": lambda module: module.logger.root_dir,
    "logger.log_dir": lambda module: module.logger.log_dir,
    "experiment.log_dir": lambda module: module.logger.experiment.log_dir,
    "experiment.get_logdir()": lambda module: module.logger.experiment.get_logdir(),
}


@pytest.mark.parametrize("way", WAYS)
def test_files_of_the_module_go_to_a_folder_that_is_gone_afterwards(tmp_path, way):
    folders = []

    class Writer(Net):
        def on_train_start(self):
            folders.append(WAYS[way](self))
            name = f"{self.logger.name}-{self.logger.version + 1}.txt"
            Path(folders[-1], name).write_text("sample", encoding="utf-8")
            self.logger.log_image(key="sample", images=[])

    logger = CSVLogger(tmp_path, name="mine", version=4)
    owner = trainer(tmp_path, logger=logger)
    diagnose(Writer(), data(), owner, steps=3, trials=False)
    assert list(tmp_path.iterdir()) == []
    assert not Path(folders[0]).exists()
    assert owner.default_root_dir == str(tmp_path)
    assert owner.logger is logger


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((None,), "module must be a LightningModule, .* got NoneType"),
        ((nn.Linear(2, 2),), "got Linear"),
        ((nn.Module(),), "got Module"),
        ((Net,), "got a LightningModule class, not an instance"),
        ((Net(), None, data()), "the order is diagnose"),
    ],
    ids=["None", "a layer", "a module", "a class", "another order"],
)
def test_what_is_no_lightning_module_gets_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        diagnose(*arguments)
    assert "\n" not in str(error.value)


def test_a_trainer_in_the_place_of_the_data_gets_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"diagnose\(module, data, trainer\), got data=Trainer"):
        diagnose(Net(), trainer(tmp_path))


def test_batches_with_nan_and_a_baseline_that_ends_early_are_the_same_batches(tmp_path):
    class Measurements(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            return self.head(batch.nan_to_num()).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e30)

    rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    rows[::2, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = diagnose(Measurements(), DataLoader(rows, batch_size=4), trainer(tmp_path), steps=9)
    assert len(result.trials[0].losses) < 9  # NaN ended it
    assert not any("different batches" in note for note in result.notes)
