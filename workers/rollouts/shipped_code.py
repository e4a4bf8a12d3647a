"""The run's copy of its code on the way to nodes that have not got it: a worker there unpacks it into a folder."""

import fcntl
import io
import os
import shutil
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

from forebay.generators.process.spec import RunSpec

FOLDERS = ("code", "packages")
"""Of the run's folder: the copy, and the names by which its files import each other."""
_PREFIX = "forebay-run-"


def pack_code(spec: RunSpec) -> bytes:
    """What a node needs of the run's folder; links that lead out of it stay links."""
    packed = io.BytesIO()
    run_dir = Path(spec.module_path).parents[1]
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for name in FOLDERS:
            if (run_dir / name).exists():
                archive.add(run_dir / name, name)
    return packed.getvalue()


def has_code(spec: RunSpec) -> bool:
    """Whether this machine has the run's folder, or shares it."""
    return Path(spec.module_path).exists()


def unpacked(spec: RunSpec, packed: bytes) -> RunSpec:
    """The same run with its code in a folder of this machine; those of processes that are gone are removed."""
    _remove_old()
    run_dir = _own_folder()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # Our own lead has packed it, links included; the first releases of Python 3.11 know no filters.
        archive.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
        archive.extractall(run_dir)  # noqa: S202 - see above
    module = Path(spec.module_path)
    return replace(spec, module_path=str(run_dir / module.parent.name / module.name))


def _own_folder() -> Path:
    """One that is locked for as long as this process lives: actors are killed, and clean nothing up."""
    draft = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
    _lock(draft)
    return draft.rename(draft.with_name(draft.name.removeprefix("new-")))


def _remove_old() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            os.close(_lock(folder))
        except OSError:  # somebody else's, or in use
            continue
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
