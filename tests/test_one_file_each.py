"""A placement, norm, schedule, rescale rule and callback of your own: one file each, and everything knows them.

The files are written into an empty folder and imported as a user's script would; nothing else changes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "my_placement": '''
from dataclasses import dataclass
from lightning_norms.placements import Placement, Residual

@dataclass(frozen=True)
class MyPlacement(Placement):
    """``x + share f(N(x))``, and a final norm.

    Smaller branches keep more of the embedding; pre-norm in everything else that it does.

    Args:
        share: constant on the branch.

    Source: my notes, code.
    """

    equation = "x + share f(N x)"
    trade_off = "smaller branches"
    final_norm = True

    share: float = 0.5

    def wrap(self, site, norm):
        return Residual(before=norm(site.width), scale=self.share)
''',
    "my_norm": '''
from dataclasses import dataclass
from torch import nn
from lightning_norms.norms import Norm

@dataclass(frozen=True)
class MyNorm(Norm):
    """No norm at all."""

    def __call__(self, width):
        return nn.Identity()
''',
    "my_schedule": '''
from dataclasses import dataclass
from lightning_norms.schedules import Schedule

@dataclass(frozen=True)
class MySchedule(Schedule):
    """Half of the learning rate for a while."""

    half_steps: int | float = 3

    def __call__(self, step):
        return 0.5 if step < self.half_steps else 1.0
''',
    "my_rule": '''
from dataclasses import dataclass
from lightning_norms.rescale_rules import RescaleRule

@dataclass(frozen=True)
class MyRule(RescaleRule):
    """A third."""

    def gain(self, layer, layers):
        return 1 / 3
''',
    "my_callback": '''
from lightning.pytorch import Callback

class MyCallback(Callback):
    """Says how many steps were taken."""

    def __init__(self, word: str = "steps") -> None:
        self.word = word

    def on_train_end(self, trainer, pl_module):
        print(self.word, trainer.global_step)
''',
}
SCRIPT = """
import contextlib, io, json, sys
import my_placement, my_norm, my_schedule, my_rule, my_callback
from lightning_norms.cli.main import main
from lightning_norms.model.placements import catalogue

def output(*words):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(list(words))
    return text.getvalue()

print(json.dumps({
    "table": catalogue.table(),
    "help": output("fit", "--help") + output("fit", "--model.help=DecoderModule"),
    "config": output("fit", "--config", "mine.yaml", "--print_config"),
    "schedules": output("fit", "--trainer.callbacks.help=Warmup"),
    "rules": output("fit", "--trainer.callbacks.help=ResidualRescale"),
    "fit": output("fit", "--config", "mine.yaml"),
}))
"""
CONFIG = """
model: {init_args: {decoder: {placement: MyPlacement, norm: MyNorm, n_layers: 2, d_model: 16, n_heads: 2}}}
trainer:
  max_steps: 2
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  limit_val_batches: 0
  callbacks:
    - {class_path: Warmup, init_args: {schedule: MySchedule}}
    - {class_path: ResidualRescale, init_args: {rule: MyRule}}
    - {class_path: MyCallback, init_args: {word: counted}}
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What a process that imports the five files says."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "mine.yaml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_placement(outputs):
    assert "| `MyPlacement` | `x + share f(N x)` | smaller branches | my notes, code. |" in outputs["table"]
    assert "MyPlacement" in outputs["help"].partition("one word of:")[2].partition("\n\n")[0]
    assert "my_placement.MyPlacement" in outputs["help"]
    assert "class_path: my_placement.MyPlacement" in outputs["config"]
    assert "share: 0.5" in outputs["config"]


def test_a_norm(outputs):
    assert "my_norm.MyNorm" in outputs["help"]
    assert "class_path: my_norm.MyNorm" in outputs["config"]


def test_a_schedule(outputs):
    assert "my_schedule.MySchedule" in outputs["schedules"]
    assert "class_path: my_schedule.MySchedule" in outputs["config"]
    assert "half_steps: 3" in outputs["config"]


def test_a_rescale_rule(outputs):
    assert "my_rule.MyRule" in outputs["rules"]
    assert "class_path: my_rule.MyRule" in outputs["config"]


def test_a_callback(outputs):
    assert "my_callback.MyCallback" in outputs["help"]
    assert "word: counted" in outputs["config"]
    assert "counted 2" in outputs["fit"]


@pytest.mark.slow
def test_a_file_in_the_folder_of_placements_is_under_contract(tmp_path):
    """In a copy of the package: the contract tests find the class, and the page asks to be written again."""
    for folder in ("lightning_norms", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "lightning_norms/model/placements/mine.py").write_text(FILES["my_placement"])
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    tests = ["tests/model/placements/test_contract.py", "tests/cli/test_placement_words.py", "-k", "MyPlacement"]
    done = subprocess.run(
        [*command, *tests], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_causal_and_in_eval_as_in_train[MyPlacement]" in done.stdout
    assert "test_a_placement_is_one_word_and_comes_back_from_yaml[MyPlacement]" in done.stdout
