"""Start one of this folder's scripts as a process of its own, and leave nothing of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(folder, *command, timeout=240, directory=ROOT, environment=None):
    """What ``python -m *command`` printed; its other ranks are killed with it, as they would wait for ever."""
    words = [sys.executable, "-m", *map(str, command)]
    log = Path(folder) / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            words, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            code = "a hang"
        finally:
            if process.poll() is None or process.returncode:
                with suppress(ProcessLookupError):  # all of them are gone
                    os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, f"{' '.join(words[1:])}: {code}\n{log.read_text()[-4000:]}"
    return log.read_text()
