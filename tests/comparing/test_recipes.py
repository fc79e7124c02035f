"""Shipped grids: headers, exact sizes without training, the same start for every variant, and three steps of each."""

import re
from dataclasses import replace

import pytest
import torch

from lightning_norms import recipes
from lightning_norms.cli.main import main
from lightning_norms.cli.norms_cli import find_mistake
from lightning_norms.comparing.grid_file import read_grid
from lightning_norms.comparing.grid_runner import GridRunner, fit_command
from lightning_norms.model.decoder import Decoder, DecoderConfig
from lightning_norms.model.feed_forward import SwiGLU
from lightning_norms.model.generation import KeyValueMemory
from lightning_norms.model.initialization import Normal, Xavier
from lightning_norms.model.norms import RMSNorm
from lightning_norms.model.positions import Rotary
from lightning_norms.module import DecoderModule
from lightning_norms.placements import PostNorm, PreNorm
from tests.comparing.parsing import model_of

MEBIBYTE = 2**20
SIZES = {
    "baseline": (3_740_160, 16),  # 2,048 x 256 + 256 x 256 + 4 x 12 x 256 x 256 + 9 LayerNorms x 2 x 256
    "rmsnorm": (3_737_856, 16),  # 9 biases of 256 less
    "swiglu": (3_731_968, 16),  # hidden 680: 4 x (2 x 1,024 - 3 x 680) x 256 less
    "post-norm": (3_740_160, 16),
    "gqa-4": (3_478_016, 8),  # keys and values of half the width: 4 x 256 x 256 less
    "gqa-2": (3_346_944, 4),
    "mqa-1": (3_281_408, 2),
    "modern": (3_270_912, 4),  # no position table either
}


@pytest.mark.parametrize("name", recipes.comparisons())
def test_header_has_command_runtime_and_expectation(name):
    lines = recipes.find(name).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# {name}: .+", lines[0])
    assert lines[1] == f"#   command   python -m lightning_norms compare --config {name}.yaml"
    runs = int(re.fullmatch(r"#   runtime   about .+ on 2 CPU cores \((\d+) runs\)", lines[2])[1])
    assert runs == len(read_grid(recipes.find(name)).runs())
    assert lines[3].startswith("#   expect    ")


@pytest.mark.parametrize("name", recipes.comparisons())
def test_fit_takes_every_run(name, tmp_path):
    for variant, config in planned(name).items():
        (tmp_path / "run.yaml").write_text(config)
        assert find_mistake(tmp_path / "run.yaml") is None, variant


def planned(name):
    return {run.variant: run.config for run in read_grid(recipes.find(name)).runs()}


@pytest.mark.parametrize("variant", SIZES)
def test_parameters_and_cache_are_exact(variant, tmp_path):
    """Acceptance 4: 16 / 16 / 16 / 16 / 8 / 4 / 2 / 4 MiB for 4,096 positions in bf16."""
    module = model_of(planned("variants")[variant], tmp_path)
    built = DecoderModule(replace(module.config, vocab_size=2048))
    parameters = sum(each.numel() for each in built.parameters())
    assert (parameters, built.kv_cache_bytes(4096, 2) / MEBIBYTE) == SIZES[variant]


def test_all_eight_rows_are_there():
    assert list(planned("variants")) == list(SIZES)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_the_cache_is_as_large_as_is_said(kv_heads):
    """Against the buffers that generation really makes."""
    config = DecoderConfig(vocab_size=11, context_length=32, d_model=16, n_heads=4, n_kv_heads=kv_heads, n_layers=3)
    module = DecoderModule(config)
    memories = [KeyValueMemory(config.context_length) for _ in range(config.n_layers)]
    with torch.no_grad():
        module.decoder(torch.zeros(1, 2, dtype=torch.long), memories)
    held = sum(buffer.nbytes for memory in memories for buffer in memory.buffers)
    assert module.kv_cache_bytes(32, 4) == held


SMALL = DecoderConfig(vocab_size=11, d_model=16, n_heads=4, n_layers=2, draw_by_name=True, initialization=Normal())
OTHERS = {
    "post": replace(SMALL, placement=PostNorm()),
    "grouped": replace(SMALL, n_kv_heads=2),
    "swiglu": replace(SMALL, feed_forward=SwiGLU()),
    "modern": replace(SMALL, norm=RMSNorm(), feed_forward=SwiGLU(), positions=Rotary(), n_kv_heads=1),
    "deeper": replace(SMALL, n_layers=3),
}


def start(config, seed=3):
    torch.manual_seed(seed)
    torch.rand(len(str(config)))  # what was drawn before must not matter
    return {name: value for name, value in Decoder(config).state_dict().items() if value.ndim > 1}


@pytest.mark.parametrize("other", OTHERS)
def test_variants_start_with_the_same_weights_where_shapes_match(other):
    ours, theirs = start(SMALL), start(OTHERS[other])
    same = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    assert "embedding.weight" in same
    assert "blocks.1.attention.writer.weight" in same
    for name in same:
        assert torch.equal(ours[name], theirs[name]), name


def test_another_initialization_is_the_same_draw_scaled():
    ours, theirs = start(SMALL), start(replace(SMALL, initialization=Xavier()))
    name = "blocks.1.attention.writer.weight"
    assert torch.allclose(theirs[name] / 0.25, ours[name] / 0.02, rtol=1e-5, atol=0)


def test_no_two_matrices_start_alike_and_no_two_seeds():
    ours, other = start(SMALL), start(SMALL, seed=4)
    del ours["head.weight"]  # the embedding's
    flat = [tuple(value.flatten()[:8].tolist()) for value in ours.values()]
    assert len(set(flat)) == len(flat)
    assert not any(torch.equal(ours[name], other[name]) for name in ours)


def test_pre_and_post_start_alike_in_a_plain_fit_too():
    """Without draw_by_name: the draws do not depend on the placement."""
    plain = replace(SMALL, draw_by_name=False)
    ours, theirs = (
        {name: value for name, value in seeded(replace(plain, placement=placement)).items() if value.ndim > 1}
        for placement in (PreNorm(), PostNorm())
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def seeded(config):
    torch.manual_seed(0)
    return Decoder(config).state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Warmup takes .* but the run ends after 3")
@pytest.mark.filterwarnings("ignore:The schedule of Warmup")
@pytest.mark.parametrize("name", recipes.comparisons())
def test_fast_runs_to_the_end(name, tmp_path, monkeypatch, capsys):
    """In this process: starting one for every run is tested in test_compare.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        GridRunner, "_fit", lambda _, place, lock, checkpoint: main(fit_command(place, checkpoint)) or 0
    )
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--config", name, "--fast"])
    printed = capsys.readouterr().out.partition(": bits/byte, mean")[2]
    assert stop.value.code == 0, printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert (tmp_path / "compare/comparison.html").exists()
