"""``python -m lightning_norms diagnose``: what it prints, what it writes, and what it tells the shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_norms.cli.main import main
from lightning_norms.reports.diagnosis.data import AS_GIVEN, Diagnosis, Verdict

HEALTHY = """
model:
  class_path: DecoderModule
  init_args:
    decoder: {placement: PreNorm, n_layers: 2, d_model: 16, n_heads: 2, context_length: 16}
    learning_rate: 1.0e-2
data:
  class_path: TextDataModule
  init_args: {context_length: 16, batch_size: 4}
trainer: {max_steps: 60, accelerator: cpu, limit_val_batches: 1, callbacks: {class_path: DepthMonitor}}
"""
DEAD = """
seed_everything: 1
model:
  class_path: DecoderModule
  init_args:
    decoder: {placement: PostNorm, n_layers: 24, d_model: 16, n_heads: 2, context_length: 16, initialization: Xavier}
    learning_rate: 1.0e-2
data:
  class_path: TextDataModule
  init_args: {context_length: 16, batch_size: 8}
trainer: {max_steps: 60, accelerator: cpu, limit_val_batches: 1, callbacks: [{class_path: LRFallback}]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthy.yaml").write_text(HEALTHY)
    (tmp_path / "dead.yaml").write_text(DEAD)
    return tmp_path


def run(*arguments):
    """Exit code."""
    try:
        main(["diagnose", *arguments])
    except SystemExit as stop:
        return stop.code
    return 0


def test_help_needs_nothing_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--steps", "--seeds", "--n_seeds", "--no_trials", "--write_fix", "--format"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_trains_is_code_0_and_leaves_one_folder(folder, capsys):
    assert run("--config", "healthy.yaml", "--steps", "30") == 0
    text = capsys.readouterr().out
    assert "This configuration trains" in text
    assert max(map(len, text.splitlines())) <= 80
    assert {path.name for path in folder.iterdir()} == {"healthy.yaml", "dead.yaml", "diagnosis"}
    found = Diagnosis.from_json((folder / "diagnosis/diagnosis.json").read_text())
    assert found.verdict is Verdict.TRAINS
    assert found.look.constant_loss == pytest.approx(
        3.17, abs=0.02
    )  # unigram entropy of the text, as the data knows it
    assert found.look.labels == 0


def test_json_alone_goes_to_stdout(folder, capsys):
    words = ["--steps=3", "--seeds=[0,7]", "--format=json", "--folder=out/deep", "--write_fix=f.yaml", "--fix=warmup"]
    assert run("--config", "healthy.yaml", *words) == 3  # too short to tell
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((folder / "out/deep/diagnosis.json").read_text())
    assert [trial["planned_steps"] for trial in found["trials"]] == [3] * len(found["trials"])
    first, second = [trial["losses"] for trial in found["trials"] if trial["name"] == "as given"]
    assert [trial["seed"] for trial in found["trials"] if trial["name"] == "as given"] == [0, 7]
    assert first[0] != second[0]  # weights and data of their own for each seed
    assert all(fix["spread"] is not None for fix in found["fixes"])


def test_the_page_is_written_and_can_be_printed(folder, capsys):
    assert run("--config", "healthy.yaml", "--no_trials", "--format=html") == 0
    page = capsys.readouterr().out
    assert page == (folder / "diagnosis/diagnosis.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "No verdict yet" in page
    assert {path.name for path in (folder / "diagnosis").iterdir()} == {"diagnosis.html", "diagnosis.json"}


def test_a_look_alone_has_no_verdict_and_fails_nothing(folder, capsys):
    assert run("--config", "dead.yaml", "--no_trials") == 0
    assert "there is no verdict" in capsys.readouterr().out.replace("\n", " ")
    assert Diagnosis.from_json((folder / "diagnosis/diagnosis.json").read_text()).trials == ()


@pytest.mark.parametrize("more", [[], ["--trainer.log_every_n_steps=3"]], ids=["own words", "with an override"])
def test_a_fix_is_written_as_a_file_that_fit_runs(folder, more, capsys):
    run("--config", "healthy.yaml", "--steps=3", "--write_fix=deep/fixed.yaml", "--fix=warmup", *more)
    text = (folder / "deep/fixed.yaml").read_text()
    assert text.startswith("# warmup: linear warmup of 1 of 3 steps (for the whole run: 20)")
    callbacks = yaml.safe_load(text)["trainer"]["callbacks"]
    assert [each["class_path"].rpartition(".")[2] for each in callbacks] == ["DepthMonitor", "Warmup"]
    assert callbacks[1]["init_args"]["schedule"]["init_args"] == {"warmup_steps": 20}
    assert ("log_every_n_steps" in text) == bool(more)
    main(["fit", "--config", "deep/fixed.yaml", "--trainer.max_steps=20", "--trainer.enable_progress_bar=false"])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps=0"], ["steps must be a whole number", "got 0"]),
        (["--n_seeds=many"], ["n_seeds", "whole number"]),
        (["--seeds=many"], ["seeds", "list"]),
        (["--seeds=3"], ["seeds", "list"]),
        (["--steps=1", "--write_fix=f.yaml", "--fix=wrmup"], ["'wrmup'", "warmup"]),
        (["--steps=1", "--fix=warmup"], ["--write_fix is not given"]),
        (["--format=word"], ["word", "table", "json"]),
        (["--stepz=3"], ["stepz"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_code_2_and_one_short_message(folder, arguments, words, capsys):
    assert run("--config", "healthy.yaml", *arguments) == 2
    error = capsys.readouterr().err
    message = error[error.rindex("error: ") :]
    assert len(message.splitlines()) <= 5
    assert [word for word in words if word not in message] == []


def test_a_frozen_model_is_no_run_that_trains(folder, capsys):
    (folder / "frozen_one.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Frozen(BoringModel):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.requires_grad_(False)\n"
    )
    assert run("--model=frozen_one.Frozen", "--trainer.accelerator=cpu") == 3
    assert "None of the 66 parameters is trainable" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_dead_on_arrival_is_named_and_what_is_written_trains(folder, capsys):
    assert run("--config", "dead.yaml", "--steps=30", "--write_fix=fixed.yaml") == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "Dead on arrival: this configuration stalls silently" in text
    assert "LRFallback was left out" in text
    found = Diagnosis.from_json((folder / "diagnosis/diagnosis.json").read_text())
    assert found.trials[0].name == AS_GIVEN
    assert found.trials[0].verdict is Verdict.STALLS
    assert found.best is not None
    assert run("--config", "fixed.yaml", "--steps=30", "--folder=again") == 0


@pytest.mark.slow
def test_two_ranks_say_it_once(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = ["--trainer.devices=2", "--trainer.strategy=ddp", "--steps=6", "--folder=both", "--config=healthy.yaml"]
    command = [sys.executable, "-W", "ignore", "-m", "lightning_norms", "diagnose", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 3), done.stderr[-2000:]
    assert done.stdout.count("Short trials of 6 steps") == 1
    found = Diagnosis.from_json((folder / "both/diagnosis.json").read_text())
    assert found.facts.ranks == 2
    assert [len(trial.losses) for trial in found.trials] == [6] * len(found.trials)
    assert done.returncode == (0 if found.trains else 3)
