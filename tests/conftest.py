"""One thread, a cache of our own, no seed left behind by an earlier test, and processes that can be interrupted."""

import os
import signal

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)

# Under `nohup ... &` SIGINT is ignored, and the processes that tests start and interrupt would inherit that. A handler
# is not inherited, so this process goes on to ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: None)


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Encoded text is kept for the session, away from the user's."""
    os.environ["LIGHTNING_NORMS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """seed_everything leaves its seed in the environment; and a variable of the user's must not reach our Trainers."""
    monkeypatch.delenv("LIGHTNING_NORMS_CALLBACKS", raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    monkeypatch.delenv("PL_GLOBAL_SEED")
