"""Events survive whatever ends the process, and are read back as they were."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_norms.rescue.events import Event, EventLog
from tests.rescue.event_file import lines, steps

SPIKE = Event(31, "spike", "rollback", {"loss": 9.0, "usual": 3.6, "rank": 1, "signal": "loss"}, 0.5, "step 31: back")
NON_FINITE = Event(40, "non_finite", "skip", {"loss": math.nan, "norm": math.inf, "least": -math.inf, "count": 3})


def same(one, other):
    return repr(one) == repr(other)  # NaN is not equal to itself


def test_one_object_a_line_that_any_json_reader_takes(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    log = EventLog(tmp_path / "made" / "when needed")
    assert not (tmp_path / "made").exists()
    log.append(SPIKE)
    log.append(NON_FINITE)
    text = (tmp_path / "made" / "when needed" / "events.jsonl").read_text(encoding="utf-8")
    first, second = (json.loads(line, parse_constant=refuse) for line in text.splitlines())
    assert first == {
        "step": 31,
        "cause": "spike",
        "action": "rollback",
        "evidence": {"loss": 9.0, "usual": 3.6, "rank": 1, "signal": "loss"},
        "factor": 0.5,
        "message": "step 31: back",
    }
    assert second["evidence"] == {"loss": "nan", "norm": "inf", "least": "-inf", "count": 3}


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog()
    log.append(SPIKE)
    log.resume(log.state_dict(), 10)
    assert log.folder is None
    assert list(tmp_path.iterdir()) == []


def test_kill_9_leaves_every_event_that_was_appended(tmp_path):
    script = """
import os, signal, sys
from lightning_norms.rescue.events import Event, EventLog
log = EventLog(sys.argv[1])
for step in range(3):
    log.append(Event(step, "spike", "skip"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path) == [0, 1, 2]


def test_a_line_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    EventLog(tmp_path).append(SPIKE)
    assert synced == [(tmp_path / "events.jsonl").stat().st_size] != [0]


@pytest.mark.parametrize("cut", [1, 2, 20, "all but one"])
def test_a_half_written_last_line(tmp_path, cut):
    log, path = EventLog(tmp_path), tmp_path / "events.jsonl"
    log.append(SPIKE)
    whole = path.read_bytes()
    log.append(NON_FINITE)
    second = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + second[: 1 if cut == "all but one" else -cut])
    # Only the newline is missing in the first case: then the event is there.
    assert steps(tmp_path) == ([31, 40] if cut == 1 else [31])
    EventLog(tmp_path).append(Event(50, "stall", "restart"))
    assert lines(tmp_path)[-1] == Event(50, "stall", "restart").to_plain()
    assert lines(tmp_path)[0] == SPIKE.to_plain()


def test_a_resumed_run_appends_behind_a_marker(tmp_path):
    log = EventLog(tmp_path)
    log.append(SPIKE)
    saved = log.state_dict()
    log.append(Event(44, "spike", "rollback", factor=0.25))
    resumed = EventLog(tmp_path)
    resumed.resume(saved, 40)
    assert resumed.events == [SPIKE]
    again = Event(44, "spike", "skip")
    resumed.append(again)
    assert steps(tmp_path) == [31, 44, "resumed at 40", 44]
    assert resumed.events == [SPIKE, again]


def test_resume_drops_only_what_came_later():
    log = EventLog()
    for step in (39, 40, 41):
        log.append(Event(step, "spike", "skip"))
    log.resume(log.state_dict(), 40)  # 40 steps were taken: 0 to 39
    assert [event.step for event in log.events] == [39]


def test_a_resume_without_events_makes_no_file(tmp_path):
    EventLog(tmp_path).resume({"events": []}, 40)
    assert list(tmp_path.iterdir()) == []


def test_state_passes_safe_loading(tmp_path):
    log = EventLog()
    log.append(SPIKE)
    log.append(Event(3, "spike", "skip", {"loss": torch.tensor(2.5), "finite": torch.tensor(7)}))
    log.append(NON_FINITE)
    torch.save(log.state_dict(), tmp_path / "state.pt")
    other = EventLog()
    other.resume(torch.load(tmp_path / "state.pt", weights_only=True), 50)
    assert same(other.events, log.events)
    assert other.events[1].evidence == {"loss": 2.5, "finite": 7}


def test_the_caller_keeps_no_hold_on_an_event():
    evidence = {"loss": 9.0}
    event = Event(1, "spike", "skip", evidence)
    evidence["loss"] = 1.0
    event.to_plain()["evidence"]["loss"] = 2.0
    assert event.evidence == {"loss": 9.0}
    assert hash(event) == hash(Event(1, "spike", "skip", {"loss": 9.0}))


def test_events_of_a_later_version():
    assert Event.from_plain({**SPIKE.to_plain(), "colour": "red"}) == SPIKE


def test_a_disk_that_refuses_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("in the way")
    log = EventLog(tmp_path / "file")
    with pytest.warns(UserWarning, match="memory only"):
        log.append(SPIKE)
    log.append(NON_FINITE)
    assert len(log.events) == 2
