"""What we add before the first line runs: to ``import lightning``, to a LightningCLI's ``fit --help``, to a Trainer.

    python benchmarks/startup.py import --rounds 4    about a minute
    python benchmarks/startup.py help --rounds 4      about a minute
    python benchmarks/startup.py hook --rounds 6      about a minute

Each figure is a fresh process's, in turn. Bytecode is there, as after an installation: the package is compiled before,
and an environment that forbids to write it is not passed on. The peers of ``fit --help`` are scripts that call
LightningCLI: with one LightningModule and one LightningDataModule of two arguments each, and in subclass mode, which
takes any of them by name, as ours does.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import paired

ROOT = Path(__file__).parents[1]
CLASSES = """
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI


class Module(LightningModule):
    def __init__(self, width: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()


class Data(LightningDataModule):
    def __init__(self, folder: str = ".", batch_size: int = 8) -> None:
        super().__init__()


"""
ANY = "LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True"
PEERS = {
    "LightningCLI, one class each: `fit --help`": "LightningCLI(Module, Data)\n",
    "LightningCLI, subclass mode: `fit --help`": f"LightningCLI({ANY})\n",
}

INSIDE = """
import time
import lightning.pytorch
begun = time.perf_counter()
import lightning_norms
print(time.perf_counter() - begun)
"""
"""Seconds that our import adds to a process that has Lightning."""

HOOK = """
import sys, time
import lightning.pytorch
from lightning.fabric.utilities.registry import _load_external_callbacks
what, begun = sys.argv[1], time.perf_counter()
if what == "ours":
    from lightning_norms_entry_point import callbacks
    found = callbacks()
else:
    found = _load_external_callbacks(what)
print(time.perf_counter() - begun)
assert found == [] and "lightning_norms" not in sys.modules
"""
GROUP = "lightning.pytorch.callbacks_factory"


def environment() -> dict[str, str]:
    """Ours, with this working tree first and nothing that changes what is measured."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "LIGHTNING_NORMS_CALLBACKS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def wall(*arguments: str) -> Callable[[], float]:
    """Seconds from start to end of a Python process."""

    def measured() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, *arguments], env=environment(), check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    return measured


def printed(*arguments: str) -> Callable[[], float]:
    """The number that a Python process prints."""
    command = [sys.executable, *arguments]
    return lambda: float(subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE).stdout)


def compared(header: str, figures: Mapping[str, Sequence[float]], base: str) -> str:
    """Seconds, what they are more than the first, and the ratio, round by round."""
    rows = []
    for name, values in figures.items():
        more = [value - other for value, other in zip(values, figures[base], strict=True)]
        ratio = paired.ratios(values, figures[base])
        rows.append((name, paired.told(values), paired.told(more), paired.told(ratio)))
    return paired.table((header, "s", "more than the first row, s", "ratio to it"), rows)


def imports(rounds: int) -> None:
    """Whole processes, and our import alone in a process that has Lightning."""
    sentences = ("import lightning", "import lightning.pytorch", "import lightning_norms")
    figures = paired.in_turn(
        {**{sentence: wall("-c", sentence) for sentence in sentences}, "inside": printed("-c", INSIDE)}, rounds
    )
    inside = figures.pop("inside")
    print(compared("process", figures, sentences[0]))
    print(f"\n`import lightning_norms` after `import lightning.pytorch`, by itself: {paired.told(inside, 3)} s.")


def help_texts(rounds: int) -> None:
    """``fit --help`` of a bare LightningCLI in two modes, and ours."""
    candidates = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, call) in enumerate(PEERS.items()):
            path = Path(folder) / f"peer{number}.py"
            path.write_text(CLASSES + call)
            candidates[name] = wall(str(path), "fit", "--help")
        candidates["`python -m lightning_norms fit --help`"] = wall("-m", "lightning_norms", "fit", "--help")
        figures = paired.in_turn(candidates, rounds)
    print(compared("command", figures, next(iter(candidates))))


def hook(rounds: int) -> None:
    """The entry point that Lightning asks whenever a Trainer is made; the environment variable is not set."""
    candidates = {
        "our module and its function": printed("-c", HOOK, "ours"),
        "Lightning's look-up of a group that nobody is in": printed("-c", HOOK, "nobody.is.in.this"),
        "Lightning's look-up of the group that we are in": printed("-c", HOOK, GROUP),
    }
    figures = paired.in_turn(candidates, rounds)
    rows = [(name, paired.told([1e3 * value for value in values])) for name, values in figures.items()]
    print(paired.table(("the first time in a process", "ms"), rows))
    empty, full = list(figures.values())[1:]
    print(f"\nDifference of the last two: {1e3 * (statistics.median(full) - statistics.median(empty)):.2f} ms.")


WHAT = {"import": imports, "help": help_texts, "hook": hook}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--rounds", type=int, default=4)
    chosen = parser.parse_args()
    compileall.compile_dir(ROOT / "lightning_norms", quiet=1)
    compileall.compile_file(ROOT / "lightning_norms_entry_point.py", quiet=1)
    WHAT[chosen.what](chosen.rounds)
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
