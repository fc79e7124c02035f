"""One word in YAML or on the command line is enough for every placement, every norm and a third party's class."""

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_norms.cli.main import main
from lightning_norms.model.decoder import DecoderConfig
from lightning_norms.model.norms import Norm
from lightning_norms.module import DecoderModule
from lightning_norms.placements import DeepNorm, MixNorm
from tests.model.placements.stacks import all_placements

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*give `qk_norm"),
    pytest.mark.filterwarnings("ignore:Warmup takes 10 optimizer steps"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
PLACEMENTS = {type(placement).__name__: placement for placement in all_placements()}
NAMES = sorted(PLACEMENTS)
NORMS = ["LayerNorm", "RMSNorm", "ScaleNorm", "L2Norm", "DyT", "Derf"]


def parser():
    made = ArgumentParser(exit_on_error=False)
    made.add_class_arguments(DecoderConfig, "decoder")
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_placement_is_one_word_and_comes_back_from_yaml(name, tmp_path):
    first = parser().parse_args([f"--decoder.placement={name}", "--decoder.norm=RMSNorm"])
    config = parser().instantiate_classes(first).decoder
    assert config.placement == PLACEMENTS[name]
    (tmp_path / "saved.yaml").write_text(parser().dump(first))
    again = parser().parse_string((tmp_path / "saved.yaml").read_text())
    assert parser().instantiate_classes(again).decoder == config
    short = yaml.safe_dump({"decoder": {"placement": name, "n_layers": 3}})
    assert parser().instantiate_classes(parser().parse_string(short)).decoder.placement == config.placement


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_word(name):
    config = parser().instantiate_classes(parser().parse_args([f"--decoder.norm={name}"])).decoder
    assert type(config.norm).__name__ == name


def test_every_norm_is_known_here():
    assert {cls.__name__ for cls in Norm.__subclasses__() if cls.__module__.startswith("lightning_norms")} == set(NORMS)


def test_options_nest():
    words = ["--decoder.placement=MixNorm", "--decoder.placement.first=DeepNorm", "--decoder.placement.first.alpha=2"]
    words += ["--decoder.qk_norm=QKNorm", "--decoder.qk_norm.over=width", "--decoder.qk_norm.norm=RMSNorm"]
    config = parser().instantiate_classes(parser().parse_args(words)).decoder
    assert config.placement == MixNorm(first=DeepNorm(alpha=2.0))
    assert (config.qk_norm.over, type(config.qk_norm.norm).__name__) == ("width", "RMSNorm")


def test_help_lists_every_placement(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.help=DecoderModule"])
    text = "".join(capsys.readouterr().out.split())  # long paths are broken across lines
    assert [name for name in NAMES if f".{name}" not in text] == []


def test_a_third_partys_placement_by_its_path(tmp_path, monkeypatch):
    """It is defined outside of the package, given by class_path, and comes back from a checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    placement = ["--model.decoder.placement=custom_placement.HalfBranch", "--model.decoder.placement.share=0.25"]
    main(["fit", "--config", "pre48", "--model.decoder.n_layers=2", *placement, *SHORT, "--trainer.max_steps=2"])
    import custom_placement

    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    module = DecoderModule.load_from_checkpoint(checkpoint)
    assert module.config.placement == custom_placement.HalfBranch(share=0.25)
    assert module.decoder.blocks[1].feed_forward_residual.scale == 0.25


SHORT = [
    "--trainer.max_steps=20", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu",
    "--trainer.callbacks=[{class_path: ModelCheckpoint, init_args: {save_last: true}}]",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_and_a_checkpoint(name, tmp_path, monkeypatch, capsys):
    """With 4 blocks, as 48 for every name would take half an hour here."""
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "pre48", "--model.decoder.n_layers=4", f"--model.decoder.placement={name}", *SHORT])
    out = capsys.readouterr().out
    assert re.search(r"val/code/bits_per_byte *│ *[2-9]\.\d+", out)
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    assert DecoderModule.load_from_checkpoint(checkpoint).config.placement == PLACEMENTS[name]
