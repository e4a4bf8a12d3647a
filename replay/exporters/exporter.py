"""Exports rollouts with the writer of a format to a new file or folder. The simplest writer, JSON Lines, is here."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from forebay.core.binary_sample import as_json
from forebay.core.errors import InvalidInput, StorageFailed
from forebay.core.files import opener
from forebay.core.lazy_names import load_plugin
from forebay.replay.exporters.rollouts import ExportedRollout, RolloutReader
from forebay.replay.recording import Recording
from forebay.replay.recording_export import check_new

ENTRY_POINT_GROUP = "forebay.exporters"

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

WriteRollout: TypeAlias = Callable[[ExportedRollout], None]
Exporter: TypeAlias = Callable[[Path, Recording], AbstractContextManager[WriteRollout]]
"""Creates the output at the path, which does not exist, and completes it at the end of the block."""


def find_exporter(name: str) -> Exporter:
    """The writer of a format. Raises ``InvalidInput`` if none is installed, ``MissingExtra`` if it needs an extra."""
    exporter: Exporter = load_plugin(ENTRY_POINT_GROUP, name, what="format", field="to")
    return exporter


def export(rollouts: RolloutReader, exporter: Exporter, output: Path) -> tuple[int, int]:
    """Write rollouts into ``output``, which appears when it is complete. Returns the numbers of rollouts and samples.

    Raises ``InvalidInput`` if ``output`` exists or nothing is selected, ``StorageFailed`` (also if nothing that is
    selected can be read), and as iterating does.
    """
    num_rollouts = num_samples = 0
    with _new(output) as draft, exporter(draft, rollouts.recording) as write:
        for rollout in rollouts:
            write(rollout)
            num_rollouts += 1
            num_samples += len(rollout.samples)
        if not num_rollouts:
            what, hint = "there is nothing to write", "select other steps, groups or rewards"
            if rollouts.left_out:
                raise StorageFailed("what is selected cannot be read", what=what, hint=hint)
            raise InvalidInput(what, hint=hint)
    return num_rollouts, num_samples


@contextmanager
def _new(output: Path) -> Iterator[Path]:
    """A path beside ``output``, which becomes ``output`` at the end of the block, or is removed on an error."""
    check_new(output)
    draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}.partial")
    try:
        yield draft
        check_new(output)
        draft.rename(output)
    except OSError as error:
        if isinstance(error, StorageFailed):
            raise
        hint = "the folder must be writable and have room for the whole export; the partial output was removed"
        raise StorageFailed(error.strerror or str(error), what=f"{output} cannot be written", hint=hint) from error
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        draft.unlink(missing_ok=True)


@contextmanager
def jsonl(path: Path, recording: Recording) -> Iterator[WriteRollout]:  # noqa: ARG001 - as every exporter
    """Write a line per sample: the fields of its body, undecoded, then what is recorded of it, which wins."""
    with open(path, "xb", opener=opener) as file:

        def write(rollout: ExportedRollout) -> None:
            for sample in rollout.samples:
                line = msgspec.json.encode(_decode_fields(as_json(sample.body)) | rollout.recorded(sample))
                file.write(msgspec.json.format(line, indent=-1) + b"\n")  # the body may be JSON over several lines

        yield write
