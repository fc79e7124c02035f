"""``diagnose --write_fix FILE``: the configuration with a fix in it, for ``fit --config FILE``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_norms.recipes.overlay import apply_patch, to_yaml
from lightning_norms.reports.diagnosis.data import Diagnosis


def write_fix(diagnosis: Diagnosis, file: Path, name: str | None, config: Mapping[str, Any]) -> str:
    """Write ``config`` with a fix that was tried; return one sentence on what was written.

    Args:
        diagnosis: The diagnosis that tried the fixes.
        file: The file to write.
        name: Name of the fix; None takes the best one.
        config: The configuration that was diagnosed.

    Raises:
        ValueError: If no fix of that name was tried.
    """
    fix = diagnosis.best if name is None else next((fix for fix in diagnosis.fixes if fix.name == name), None)
    if name is not None and fix is None:
        raise ValueError(f"--fix is {name!r}, but what was tried is {', '.join(fix.name for fix in diagnosis.fixes)}.")
    if name is None and diagnosis.trains:
        return f"{file} was not written: the configuration trains as it is."
    if fix is None:
        return f"{file} was not written: no change that was tried trains."
    if not fix.patch:
        return f"{file} was not written: {fix.change} has no key in this file; it is set in the module's code."
    verdicts = ", ".join(dict.fromkeys(verdict.value for verdict in fix.verdicts))
    comments = (
        f"{fix.name}: {fix.change}",
        f"in short trials: {verdicts}; without this change: {diagnosis.verdict.value}",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_yaml(apply_patch(config, fix.patch), comments), encoding="utf-8")
    return f"The configuration with {fix.name}: {file}"
