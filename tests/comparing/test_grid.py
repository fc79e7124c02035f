"""A grid's file to the configurations of its runs."""

import pytest
import yaml

from lightning_norms.comparing.grid_file import read_grid

BASE = {
    "model": {"class_path": "DecoderModule", "init_args": {"decoder": {"placement": "PreNorm", "n_layers": 4}}},
    "trainer": {"max_steps": 400, "callbacks": [{"class_path": "Warmup", "init_args": {"schedule": "LinearWarmup"}}]},
}
POST = {"title": "moved", "model": {"init_args": {"decoder": {"placement": "PostNorm"}}}}


def write(path, **changes):
    data = {"base": BASE, "baseline": "pre", "seeds": [7, 8], "variants": {"pre": {}, "post": POST}} | changes
    file = path / "planted.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}, sort_keys=False))
    return file


def configs(found):
    return {(run.variant, run.seed): yaml.safe_load(run.config) for run in found.runs()}


def test_a_run_is_the_base_with_its_variant_and_its_seed(tmp_path):
    found = read_grid(write(tmp_path))
    assert [(run.variant, run.seed) for run in found.runs()] == [("pre", 7), ("post", 7), ("pre", 8), ("post", 8)]
    pre, post = configs(found)["pre", 8], configs(found)["post", 8]
    assert pre["seed_everything"] == post["seed_everything"] == 8
    assert post["model"]["init_args"]["decoder"] == {"placement": "PostNorm", "n_layers": 4, "draw_by_name": True}
    assert {**pre, "model": 0} == {**post, "model": 0}
    assert found.variants["post"].title == "moved"
    assert "title" not in post


def test_every_run_gets_a_record_and_checkpoints(tmp_path):
    callbacks = configs(read_grid(write(tmp_path)))["pre", 7]["trainer"]["callbacks"]
    assert [each["class_path"] for each in callbacks] == ["Warmup", "RunRecord", "ModelCheckpoint"]
    assert callbacks[2]["init_args"]["every_n_train_steps"] == 40


def test_a_run_that_keeps_checkpoints_by_itself_gets_no_others(tmp_path):
    own = {"trainer": {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"save_last": True}}]}}
    found = read_grid(write(tmp_path, base=own, variants={"pre": {}, "none": {"trainer": {"callbacks": []}}}))
    callbacks = configs(found)["none", 7]["trainer"]["callbacks"]
    assert [each["class_path"] for each in callbacks] == ["ModelCheckpoint", "RunRecord"]


def test_the_folder_of_a_run_is_another_one_as_soon_as_anything_in_it_changes(tmp_path):
    first = {run.folder for run in read_grid(write(tmp_path)).runs()}
    again = {run.folder for run in read_grid(write(tmp_path)).runs()}
    changed = {run.folder for run in read_grid(write(tmp_path, base={**BASE, "data": {"x": 1}})).runs()}
    fast = {run.folder for run in read_grid(write(tmp_path), seeds=[7, 8], fast=True).runs()}
    assert first == again
    assert len(first) == 4
    assert not first & changed
    assert not first & fast


def test_fast_is_tiny_and_of_one_seed(tmp_path):
    found = read_grid(write(tmp_path), fast=True)
    assert {seed for _, seed in configs(found)} == {7}
    config = configs(found)["post", 7]
    assert config["trainer"]["max_steps"] == 3
    decoder = {"placement": "PostNorm", "n_layers": 2, "d_model": 16, "context_length": 16, "draw_by_name": True}
    assert config["model"]["init_args"]["decoder"] == decoder
    assert config["data"]["init_args"]["tokens"] == "Bytes"


@pytest.mark.parametrize(("count", "seeds"), [(1, (7,)), (2, (7, 3)), (4, (7, 3, 8, 9))])
def test_a_number_of_seeds_takes_the_first_ones_and_counts_on(tmp_path, count, seeds):
    assert read_grid(write(tmp_path, seeds=[7, 3]), n_seeds=count).seeds == seeds
    assert read_grid(write(tmp_path, seeds=[7, 3]), n_seeds=count, fast=True).seeds == seeds


def test_the_base_may_be_a_recipe_or_a_file_beside_the_grid(tmp_path):
    assert read_grid(write(tmp_path, base="tiny")).base["trainer"]["max_steps"] == 30
    assert read_grid(write(tmp_path, base="exp015")).base["trainer"]["max_steps"] == 400  # a grid's base
    (tmp_path / "mine.yaml").write_text("trainer: {max_steps: 9}")
    assert read_grid(write(tmp_path, base="mine.yaml")).base == {"trainer": {"max_steps": 9}}
    (tmp_path / "divided.yaml").write_text("fit: {trainer: {max_steps: 9}}")
    assert read_grid(write(tmp_path, base="divided.yaml")).base == {"trainer": {"max_steps": 9}}


def test_two_axes_give_every_pair(tmp_path):
    axes = {"placement": {"pre": {}, "post": POST}, "blocks": {4: {}, 8: {"model": {"init_args": {"x": 8}}}}}
    found = read_grid(write(tmp_path, variants=None, axes=axes, baseline="pre, blocks 4"))
    assert {name: variant.labels for name, variant in found.variants.items()} == {
        "pre, blocks 4": ("pre", "4"), "pre, blocks 8": ("pre", "8"),
        "post, blocks 4": ("post", "4"), "post, blocks 8": ("post", "8"),
    }  # fmt: skip
    arguments = configs(found)["post, blocks 8", 7]["model"]["init_args"]
    assert (arguments["x"], arguments["decoder"]["placement"]) == (8, "PostNorm")
    assert found.axes == ("placement", "blocks")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"variants": {}}, "planted has no variants"),
        ({"baseline": "pro"}, "baseline is 'pro', but the variants are: pre, post"),
        ({"seeds": []}, "has no seeds"),
        ({"seeds": 3}, "seeds is 3, but it must be a list"),
        ({"seeds": [1, 1]}, "each may be given only once"),
        ({"seeds": ["x"]}, "each seed must be a whole number of at least 0, got 'x'"),
        ({"seeds": None}, "planted.yaml has no seeds"),
        ({"sedes": [1]}, "unknown key sedes; a grid has axes, base, baseline, exponents, seeds, variants"),
        ({"base": [1]}, "base is \\[1\\], but it must be a mapping"),
        ({"variants": {"pre": {}, "post": 3}}, "variant post is 3, but it must be a mapping"),
        ({"variants": {"pre": {}, "a/b": {}}}, "variant 'a/b' must consist of letters"),
        ({"axes": {}}, "give either variants or axes"),
        ({"variants": None, "axes": {"one": {"a": {}}}}, "has 1 axes, but a map has two"),
        ({"base": "nowhere"}, "nowhere is not a shipped recipe"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(tmp_path, changes, sentence):
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        read_grid(write(tmp_path, **changes))
