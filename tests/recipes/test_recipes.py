"""Every shipped recipe is what its header says, and runs for two steps without an unexpected warning."""

import re

import pytest
import yaml

from lightning_norms import recipes
from lightning_norms.cli.main import main

# What a recipe is, as the difference to post48. Anything else that differs is a mistake.
WARMUP, RESCALE, FALLBACK = "Warmup", "ResidualRescale", "LRFallback"
DIFFERENCES = {
    "post48": {},
    "pre48": {"placement": "PreNorm", "without": {WARMUP, RESCALE, FALLBACK}},
    "pre48-hot": {
        "placement": "PreNorm", "without": {WARMUP, RESCALE}, "learning_rate": 0.3,
        "fallback": {"cut": 0.003, "lowest_factor": 0.001},
    },
    "post48-cold": {"without": {WARMUP, RESCALE, FALLBACK}},
    "post48-warmup": {"without": {RESCALE, FALLBACK}},
    "post48-rescale": {"without": {WARMUP, FALLBACK}},
    "post48-fallback": {"without": {WARMUP}},
    "post48-rescue": {"without": {WARMUP, RESCALE}, "fallback": {"rescale_on_restart": True}},
    "deepnorm48": {"placement": "DeepNorm", "without": {WARMUP, RESCALE, FALLBACK}},
    "deepnorm200": {
        "placement": "DeepNorm", "without": {WARMUP, RESCALE, FALLBACK}, "n_layers": 200, "max_steps": 150
    },
    "deepnorm1000": {
        "placement": "DeepNorm", "without": {WARMUP, RESCALE, FALLBACK}, "n_layers": 1000, "max_steps": 50,
        "decoder": {"d_model": 32, "activation_checkpointing": True},
        "trainer": {"val_check_interval": 50, "limit_val_batches": 5},
    },
}  # fmt: skip


def read(name):
    return yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))


def test_every_recipe_is_known_here():
    assert set(recipes.names()) == {*DIFFERENCES, "tiny"}


@pytest.mark.parametrize("name", recipes.names())
def test_header_has_command_runtime_and_expectation(name):
    lines = recipes.find(name).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# {name}: .+", lines[0])
    assert lines[1] == f"#   command   python -m lightning_norms fit --config {name}.yaml"
    assert lines[2].startswith("#   runtime   about ")
    assert lines[3].startswith("#   expect    ")


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_48_block_recipes_differ_in_nothing_else(name):
    expected, difference = read("post48"), DIFFERENCES[name]
    decoder = expected["model"]["init_args"]["decoder"]
    decoder["placement"] = difference.get("placement", decoder["placement"])
    decoder["n_layers"] = difference.get("n_layers", decoder["n_layers"])
    decoder |= difference.get("decoder", {})
    arguments = expected["model"]["init_args"]
    arguments["learning_rate"] = difference.get("learning_rate", arguments["learning_rate"])
    expected["trainer"]["max_steps"] = difference.get("max_steps", 300)
    expected["trainer"] |= difference.get("trainer", {})
    expected["trainer"]["callbacks"] = [
        callback
        for callback in expected["trainer"]["callbacks"]
        if callback["class_path"] not in difference.get("without", ())
    ]
    for callback in expected["trainer"]["callbacks"]:
        if callback["class_path"] == FALLBACK and "fallback" in difference:
            callback["init_args"] = difference["fallback"]
    assert read(name) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.names())
@pytest.mark.filterwarnings("ignore:Warmup takes .* but the run ends after 2")
def test_two_steps_without_a_warning(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    short += ["--data.val_batch_size=4"]
    short += [] if name in ("post48", "tiny") else ["--model.decoder.n_layers=12"]  # 1000 blocks take 10 s a step
    main(["fit", "--config", name, *short, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])
    assert re.search(r"val/prose/bits_per_byte *│ *\d+\.\d+", capsys.readouterr().out)


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match="post48-cold"):
        recipes.find("../cli")
