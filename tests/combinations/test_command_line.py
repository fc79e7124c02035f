"""Cases 48, 50 and 51 on the command line: lists of callbacks, a saved configuration used again, the environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_norms.cli.main import main
from lightning_norms_entry_point import VARIABLE

pytestmark = [
    pytest.mark.filterwarnings("ignore:Warmup takes 10 optimizer steps"),  # and the tests run for 3
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
ROOT = Path(__file__).parents[2]
SHORT = [
    "--trainer.max_steps=3", "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu", "--trainer.logger=false",
]  # fmt: skip
MINE = """
trainer:
  callbacks:
    - class_path: Warmup
      init_args: {schedule: {class_path: LinearWarmup, init_args: {warmup_steps: 2}}}
    - class_path: DepthMonitor
      init_args: {every_n_steps: 2, table: false, picture: false}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


def callbacks(*arguments):
    """What ``fit`` would use, as the printed configuration has it: class -> arguments."""
    import contextlib
    import io

    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(io.StringIO()) as printed:
        main(["fit", "--config", "mine.yaml", *SHORT, *arguments, "--print_config"])
    assert stop.value.code == 0
    found = yaml.safe_load(printed.getvalue())["trainer"]["callbacks"] or []
    found = found if isinstance(found, list) else [found]
    return {each["class_path"].rpartition(".")[2]: each.get("init_args", {}) for each in found}


def test_a_list_is_appended_to_replaced_and_cleared():
    """Case 48: ``+=`` appends and its arguments go to the last one; ``=`` replaces the whole list; null clears it."""
    assert list(callbacks()) == ["Warmup", "DepthMonitor"]
    appended = callbacks("--trainer.callbacks+=LRFallback", "--trainer.callbacks.cut=0.3")
    assert list(appended) == ["Warmup", "DepthMonitor", "LRFallback"]
    assert appended["LRFallback"]["cut"] == 0.3
    assert list(callbacks("--trainer.callbacks=LRFallback")) == ["LRFallback"]
    assert callbacks("--trainer.callbacks=null") == {}


def test_a_second_file_replaces_the_list_or_appends_to_it(folder):
    (folder / "other.yaml").write_text("trainer: {callbacks: [{class_path: LRFallback}]}")
    (folder / "more.yaml").write_text("trainer: {callbacks+: [{class_path: LRFallback}]}")
    assert list(callbacks("--config", "other.yaml")) == ["LRFallback"]
    assert list(callbacks("--config", "more.yaml")) == ["Warmup", "DepthMonitor", "LRFallback"]


@pytest.mark.parametrize(
    "arguments",
    [["--trainer.callbacks+=LRFallback", "--trainer.callbacks.facter=0.3"], ["--config", "facter.yaml"]],
    ids=["command line", "file"],
)
def test_a_misspelt_key_is_named_at_the_end_of_the_message(arguments, folder, capsys):
    wrong = "trainer: {callbacks: [{class_path: ResidualRescale, init_args: {rule: {class_path: ConstantRescale, "
    (folder / "facter.yaml").write_text(wrong + "init_args: {facter: 0.3}}}}]}")
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "mine.yaml", *SHORT, *arguments])
    assert stop.value.code == 2
    assert "facter" in capsys.readouterr().err.splitlines()[-1]


def test_the_saved_configuration_repeats_the_run_without_a_logger(folder):
    """Case 50: in the same folder, over the file that the first run has written, to the same weights bit for bit."""
    main(["fit", "--config", "tiny.yaml", *SHORT, "--trainer.callbacks.every_n_train_steps=1"])
    first = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    (folder / "checkpoints").rename(folder / "first")
    main(["fit", "--config", "config.yaml"])
    second = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def run(*arguments, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "lightning_norms", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_every_variable_that_is_read_is_named_in_the_help(capsys):
    """Case 51: and nothing else is read from the environment, so a forgotten variable changes no run."""
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    files = [*(ROOT / "lightning_norms").rglob("*.py"), ROOT / "lightning_norms_entry_point.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    read = set(re.findall(r"environ(?:\.get\(|\[)\"?(\w+)", text))
    assert read == {"PL_GLOBAL_SEED", "LIGHTNING_NORMS_CACHE", "VARIABLE"}
    assert all(name in said for name in (read - {"VARIABLE"}) | {VARIABLE})


@pytest.mark.slow
def test_in_an_empty_folder_by_subprocess(folder):
    """Case 51: help of every command and no command at all need nothing, leave nothing and print no traceback."""
    (folder / "empty").mkdir()
    os.chdir(folder / "empty")
    for arguments in (["--help"], ["fit", "--help"], ["recipes", "--help"], ["generate", "--help"], []):
        done = run(*arguments)
        assert done.returncode == (0 if arguments else 2), done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        assert "usage" in done.stdout + done.stderr or not arguments
    assert list(Path.cwd().iterdir()) == []


def test_variables_that_look_like_options_are_not_read(folder, monkeypatch):
    """Three steps, whatever LightningCLI's own names for environment variables say."""
    for name in ("PL_FIT__TRAINER__MAX_STEPS", "LIGHTNING_NORMS_FIT__TRAINER__MAX_STEPS", "FIT__TRAINER__MAX_STEPS"):
        monkeypatch.setenv(name, "7")
    main(["fit", "--config", "tiny.yaml", *SHORT, "--trainer.callbacks.every_n_train_steps=1"])
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
