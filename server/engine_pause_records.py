"""Records on disk of the engines that this server has paused; after a restart, the server resumes them."""

import logging
import os
from pathlib import Path
from typing import Literal

import msgspec

from forebay.core.files import sync_directory, write_durably
from forebay.core.weight_versions import PauseMode

logger = logging.getLogger(__name__)

Kind = Literal["update", "held", "expired"]


class PauseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The paused engines of a run."""

    run_id: str
    kind: Kind
    """``update``: a weight update of the server; ``held``: until a trainer resumes it; ``expired``: it timed out."""
    mode: PauseMode
    urls: list[str]
    """The workers that were asked to pause."""
    api_key: str | None = None
    limit_s: float = 0.0
    until_s: float = 0.0
    """When a ``held`` pause times out, in seconds since the Unix epoch."""


class PauseRecords:
    """The records in a folder, one file for each run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[PauseRecord]:
        """All records that were written and not removed. An unreadable file is logged and left alone."""
        found = sorted(self._folder.glob("*.json")) if self._folder.is_dir() else []
        return [record for path in found if (record := _read(path)) is not None]

    def write(self, record: PauseRecord) -> None:
        """Write a record, replacing an earlier one of its run; return when it is on disk. Raises ``OSError``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a record may hold the engines' key
        write_durably(self._path(record.run_id), msgspec.json.encode(record))

    def remove(self, run_id: str) -> None:
        """Remove the record of a run whose engines have resumed."""
        try:
            os.unlink(self._path(run_id))
        except FileNotFoundError:
            return
        sync_directory(self._folder)  # otherwise the record may reappear after a crash of the machine

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.json"


def _read(path: Path) -> PauseRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=PauseRecord)
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read; the engines that it names may still be paused: %s", path, error)
        return None
