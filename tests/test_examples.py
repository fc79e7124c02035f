"""The examples run, say what they promise, and are listed."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def loss(name, folder):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, cwd=folder, check=True, timeout=240
    )
    return float(re.search(r"loss after 200 steps: ([\d.]+)", done.stdout)[1])


@pytest.mark.slow
def test_two_lines_bring_an_existing_project_to_life(tmp_path):
    """Case 1: dead at ln 32 = 3.466 before, far below 1 after."""
    assert loss("existing_project_before.py", tmp_path) == pytest.approx(3.466, abs=0.1)
    assert loss("existing_project_after.py", tmp_path) < 0.5
    assert (tmp_path / "grad_norm_by_depth.png").exists()


@pytest.mark.slow
def test_a_custom_placement_trains_and_comes_back(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "custom_placement.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert "placement in the checkpoint: HalfBranch(share=0.5)" in done.stdout
    before, after = re.search(r"60 steps: ([\d.]+), loaded again: ([\d.]+)", done.stdout).groups()
    assert before == after
    assert float(before) < 1.0


def printed(folder, *words):
    """Standard output of an example at a tiny size."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=folder, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_dead_project_is_saved_without_touching_its_file(tmp_path, monkeypatch):
    """The installed entry point: one variable, and the run that ends at ln 32 = 3.466 learns."""
    monkeypatch.setenv("LIGHTNING_NORMS_CALLBACKS", "[LRFallback]")
    assert loss("existing_project_before.py", tmp_path) < 0.5
    assert "restart" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.slow
def test_torch_encoder(tmp_path):
    said = printed(tmp_path, EXAMPLES / "transformer_encoder_classifier.py", "--steps=60", "--layers=4")
    assert float(re.search(r"accuracy after 60 steps: ([\d.]+)", said)[1]) > 0.5  # chance is 0.125
    assert "block_03" in said


@pytest.mark.slow
def test_hugging_face_gpt2(tmp_path):
    pytest.importorskip("transformers")
    said = printed(tmp_path, EXAMPLES / "hf_gpt2_pretraining.py", "--steps=80", "--layers=2")
    assert float(re.search(r"step 80: ([\d.]+)", said)[1]) < 6  # a uniform guess is 8 bits
    assert "block_01" in said


@pytest.mark.slow
def test_vision_transformer(tmp_path):
    said = printed(tmp_path, EXAMPLES / "vit_classifier.py", "--steps=100", "--layers=4")
    assert "attention: look.weight -> tell.weight" in said or "feed_forward: widen.weight -> narrow.weight" in said
    assert float(re.search(r"accuracy after 100 steps: ([\d.]+)", said)[1]) > 0.5  # chance is 0.125


@pytest.mark.slow
def test_your_module_from_yaml(tmp_path):
    small = [
        "--trainer.max_steps=30",
        "--data.batches=30",
        "--model.layers=3",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    config = EXAMPLES / "cli_with_your_module.yaml"
    said = printed(EXAMPLES.parent, "-m", "lightning_norms", "fit", "--config", config, *small)
    assert "accuracy" in said
    assert "block_02" in said


@pytest.mark.slow
def test_popular_sentences(tmp_path):
    said = printed(tmp_path, EXAMPLES / "popular_sentences.py", "--n_seeds=1", "--layers=6", "--steps=6")
    assert "vanish at" in said
    assert "0 of 1" in said


def test_the_change_is_an_import_and_an_argument():
    code = [re.sub(r'""".*?"""', "", (EXAMPLES / f"existing_project_{name}.py").read_text(), count=1, flags=re.DOTALL).splitlines() for name in ("before", "after")]  # noqa: E501  # fmt: skip
    changes = [line for line in difflib.ndiff(*code) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert [line[:2] for line in changes] == ["+ ", "+ ", "- ", "+ "], changes
    assert "import DepthMonitor" in changes[0]
    assert changes[3].replace("callbacks=ours, ", "")[2:] == changes[2][2:]


def test_every_example_is_in_the_table():
    table = (EXAMPLES / "README.md").read_text()
    for path in sorted(EXAMPLES.glob("*.*")):
        if path.name != "README.md":
            assert f"| {path.name} | " in table
            assert path.read_text().count(f"examples/{path.name}") >= 1, "a file opens with its command"
