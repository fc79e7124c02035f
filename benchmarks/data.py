"""Does the data module ever wait, and what does encoding a large file take?

    python benchmarks/data.py                                      tokens/s against the training step, about a minute
    python benchmarks/data.py --encode Bytes --megabytes 1000      a file of 1 GB, about 20 seconds
    python benchmarks/data.py --encode BytePairs --megabytes 1000  the same as byte pairs, about 10 minutes

Step: forward, cross-entropy, backward and AdamW (fused) of our decoder in float32, without Lightning around it, which
only makes it faster. Data: the training loader as ``TextDataModule`` makes it, in the main process too. All in turn, in
one process. Encoding: a fresh process each, watched from outside through /proc (Linux): anonymous memory is the
process's own, file-backed memory is pages of files (libraries, maps) that the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paired
import peers
from peers import Shape
from step import SHAPES, Candidate
from torch import Tensor

from lightning_norms import BytePairs, Bytes, TextDataModule
from lightning_norms.data.corpus import embedded

KINDS = {"Bytes": Bytes(), "BytePairs": BytePairs(512)}
SENTENCE = {
    "Python alone": "",
    "+ torch": "import torch",
    "+ lightning": "import lightning",
    "+ lightning_norms": "import lightning_norms",
}
"""What a process that only imports takes."""
CHILD = """
import json, sys, time
from lightning_norms import BytePairs, Bytes, TextDataModule
kind, file, folder = sys.argv[1:]
tokens = {"Bytes": Bytes(), "BytePairs": BytePairs(512)}[kind]
def say(what): print(json.dumps([what, time.perf_counter(), time.process_time()]), flush=True); sys.stdin.readline()
say("imports")
data = TextDataModule(train=file, tokens=tokens, cache_dir=folder)
_ = data.vocab_size; say("tokenizer")
data.prepare_data(); say("encoding")
data.setup(); next(iter(data.train_dataloader())); say("first batch")
again = TextDataModule(train=file, tokens=tokens, cache_dir=folder)
again.prepare_data(); say("from the cache")
"""
"""What is watched: each line of its output closes a phase, and it waits until memory has been read."""


def endless(data: TextDataModule) -> Iterator[dict[str, Tensor]]:
    """Batches, pass after pass."""
    return itertools.chain.from_iterable(data.train_dataloader() for _ in itertools.count())


def seconds(work: Callable[[], object], times: int) -> float:
    """Of one call, over a few."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begun) / times


def candidates(shape: Shape, folder: str) -> dict[str, Callable[[], float]]:
    """Tokens/s of each kind's loader, and of the step."""
    measured = dict[str, Callable[[], float]]()
    for kind, recipe in KINDS.items():
        # Everything but these three is the module's default.
        data = TextDataModule(context_length=shape.context, tokens=recipe, cache_dir=folder)
        data.prepare_data()
        data.setup()
        batches = endless(data)
        measured[kind] = lambda batches=batches: shape.tokens / seconds(lambda: next(batches), 200)
    step = Candidate(peers.ours(shape), shape, "32")
    step.seconds(2)
    measured["step"] = lambda: shape.tokens / step.seconds(4)
    return measured


def against_the_step(rounds: int, folder: str) -> None:
    """Print tokens/s of the loader over those of the step, for each shape and kind of token."""
    rows = []
    for name, shape in SHAPES.items():
        speeds = paired.in_turn(candidates(shape, folder), rounds)
        for kind in KINDS:
            middle = statistics.median(speeds[kind])
            ratio = paired.told(paired.ratios(speeds[kind], speeds["step"]), 0)
            rows.append((name, kind, f"{middle / 1e6:.2f} M", f"{statistics.median(speeds['step']):,.0f}", ratio))
    print(paired.table(("layers x width", "tokens", "data, tokens/s", "step, tokens/s", "data / step"), rows))


def write_text(file: Path, size: int) -> None:
    """So many bytes of the code that ships with Python, again and again."""
    text = b"".join(block for document in embedded("code").documents for block in document.blocks())
    with file.open("wb") as stream:
        while size > 0:
            size -= stream.write(text[:size])


def memory(process: int) -> dict[str, float]:
    """MB of a process: now, its own, of files, and the most there ever was."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = {name: fields.split() for name, _, fields in (line.partition(":") for line in lines)}
    return {name: int(found[name][0]) * 1.024e-3 for name in ("VmRSS", "RssAnon", "RssFile", "VmHWM")}


def watched(kind: str, file: Path, folder: Path) -> list[tuple[str, float, float, dict[str, float]]]:
    """Each phase of encoding: its name, seconds, processor seconds, and the most memory of each sort."""
    command = [sys.executable, "-c", CHILD, kind, str(file), str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    phases, most, before = [], dict[str, float](), (0.0, 0.0)
    while child.poll() is None:
        time.sleep(0.01)
        now = memory(child.pid) if not _is_gone(child.pid) else most
        most = {name: max(value, most.get(name, 0)) for name, value in now.items()}
        if line := child.stdout.readline():
            name, wall, processor = json.loads(line)
            phases.append((name, wall - before[0], processor - before[1], most))
            most, before = {}, (wall, processor)
            child.stdin.write("\n")
            child.stdin.flush()
    if child.returncode:
        raise RuntimeError(f"encoding ended with exit code {child.returncode}")
    return phases


def _is_gone(process: int) -> bool:
    return "VmRSS" not in Path(f"/proc/{process}/status").read_text()  # a zombie has no memory


def imports() -> None:
    """Print what processes take that do nothing but import."""
    rows = []
    tell = "; print(*(line for line in open('/proc/self/status') if line.startswith(('VmHWM', 'Rss'))))"
    for name, sentence in SENTENCE.items():
        command = [sys.executable, "-c", f"{sentence or 'pass'}{tell}"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        sizes = {key: f"{int(size) * 1.024e-3:.0f}" for key, size in zip(said[::3], said[1::3], strict=True)}
        rows.append((name, sizes["VmHWM:"], sizes["RssAnon:"], sizes["RssFile:"]))
    print(paired.table(("a process with", "peak, MB", "anonymous, MB", "file-backed, MB"), rows), end="\n\n")


def encode(kind: str, megabytes: int, folder: Path) -> None:
    """Print time and memory of each phase."""
    file = folder / "text.txt"
    write_text(file, megabytes * 10**6)
    phases = watched(kind, file, folder)
    start, rows = phases[0][3], []
    for name, wall, processor, most in phases:
        # Bytes have nothing to learn.
        speed = "" if name in ("imports", "first batch") or wall < 0.1 else f"{megabytes / wall:.0f}"
        sizes = [f"{most[key]:.0f} ({most[key] - start[key]:+.0f})" for key in ("VmHWM", "RssAnon", "RssFile")]
        rows.append((name, f"{wall:.1f}" * (name != "imports"), f"{processor:.1f}", speed, *sizes))
    header = (f"{kind}, {megabytes} MB", "s", "processor s", "MB/s", "peak, MB", "anonymous, MB", "file-backed, MB")
    print(paired.table(header, rows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encode", choices=KINDS)
    parser.add_argument("--megabytes", type=int, default=1000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.encode is None:
            against_the_step(chosen.rounds, folder)
        else:
            imports()
            encode(chosen.encode, chosen.megabytes, Path(folder))
    print(f"\n{paired.machine()}")


if __name__ == "__main__":
    main()
