"""What an import may cost: nothing heavy beyond what Lightning has loaded. Times are in benchmarks/startup.py."""

import subprocess
import sys

import pytest

HEAVY = [
    "IPython",
    "deepspeed",
    "matplotlib",
    "pandas",
    "peft",
    "scipy",
    "tensorboard",
    "tokenizers",
    "transformers",
    "wandb",
    "x_transformers",
]
"""What is for pictures, byte pairs, log files and other people's models: imported when asked for."""

CODE = """
import sys
from contextlib import redirect_stdout
from io import StringIO

import lightning.pytorch

heavy, loaded = sys.argv[1].split(","), set(sys.modules)
# torchmetrics loads some of them whenever they are installed: from here on, as if they were not.
for name in [*heavy, *(name for name in sys.modules if name.split(".")[0] in heavy)]:
    sys.modules[name] = None

import lightning_norms

packages = [{name.split(".")[0] for name in names} for names in (sys.modules, loaded, heavy)]
print(*packages[0].difference(*packages[1:], sys.stdlib_module_names))
said = StringIO()
try:
    from lightning_norms.cli.main import main

    with redirect_stdout(said):
        main(["fit", "--help"])
except SystemExit as end:
    assert not end.code
except ImportError as error:
    said.write(str(error))
print(said.getvalue())
"""


@pytest.fixture(scope="module")
def process():
    """In a process that has Lightning and where nothing heavy can be imported any more: our import, then the help."""
    command = [sys.executable, "-W", "ignore", "-c", CODE, ",".join(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    packages, _, help_text = done.stdout.partition("\n")
    return set(packages.split()), help_text


def test_the_import_loads_us_and_no_other_package(process):
    packages, _ = process
    assert packages == {"lightning_norms"}


def test_the_help_needs_nothing_heavy(process):
    _, help_text = process
    assert "--model.decoder.placement" in help_text, help_text
