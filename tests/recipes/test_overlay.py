"""A fragment put into a configuration: what is merged, what is replaced, and what another class takes with it."""

import copy

import pytest

from lightning_norms.recipes.overlay import apply_patch

POST = {"class_path": "PostNorm", "init_args": {"final_norm": True}}


def placement(before, patch):
    config = {"model": {"init_args": {"decoder": {"placement": before, "n_layers": 4}}}}
    change = {"model": {"init_args": {"decoder": {"placement": patch}}}}
    kept = copy.deepcopy((config, change))
    decoder = apply_patch(config, change)["model"]["init_args"]["decoder"]
    assert (config, change) == kept
    assert decoder["n_layers"] == 4
    return decoder["placement"]


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        # Another class: what was said of the old one goes with it.
        (POST, {"class_path": "KEEL"}, {"class_path": "KEEL"}),
        (POST, {"class_path": "KEEL", "init_args": {"x": 1}}, {"class_path": "KEEL", "init_args": {"x": 1}}),
        (POST, {"class_path": "mine.KEEL"}, {"class_path": "mine.KEEL"}),
        ({**POST, "dict_kwargs": {"y": 2}}, {"class_path": "KEEL"}, {"class_path": "KEEL"}),
        # The same class, named by a word or by its path: merged.
        (POST, {"class_path": "PostNorm", "init_args": {"x": 1}}, {"class_path": "PostNorm", "init_args": {"final_norm": True, "x": 1}}),  # noqa: E501
        (POST, {"class_path": "lightning_norms.placements.PostNorm"}, {"class_path": "lightning_norms.placements.PostNorm", "init_args": {"final_norm": True}}),  # noqa: E501
        # No class is named: it stays.
        (POST, {"init_args": {"final_norm": False}}, {"class_path": "PostNorm", "init_args": {"final_norm": False}}),
        # A word for a class.
        (POST, "KEEL", "KEEL"),
        ("PreNorm", "KEEL", "KEEL"),
        ("KEEL", POST, POST),
        ("PostNorm", {"init_args": {"final_norm": True}}, POST),
        (None, POST, POST),
        (POST, None, None),
    ],
)  # fmt: skip
def test_a_class_keeps_its_own_arguments_only(before, patch, after):
    assert placement(before, patch) == after


def test_a_class_above_takes_everything_below_with_it():
    config = {"model": {"class_path": "DecoderModule", "init_args": {"decoder": {"placement": POST}}}}
    other = {"class_path": "mine.Net", "init_args": {"width": 8}}
    assert apply_patch(config, {"model": other}) == {"model": other}


def test_callbacks_are_joined_and_one_of_a_class_takes_the_place_of_the_other():
    config = {
        "trainer": {"callbacks": [{"class_path": "Warmup", "init_args": {"schedule": "LinearWarmup"}}, "LRFallback"]}
    }
    patch = {"trainer": {"callbacks": [{"class_path": "x.Warmup"}, {"class_path": "DepthMonitor"}]}}
    assert apply_patch(config, patch)["trainer"]["callbacks"] == [
        "LRFallback", {"class_path": "x.Warmup"}, {"class_path": "DepthMonitor"}
    ]  # fmt: skip
