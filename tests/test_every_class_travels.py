"""Acceptance 7: every public class through pickle, deepcopy and a spawned process; examples that are safe to import."""

import ast
import copy
import inspect
import multiprocessing
import pickle
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import lightning_norms
from lightning_norms import DecoderConfig, norms, placements, rescale_rules, schedules
from lightning_norms.model import feed_forward, initialization, positions
from lightning_norms.schedules import LinearDecay, LinearWarmup
from tests.stand_ins import Module, loader, seeded, trainer

SMALL = DecoderConfig(vocab_size=11, d_model=8, n_heads=2, n_layers=2, context_length=16)
NEEDED = {
    "ConstantRescale": {"factor": 0.5},
    "CosineDecay": {"decay_steps": 4},
    "Decoder": {"config": SMALL},
    "DecoderConfig": {"vocab_size": 11, "d_model": 8, "n_heads": 2, "n_layers": 2},
    "DecoderModule": {"decoder": SMALL},
    "FallbackExhaustedError": {},
    "Inner": {},
    "Run": {"total_steps": 9, "beta2": 0.98, "learning_rate": 1e-3},
    "InverseSqrtDecay": {"warmup_steps": 4},
    "LinearWarmup": {"warmup_steps": 4},
    "LinearDecay": {"decay_steps": 4},
    "Noam": {"d_model": 16, "warmup_steps": 4},
    "Residual": {},
    "Site": {"layer": 1, "layers": 2, "kind": "attention", "width": 8},
    "TextDataModule": {"train": "some.txt", "val": {}},
    "Then": {"first": LinearWarmup(2), "second": LinearDecay(2)},
    "WarmupStableDecay": {"warmup_steps": 4, "decay_steps": 4},
}
"""Arguments of the classes that cannot be built without any."""


FAMILIES = (lightning_norms, placements, norms, schedules, rescale_rules, feed_forward, initialization, positions)


def public(kind=object):
    """Classes of the root and of each family's module."""
    values = {name: getattr(family, name) for family in FAMILIES for name in names(family)}
    return [value for value in values.values() if isinstance(value, type) and issubclass(value, kind)]


def names(family):
    """Public names of a module; of one without ``__all__``, the recipes that are defined in it."""
    recipes = [name for name, value in vars(family).items() if is_dataclass(value)]
    return getattr(family, "__all__", [name for name in recipes if vars(family)[name].__module__ == family.__name__])


CONCRETE = [each for each in public() if not inspect.isabstract(each)]


def build(cls):
    return seeded(lambda: cls(**NEEDED.get(cls.__name__, {})))


def contents(each):
    """What two equal objects have in common, as comparable values."""
    if isinstance(each, nn.Module):
        return {name: tensor.tolist() for name, tensor in each.state_dict().items()}
    if isinstance(each, Callback):
        return repr(each.state_dict()), {
            k: v for k, v in vars(each).items() if isinstance(v, (bool, int, float, str, tuple))
        }
    if isinstance(each, BaseException):
        return each.args
    if type(each).__eq__ is object.__eq__ or "Identity()" in repr(each):  # modules are equal only to themselves
        return {name: repr(value) for name, value in vars(each).items() if not name.startswith("_")}
    return each


@pytest.mark.parametrize("cls", CONCRETE, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"])
def test_a_twin_is_equal(cls, way):
    original = build(cls)
    twin = way(original)
    assert type(twin) is cls
    assert contents(twin) == contents(original)


def test_every_name_is_a_class_or_a_function_that_pickle_finds():
    assert len(CONCRETE) > 70
    functions = [lightning_norms.describe, lightning_norms.diagnose]
    for each in [*functions, *public()]:
        assert pickle.loads(pickle.dumps(each)) is each


def use(callbacks, others, folder, answers):
    """In the other process: train with each callback, and call each schedule and rule."""
    torch.set_num_threads(1)
    said = {}
    for callback in callbacks:
        module = seeded(Module)
        trainer(folder, callback, max_steps=3).fit(module, loader())
        said[type(callback).__name__] = sum(
            float(parameter.detach().double().sum()) for parameter in module.parameters()
        )
    said["others"] = [repr(each) for each in others]
    answers.put(said)


def used_here(callback, folder):
    module = seeded(Module)
    trainer(folder, callback, max_steps=3).fit(module, loader())
    return sum(float(parameter.detach().double().sum()) for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Warmup takes")
def test_a_spawned_process_receives_and_uses_each_callback(tmp_path):
    """The weights that it trains are those that this process trains with the same callback."""
    callbacks = [build(cls) for cls in public(Callback)]
    others = [build(cls) for cls in CONCRETE if not issubclass(cls, (Callback, nn.Module))]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=use, args=(callbacks, others, tmp_path, answers))
    process.start()
    said = answers.get(timeout=120)
    process.join(timeout=60)
    assert process.exitcode == 0
    assert len(callbacks) >= 7
    for callback in callbacks:
        assert said[type(callback).__name__] == used_here(callback, tmp_path), type(callback).__name__
    assert len(said["others"]) == len(others)


EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
QUIET = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def is_guard(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_nothing_when_it_is_imported(path):
    """Where processes are spawned, as on Windows, each imports the script again: all work stands behind the guard."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert sum(map(is_guard, body)) == 1, "no `if __name__ == '__main__':`"
    docstring, *rest = body
    assert isinstance(docstring, ast.Expr)
    for node in rest:
        assert isinstance(node, QUIET) or is_guard(node), f"line {node.lineno} runs at import"
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            assert not calls, f"line {node.lineno} calls something at import"
