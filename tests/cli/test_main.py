"""The command line as a user meets it: recipes by name, one-word choices, foreign modules, short errors."""

import re

import pytest
import torch
import yaml

from lightning_norms import recipes
from lightning_norms.cli import error_messages
from lightning_norms.cli.main import main
from lightning_norms.model.placements.single_stream import DeepNorm, PostNorm
from lightning_norms.model.residual import Placement
from lightning_norms.module import DecoderModule

pytestmark = [
    pytest.mark.filterwarnings("ignore:Warmup takes 10 optimizer steps"),  # and the tests run for 3
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # a resumed run has a log folder of its own
]

SHORT = [
    "--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu",
]  # fmt: skip
CSV = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.log_every_n_steps=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def losses(folder, version=0, column="train/loss"):
    import csv

    with (folder / f"lightning_logs/version_{version}/metrics.csv").open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def checkpoint(folder, version=0):
    return folder / f"lightning_logs/version_{version}/checkpoints/last.ckpt"


def fit(*arguments):
    main(["fit", "--config", "tiny.yaml", *SHORT, "--trainer.callbacks.every_n_train_steps=1", *arguments])


def test_fit_ends_with_table_picture_and_bits_per_byte(folder, capsys):
    fit()
    out = capsys.readouterr().out
    assert "Gradient norm by depth" in out
    assert re.search(r"val/code/bits_per_byte *│ *\d\.\d+ │ bits/byte", out)
    assert re.search(r"val/prose/bits_per_byte *│ *\d\.\d+ │ bits/byte", out)
    assert (folder / "lightning_logs/version_0/grad_norm_by_depth.png").stat().st_size > 1000
    assert max(len(line) for line in out.splitlines() if "│" in line or "━" in line) <= 80


def test_one_word_chooses_a_placement(folder):
    fit("--model.decoder.placement=DeepNorm", "--model.decoder.placement.alpha=1.5")
    assert DecoderModule.load_from_checkpoint(checkpoint(folder)).config.placement == DeepNorm(alpha=1.5)


def test_saved_config_repeats_the_run(folder):
    """Case 50: from the saved file, in the same folder, the same first loss."""
    fit(*CSV)
    main(["fit", "--config", "lightning_logs/version_0/config.yaml"])
    assert losses(folder, 0) == losses(folder, 1)


def test_printed_config_can_be_fed_back(folder, capsys):
    with pytest.raises(SystemExit) as stop:
        fit("--print_config")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["model"]["init_args"]["decoder"]["n_layers"] == 2
    (folder / "printed.yaml").write_text(printed)
    main(["fit", "--config", "printed.yaml", *CSV])
    assert len(losses(folder)) == 3


def test_checkpoint_does_not_override_the_yaml(folder):
    """On resume the learning rate is the one that the user typed, not the one in the checkpoint."""
    fit(*CSV)
    fit(*CSV, "--trainer.max_steps=6", f"--ckpt_path={checkpoint(folder)}", "--model.learning_rate=0.5", "--model.weight_decay=0.25")  # fmt: skip
    resumed = torch.load(checkpoint(folder, 1), weights_only=True)
    assert resumed["hyper_parameters"]["learning_rate"] == 0.5
    groups = resumed["optimizer_states"][0]["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.5, 0.25), (0.5, 0.0)]
    assert resumed["global_step"] == 6


def test_resume_with_another_shape_says_so(folder, capsys):
    fit()
    with pytest.raises(RuntimeError, match="size mismatch"):
        fit(f"--ckpt_path={checkpoint(folder)}", "--model.decoder.d_model=32")


def test_resumed_losses_equal_the_uninterrupted_ones(folder):
    fit(*CSV, "--trainer.max_steps=6")
    middle = folder / "lightning_logs/version_0/checkpoints"
    fit(*CSV, "--trainer.max_steps=3")
    fit(*CSV, "--trainer.max_steps=6", f"--ckpt_path={checkpoint(folder, 1)}")
    assert middle.exists()
    assert losses(folder, 0) == losses(folder, 1) + losses(folder, 2)


FOREIGN = """
import torch
from lightning.pytorch import LightningModule

class Mine(LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, width)) for _ in range(3))
        self.out = torch.nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch["inputs"])
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.out(x).flatten(0, 1), batch["targets"].flatten())

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_somebody_elses_module_with_our_callbacks(folder, capsys):
    """Acceptance: `fit --config tiny.yaml --model mine.Mine`; the rescale is told where the writers are."""
    (folder / "mine.py").write_text(FOREIGN)
    config = yaml.safe_load(recipes.find("tiny").read_text())
    callbacks = config["trainer"]["callbacks"]
    next(c for c in callbacks if c["class_path"] == "ResidualRescale")["init_args"]["pattern"] = (
        r"layers\.\d+\.1\.weight"
    )
    (folder / "tiny_mine.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "tiny_mine.yaml", "--model", "mine.Mine", *SHORT, *CSV])
    out = capsys.readouterr().out
    assert "block_02" in out
    effective = losses(folder, column="learning_rate/effective/0")
    assert effective == pytest.approx([0.01, 0.02, 0.03])  # a warmup of 10 steps to 0.1


def test_generate_needs_only_the_checkpoint(folder, capsys):
    fit()
    capsys.readouterr()
    said = []
    for seed in (3, 3, 4):
        with pytest.raises(SystemExit) as stop:
            main(["generate", "--ckpt_path", str(checkpoint(folder)), "--prompt", "def ", "--seed", str(seed)])
        assert stop.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith("def ")
    assert said[0] == said[1] != said[2]


def test_recipes_are_listed_shown_and_copied(folder, capsys):
    for arguments in ([], ["ls"], ["show", "post48"], ["cp", "post48.yaml"], ["cp", "tiny", "here.yaml"]):
        with pytest.raises(SystemExit) as stop:
            main(["recipes", *arguments])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.count("tiny") >= 2
    assert "command   python -m lightning_norms fit --config post48.yaml" in out
    assert (folder / "post48.yaml").read_text() in out
    assert (folder / "here.yaml").exists()


def test_a_file_here_wins_over_a_recipe_of_the_same_name(folder):
    main_config = {"trainer": {"max_steps": 0}, "model": {"class_path": "DecoderModule", "init_args": {"decoder": {"placement": "PostNorm"}}}}  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(main_config))
    main(["fit", "--config", "tiny.yaml", *SHORT, "--trainer.max_steps=1"])
    saved = yaml.safe_load((folder / "lightning_logs/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["decoder"]["placement"]["class_path"].endswith(PostNorm.__name__)


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["recipes", "--help"], ["generate", "--help"]])
def test_help_needs_nothing(folder, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "lightning_norms" in said
    assert list(folder.iterdir()) == []
    if arguments[0] == "fit":
        assert [name for name in error_messages.subclasses(Placement) if name not in said] == []
        assert "(type: " in said


FIT = ["fit", "--config", "tiny.yaml"]
CALLBACK = "trainer: {{callbacks: [{{class_path: {0}, init_args: {{{1}}}}}]}}"
MISTAKES = [
    # arguments, YAML of a file wrong.yaml, words that the message must have
    ([*FIT, "--model.decoder.n_layerz=4"], "", ["n_layerz", "n_layers"]),
    (["fit", "--config", "wrong.yaml"], "model: {class_path: DecoderModule, init_args: {decoder: {n_layerz: 4}}}", ["n_layerz", "Did you mean n_layers"]),
    ([*FIT, "--model.decoder.placement=DeepNrom"], "", ["model.decoder.placement", "'DeepNrom'", "one of DeepNorm, "]),
    ([*FIT, "--model.decoder.d_model=65"], "", ["d_model is 65", "multiple of n_heads, 4"]),
    ([*FIT, "--model.decoder.d_model=abc"], "", ["model.decoder.d_model", "'abc'", "whole number"]),
    ([*FIT, "--model.decoder.n_layers=1e3"], "", ["model.decoder.n_layers", "1000", "whole number"]),
    ([*FIT, "--model.learning_rate=.nan"], "", ["learning_rate is nan", "0 <= learning_rate"]),
    ([*FIT, "--model.learning_rate=null"], "", ["learning_rate is None", "number"]),
    ([*FIT, "--model.betas=[0.9, 1.0]"], "", ["betas", "1.0", "< 1"]),
    (["fit", "--config", "wrong.yaml"], CALLBACK.format("Warmup", "schedule: {class_path: LinearWarmup, init_args: {warmup_steps: -1}}"), ["warmup_steps", "-1"]),
    (["fit", "--config", "wrong.yaml"], CALLBACK.format("Warmup", "schedule: {class_path: LinearWarmup, init_args: {warmup_steps: .nan}}"), ["warmup_steps", "nan"]),
    (["fit", "--config", "wrong.yaml"], CALLBACK.format("Warmup", "schedule: {class_path: LinearWarmup, init_args: {warmup_step: 4}}"), ["warmup_step", "Did you mean warmup_steps"]),
    (["fit", "--config", "wrong.yaml"], CALLBACK.format("ResidualRescale", "rule: {class_path: ConstantRescale, init_args: {factor: .nan}}"), ["factor", "nan"]),
    (["fit", "--config", "wrong.yaml"], CALLBACK.format("DepthMonitor", "every_n_steps: 0"), ["every_n_steps", "0"]),
    (["fit", "--config", "wrong.yaml"], CALLBACK.format("Warmupp", ""), ["'Warmupp'", "Warmup"]),
    (["fit", "--config", "wrong.yaml"], "modle: {class_path: DecoderModule}", ["modle", "model"]),
    (["fit", "--config", "wrong.yaml"], "model: [", ["wrong.yaml", "line"]),
    (["fit", "--config", "nowhere.yaml"], "", ["nowhere.yaml", "post48"]),
    ([*FIT, "--model=nowhere.Module"], "", ["nowhere"]),
    ([*FIT, "--data.train=nowhere.txt"], "", ["nowhere.txt"]),
    ([*FIT, "--data.batch_size=0"], "", ["batch_size", "0"]),
    ([*FIT, "--data.context_length=128"], "", ["context_length is 128", "64"]),
    ([*FIT, "--trainer.max_stepz=3"], "", ["max_stepz", "max_steps"]),
    ([*FIT, "--trainer.accelerator=gpux"], "", ["gpux", "cpu"]),
    ([*FIT, "--ckpt_path=nowhere.ckpt"], "", ["nowhere.ckpt"]),
    (["fti"], "", ["fti", "fit"]),
    ([], "", ["fit --config"]),
    (["recipes", "show", "nothing"], "", ["nothing", "post48"]),
    (["generate", "--ckpt_path", "nothing.ckpt"], "", ["nothing.ckpt"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text", "words"), MISTAKES, ids=lambda v: " ".join(v)[-60:] if isinstance(v, list) else ""
)
def test_a_mistake_gives_one_short_message_and_exit_code_2(folder, arguments, text, words, capsys):
    if text:
        (folder / "wrong.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    message = error[error.index("error: ") :]
    assert len(message.splitlines()) <= 15
    assert "Traceback" not in error
    assert [word for word in words if word not in message] == []


def test_a_programming_error_keeps_its_traceback(folder):
    """Only messages that were written for the user are shortened."""
    broken = FOREIGN.replace("x = self.embed", "raise ValueError('a bug in my model'); x = self.embed")
    (folder / "mine_broken.py").write_text(broken)
    with pytest.raises(ValueError, match="a bug in my model"):
        main(["fit", "--model=mine_broken.Mine", *SHORT])
