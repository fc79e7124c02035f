"""Launchers with commands of a moment: locks, what is cancelled, what is said; and a cluster that only pretends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_norms.cli.main import main
from lightning_norms.comparing import launchers
from lightning_norms.comparing.launchers import Job, LocalLauncher, SubmititLauncher
from lightning_norms.comparing.locks import alone
from lightning_norms.comparing.options import make_launcher

submitit = pytest.importorskip("submitit")
fcntl = pytest.importorskip("fcntl")
LOCAL = {"cluster": "local"}
BOTH = pytest.mark.parametrize("launcher", [LocalLauncher(), SubmititLauncher(LOCAL)], ids=["local", "submitit"])


def python(code):
    return [sys.executable, "-c", code]


def start(launcher, place, code):
    """As the grid does: it holds the lock until the run has it."""
    with alone(place, lambda: None) as lock:
        return launcher.start(python(code), place, lock, "record.json")


def free(place):
    with (place / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@BOTH
def test_the_exit_code_and_the_words_of_a_command(launcher, tmp_path):
    assert start(launcher, tmp_path, "import sys; print('said'); sys.exit(7)").wait() == 7
    assert (tmp_path / "output.txt").read_text() == "said\n"


@BOTH
def test_a_run_holds_its_folder_and_stops_when_it_is_told(launcher, tmp_path):
    code = "import os, pathlib, time; pathlib.Path({!r}).write_text(str(os.getpid())); time.sleep(600)"
    started = start(launcher, tmp_path, code.format(str(tmp_path / "pid.part")))
    wait_for(lambda: (tmp_path / "pid.part").exists() and (tmp_path / "pid.part").read_text())
    assert not free(tmp_path)
    started.terminate()
    assert started.wait() == -15
    wait_for(lambda: not alive(int((tmp_path / "pid.part").read_text())))
    wait_for(lambda: free(tmp_path))


@pytest.fixture
def ignored_interrupts():
    """As under ``nohup ... &``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_job_is_cancelled_by_a_process_that_ignores_interrupts(ignored_interrupts, tmp_path):
    """submitit cancels by SIGINT, which the job would ignore too."""
    started = start(SubmititLauncher(LOCAL), tmp_path, "import time; print('on', flush=True); time.sleep(20)")
    wait_for(lambda: (tmp_path / "output.txt").exists() and (tmp_path / "output.txt").read_text())
    os.kill(os.getpid(), signal.SIGINT)  # still ignored here
    started.terminate()
    assert started.wait() == -signal.SIGTERM
    wait_for(lambda: free(tmp_path), seconds=10)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_job_waits_for_the_run_of_another_grid_and_has_nothing_left_to_do(tmp_path):
    """Handed in while another one had the folder: when that one is finished, the job's command is not run."""
    launcher = SubmititLauncher(LOCAL)
    held = (tmp_path / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    job = launcher.start(python("print('ran')"), tmp_path, None, "record.json")
    wait_for(lambda: list((tmp_path / "job").glob("*_submitted.pkl")))
    (tmp_path / "attempt_1").mkdir()
    (tmp_path / "attempt_1/record.json").write_text("{}")
    assert not (tmp_path / "output.txt").exists()
    held.close()
    assert job.wait() == 0
    assert not (tmp_path / "output.txt").exists()


def test_a_job_that_waits_in_the_queue_goes_on_when_the_folder_is_free(tmp_path):
    with alone(tmp_path, lambda: None) as lock:
        job = SubmititLauncher(LOCAL).start(python("print('ran')"), tmp_path, lock, "record.json")
        assert job.wait() == 0  # the grid is still in the folder, and gave the lock away
    assert (tmp_path / "output.txt").read_text() == "ran\n"


def test_a_jobs_own_process_needs_no_torch(tmp_path):
    """The function travels by value: else each job would load torch twice."""
    job = SubmititLauncher(LOCAL).start(python("pass"), tmp_path, None, "record.json")
    assert job.wait() == 0
    (pickled,) = (tmp_path / "job").glob("*_submitted.pkl")
    code = f"import pickle, sys; pickle.load(open({str(pickled)!r}, 'rb')); print('torch' in sys.modules)"
    said = subprocess.run(python(code), capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout == "False\n"


def test_the_seed_of_this_process_is_not_the_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "13")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = "import os; print(os.environ.get('PL_GLOBAL_SEED'), os.environ['OMP_NUM_THREADS'])"
    for name, launcher, threads in (
        ("a", LocalLauncher(jobs=10**6), 1),
        ("b", SubmititLauncher({**LOCAL, "cpus_per_task": 3}), 3),
    ):
        (tmp_path / name).mkdir()
        assert start(launcher, tmp_path / name, code).wait() == 0
        assert (tmp_path / name / "output.txt").read_text() == f"None {threads}\n"


class Dead:
    """A job that left no result of its own."""

    job_id, state = "41", "NODE_FAIL"

    class paths:
        stderr = "/shared/41_0_log.err"

    def __init__(self, words):
        self.words = words

    def done(self):
        return True

    def exception(self):
        return submitit.core.utils.UncompletedJobError(self.words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Job 41 has not produced any output (state: NODE_FAIL)", "job 41: ended as NODE_FAIL and left no result; its log is /shared/41_0_log.err"),  # noqa: E501
        ("no output (state: TIMEOUT)", "the job took longer than timeout_min, which is 5; the same command resumes from its last checkpoint"),  # noqa: E501
        ("x.UncompletedJobError: Job not requeued because: timed-out and not checkpointable.", "the job took longer than timeout_min, which is 5; the same command resumes from its last checkpoint"),  # noqa: E501
        ("trace:\n  File x\nFileNotFoundError: no python\n---", "job 41: FileNotFoundError: no python; its log is /shared/41_0_log.err"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_job_that_died_says_how(tmp_path, words, said):
    assert Job(Dead(words), tmp_path, 5, threading.Lock()).wait() == 1
    assert (tmp_path / "output.txt").read_text() == f"\nerror: {said}\n"


def test_a_process_that_is_killed_around_the_run_is_a_dead_job(tmp_path):
    """As by a node that fails."""
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)"
    job = start(SubmititLauncher(LOCAL), tmp_path, code)
    job._job._results_timeout_s = 1
    assert job.wait() == 1
    assert "and left no result; its log is" in (tmp_path / "output.txt").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["minutes"], "has 'minutes', but each must be key=value"),
        (["cluster=moon"], "AutoExecutor doesn't know any executor named moon"),
        (["cluster=slurm"], 'Could not detect "srun"'),
        (["timeout_min=soon"], 'Parameter "timeout_min" expected type'),
        (["cluster=local", "minutes=3"], "Parameter 'minutes' need to be prefixed"),
        (["tasks_per_node=4"], "tasks_per_node is 4, but a job of compare is one task on one node"),
    ],
)
def test_options_that_do_not_fit_are_a_sentence(options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_launcher("submitit", ["cluster=local"], 1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=sentence) as caught:
        make_launcher("submitit", options, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--launcher", "submitit"], "error: --launcher submitit needs the submitit library: pip install 'lightning_norms[cluster]'\n"),  # noqa: E501
        (["--launcher_options", "a=1"], "error: --launcher_options are for --launcher submitit; the local launcher has none.\n"),  # noqa: E501
    ],
)  # fmt: skip
def test_on_the_command_line_too(words, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--config", "exp015", *words])
    assert (stop.value.code, capsys.readouterr().err) == (2, sentence)
    assert not (tmp_path / "compare").exists()


# --- slurm, pretended -------------------------------------------------------------------------------------------------

COMMANDS = {
    # Runs the batch file at once, as a job of its own session; its number is the process's.
    "sbatch": """
        cp "$1" "$SPOOL/batch"
        SLURM_NTASKS=1 SLURM_JOB_NAME=submitit setsid bash -c 'export SLURM_JOB_ID=$$; exec bash "$0"' "$1" \\
            > /dev/null 2>&1 < /dev/null &
        echo "Submitted batch job $!" """,
    "srun": 'while [ "${1#--}" != "$1" ]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done; exec "$@"',
    "scancel": 'echo "$1" >> "$SPOOL/cancelled"; kill -TERM -- "-$1"',
    "sacct": "echo 'JobID|State|NodeList'",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    spool = tmp_path / "spool"
    spool.mkdir()
    for name, script in COMMANDS.items():
        (spool / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (spool / name).chmod(0o755)
    monkeypatch.setenv("SPOOL", str(spool))
    monkeypatch.setenv("PATH", f"{spool}{os.pathsep}{os.environ['PATH']}")
    place = tmp_path / "post_7_0123abcd"
    place.mkdir()
    return spool, place


def test_slurm_is_chosen_where_it_is_and_gets_the_options(slurm):
    spool, place = slurm
    launcher = make_launcher("submitit", ["timeout_min=90", "slurm_partition=gpu", "gpus_per_node=1"], 2)
    code = "import os; print(os.environ['SLURM_JOB_NAME'], 'SLURM_JOB_ID' in os.environ)"
    assert start(launcher, place, code).wait() == 0
    assert (place / "output.txt").read_text() == "interactive True\n"
    lines = (spool / "batch").read_text().splitlines()
    wanted = {"time=90", "partition=gpu", "gpus-per-node=1", "job-name=post_7_0123abcd"}
    assert {f"#SBATCH --{word}" for word in wanted} <= set(lines)


def test_what_is_stopped_is_cancelled_in_slurm(slurm, monkeypatch):
    spool, place = slurm
    monkeypatch.setattr(launchers, "GRACE", 0)
    started = start(SubmititLauncher(), place, "import time; print('on', flush=True); time.sleep(600)")
    wait_for(lambda: (place / "output.txt").exists() and (place / "output.txt").read_text())
    started.terminate()
    assert started.wait() == -signal.SIGTERM
    assert (spool / "cancelled").read_text() == f"{started._job.job_id}\n"
    wait_for(lambda: free(place))
