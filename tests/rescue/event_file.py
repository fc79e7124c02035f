"""The lines of an ``events.jsonl``, for tests."""

import json


def lines(folder):
    """Whole lines as dicts, oldest first; a last one that was cut short is left out."""
    objects = []
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            objects.append(json.loads(line))
        except ValueError:
            continue
    return objects


def steps(folder):
    """The steps of the events; behind a resume the step at which it went on, as text."""
    return [line["step"] if "step" in line else f"resumed at {line['resumed_at']}" for line in lines(folder)]
