"""A logger that discards everything, and a temporary folder for a module that writes files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_norms.anatomy.names import has_class_name

LOCAL = ("TensorBoardLogger", "CSVLogger")
"""Loggers whose name and version are known without asking a server."""


class StandIn(DummyLogger):
    """Takes the place of a logger: the same name and version, its folders below ``save_dir``, nothing written.

    Args:
        logger: the logger whose place it takes.
        save_dir: an existing folder, for files that the module writes by itself.

    Example:
        >>> from lightning.pytorch.loggers import CSVLogger
        >>> stand_in = StandIn(CSVLogger("logs", name="mine", version=3), ".")
        >>> stand_in.name, stand_in.version, Path(stand_in.log_dir).as_posix(), stand_in.log_image(1)
        ('mine', 3, 'mine/version_3', None)
    """

    def __init__(self, logger: Any, save_dir: str) -> None:
        super().__init__()
        is_local = has_class_name(logger, *LOCAL)
        self._name: str = (logger.name if is_local else None) or "lightning_logs"
        self._version: Any = logger.version if is_local else 0
        self._save_dir = save_dir
        Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        self._experiment = _Experiment(self.log_dir)

    @property
    @override
    def name(self) -> str:
        """Name of the logger it stands for; ``lightning_logs`` for a logger that asks a server."""
        return self._name

    @property
    @override
    def version(self) -> Any:
        """Version of the logger it stands for; 0 for a logger that asks a server."""
        return self._version

    @property
    @override
    def save_dir(self) -> str:
        """The temporary folder."""
        return self._save_dir

    @property
    @override
    def root_dir(self) -> str:
        """Folder of all versions, as TensorBoard and CSV loggers have it."""
        return str(Path(self._save_dir) / self._name)

    @property
    @override
    def log_dir(self) -> str:
        """Folder of this version, which exists."""
        version = self._version if isinstance(self._version, str) else f"version_{self._version}"
        return str(Path(self.root_dir) / version)


class _Experiment(type(DummyLogger().experiment)):  # type: ignore[misc]
    """Takes any call; its folders are real, as TensorBoard's ``log_dir`` and W&B's ``dir`` are."""

    def __init__(self, folder: str) -> None:
        self.log_dir = self.dir = folder

    def get_logdir(self) -> str:
        return self.log_dir
