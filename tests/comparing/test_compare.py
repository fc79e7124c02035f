"""``compare`` with real runs: the same with the same is exactly 0, a kill changes nothing, bad rows say why."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from lightning_norms.cli.main import main
from lightning_norms.comparing.locks import alone

BASE = {
    "model": {
        "class_path": "DecoderModule",
        "init_args": {
            "decoder": {"placement": "PreNorm", "n_layers": 2, "d_model": 8, "n_heads": 2, "context_length": 16},
            "learning_rate": 0.003,
        },
    },
    "data": {
        "class_path": "TextDataModule",
        "init_args": {"train": "train.txt", "context_length": 16, "batch_size": 2, "val_batch_size": 4},
    },
    "trainer": {
        "max_steps": 300, "val_check_interval": 150, "check_val_every_n_epoch": None, "limit_val_batches": 2,
        "accelerator": "cpu", "log_every_n_steps": 50,
    },
}  # fmt: skip
POST = {"model": {"init_args": {"decoder": {"placement": "PostNorm"}}}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("".join(f"line {i}: {i * i % 97} and {i * 7 % 31}\n" for i in range(900)))
    return tmp_path


def write(folder, variants, steps=300, seeds=(5,)):
    base = {**BASE, "trainer": {**BASE["trainer"], "max_steps": steps, "val_check_interval": max(1, steps // 2)}}
    grid = {"base": base, "baseline": next(iter(variants)), "seeds": list(seeds), "variants": variants}
    (folder / "small.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))


def compare(*words):
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--config", "small.yaml", *words])
    return stop.value.code


def numbers(folder):
    """All that is not a time."""
    found = json.loads((folder / "comparison.json").read_text())
    for each in [*found["runs"], *found["rows"]]:
        each.pop("seconds_per_step")
    return found


def intervals(written):
    return [(each["variant"], each["mean"], each["low"], each["high"]) for each in written["differences"]]


@pytest.mark.slow
def test_the_same_with_the_same_is_exactly_zero_and_bad_rows_say_why(folder, capsys):
    variants = {
        "pre": {"title": "as it was"},
        "again": {},
        "typo": {"model": {"init_args": {"decoder": {"placemnt": "PostNorm"}}}},
        "hot": {"model": {"init_args": {"learning_rate": 1e30}}},
        "odd": {"model": {"init_args": {"decoder": {"n_heads": 3}}}},
    }
    write(folder, variants, steps=4, seeds=(5, 6))
    assert compare() == 3
    written = numbers(folder / "compare")
    assert intervals(written) == [("again", 0.0, 0.0, 0.0)]
    why = {row["variant"]: row["failures"] for row in written["rows"]}
    assert why == {
        "pre": [],
        "again": [],
        "typo": ["seeds 5, 6: there is no key 'model.decoder.placemnt'. Did you mean placement?"],
        "hot": ["seeds 5, 6: diverged: val ended as nan"],
        "odd": ["seeds 5, 6: d_model is 8, which is not a multiple of n_heads, 3."],
    }
    printed = capsys.readouterr().out
    assert "Did you mean placement?" in printed
    tables = [line for line in printed.splitlines() if ":" not in line]
    assert max(map(len, tables)) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [True, False], ids=["grid and run", "grid alone"])
def test_a_grid_that_is_killed_goes_on_to_the_same_table(folder, whole_group):
    """kill -9 in the middle of the second run, after a checkpoint; of the grid alone: its run is waited for."""
    write(folder, {"pre": {}, "post": POST})
    assert compare("--folder", "whole") == 0
    words = [sys.executable, "-m", "lightning_norms", "compare", "--config", "small.yaml", "--folder", "killed"]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any((folder / "killed/runs").glob("post_*/attempt_1/checkpoints/last.ckpt")))
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((folder / "killed/runs").glob("post_*/attempt_1/record.json"))
    assert compare("--folder", "killed") == 0
    assert numbers(folder / "killed") == numbers(folder / "whole")
    attempts = {path.name for path in (folder / "killed/runs").glob("post_*/attempt_*")}
    assert attempts == ({"attempt_1", "attempt_2"} if whole_group else {"attempt_1"})
    assert {path.name for path in (folder / "killed/runs").glob("pre_*/attempt_*")} == {"attempt_1"}


CLUSTER = ("--launcher", "submitit", "--launcher_options", "cluster=local", "timeout_min=10")


@pytest.mark.slow
def test_jobs_of_a_cluster_give_the_same_table_and_a_dead_one_costs_its_row(folder, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the last digit of a sum depends on it
    lost = {"data": {"init_args": {"train": "nowhere.txt"}}}
    write(folder, {"pre": {}, "post": POST, "lost": lost}, steps=4)
    assert compare("--folder", "here") == 3
    assert compare("--folder", "there", "--jobs", "2", *CLUSTER) == 3
    assert numbers(folder / "there") == numbers(folder / "here")
    rows = {row["variant"]: row for row in numbers(folder / "there")["rows"]}
    assert [row["seeds"] for row in rows.values()] == [1, 1, 0]
    assert "nowhere.txt" in rows["lost"]["failures"][0]
    assert len(list((folder / "there/runs").glob("*/job/*_result.pkl"))) == 3
    assert not list((folder / "here/runs").glob("*/job"))


@pytest.mark.slow
def test_ctrl_c_cancels_the_jobs_and_the_grid_goes_on(folder, monkeypatch):
    """Only the grid hears it, as on another host."""
    pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write(folder, {"post": POST}, steps=600)
    assert compare("--folder", "whole") == 0
    words = [sys.executable, "-m", "lightning_norms", "compare", "--config", "small.yaml", "--folder", "stopped"]
    process = subprocess.Popen([*words, *CLUSTER], start_new_session=True, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any((folder / "stopped/runs").glob("post_*/attempt_1/checkpoints/last.ckpt")))
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert (process.returncode, "the same command resumes from here" in said) == (130, True)
    (place,) = (folder / "stopped/runs").glob("post_*")
    with alone(place, lambda: None):  # what was cancelled may take a moment to end, but not to its own end
        assert not list(place.glob("attempt_1/record.json"))
    assert compare("--folder", "stopped", *CLUSTER) == 0
    assert numbers(folder / "stopped") == numbers(folder / "whole")
    assert {path.name for path in place.glob("attempt_*")} == {"attempt_1", "attempt_2"}


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config", "nowhere"], "nowhere is neither a file in"),
        (["--config", "post48"], "post48 is one run, not a grid"),
        (["--config", "exp015", "--jobs", "0"], "compare: jobs must be a whole number of at least 1, got 0"),
        (["--config", "exp015", "--jobs", "x"], "jobs is 'x', but it must be a whole number."),
        (["--config", "exp015", "--seeds", "[1, 1]"], "each may be given only once"),
        (["--config", "exp015", "--seeds", "3"], "seeds is '3', but it must be a list, such as [0, 1, 2]."),
        (["--config", "exp015", "--n_seeds", "many"], "n_seeds is 'many', but it must be a whole number."),
        (["--config", "exp015", "--n_seeds", "0"], "compare: n_seeds must be a whole number of at least 1, got 0"),
        (["--config", "exp015", "--n_seeds", "2", "--seeds", "[1]"], "give either --seeds, a list, or --n_seeds"),
        (["--config", "exp015", "--folder", "s3://b/c"], "--folder is s3://b/c, but runs are locked and resumed there"),
        ([], "the following arguments are required: config"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_code_2(words, sentence, capsys, folder):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_fit_says_what_to_do_with_a_grid(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "exp015"])
    assert stop.value.code == 2
    assert "python -m lightning_norms compare --config exp015" in capsys.readouterr().err
